# SPDX-License-Identifier: Apache-2.0
"""How finely a page tells the rows of a store apart: by time, and by label.

A fleet has more of both than a page can hold. So time is in buckets, of each label only the values
with most weight have a name, and both are as fine as leaves a page small enough to be opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from aiflame.agent.reports.buckets import width_of
from aiflame.agent.store.engine import Engine, Parameter
from aiflame.agent.store.selector import Selector

# What a reader filters by: labels of which a fleet has few values, and those of which it may have
# thousands. Of containers their names: an id is of one that is gone tomorrow.
_FEW = ("service", "version", "cluster", "namespace", "workload")
_MANY = ("node", "pod", "container", "comm")

# Rows (stack, class, values of labels, bucket) of a page: each is 5 to 10 bytes of its file.
MOST_ROWS = 1_000_000
# So many tell how many all of them make.
_PROBED_ROWS = 500_000
# Different values of all labels together: each is some 60 bytes of the page.
_MOST_WHO = 20_000

# Buckets, values of each label of few, and of each of many, that a page has at most; the first with
# which it is small enough is taken. A strip on a wide screen has a bar each 5 pixels, and nobody
# reads a list of more names. The last one is bounded whatever a fleet has.
_FINENESS = (
    *((300, 100, 100), (150, 100, 50), (60, 50, 30), (60, 50, 12), (30, 30, 5), (20, 20, 2)),
    *((12, 12, 1), (12, 5, 1), (6, 1, 1)),
)

# Of one label, as they are in a URL: all of them together are below the 64 KiB that servers in
# between take at most.
_MOST_NAME_BYTES = 4_000


@dataclass(frozen=True, slots=True)
class KeptLabel:
    """A label with several values.

    Attributes:
        name: Its column.
        values: Those that are told apart, most weight first.
        others: How many more there are.
    """

    name: str
    values: tuple[str, ...]
    others: int


@dataclass(frozen=True, slots=True)
class Detail:
    """How finely rows are told apart.

    Attributes:
        begin_s: The first bucket begins then, in seconds of Unix: with the first window.
        end_s: The last window ends then.
        bucket_s: How long a bucket is. A window is in the one in which it began.
        labels: Those with several values.
    """

    begin_s: int
    end_s: int
    bucket_s: int
    labels: tuple[KeptLabel, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Expressions: the bucket, then of each label 0 for others, else which one, from 1 on."""
        bucket = f"intDiv(toUInt32(t) - {int(self.begin_s)}, {int(self.bucket_s)})"
        return bucket, *(
            f"transform(toString({label.name}), {{d_{label.name}:Array(String)}},"
            f" range(1, {len(label.values) + 1}), 0)"
            for label in self.labels
        )

    @property
    def parameters(self) -> dict[str, Parameter]:
        """What the expressions need."""
        return {f"d_{label.name}": list(label.values) for label in self.labels}


def detail_of(engine: Engine, selector: Selector, apart: str) -> Detail | None:
    """Returns how finely a part of a store can be told apart on a page; None for an empty one.

    Args:
        engine: The store.
        selector: Which part.
        apart: Columns that are told apart whatever they are.
    """
    tables = _tables(selector)
    values = {**tables["gpu"][1], **tables["samples"][1]}
    ends = " UNION ALL ".join(
        f"SELECT count() AS n, toUInt32(min(t)) AS a, toUInt32(max(t + span_s)) AS b,"
        f" max(span_s) AS s FROM {table} WHERE {where}"
        for table, (where, _) in tables.items()
    )
    ((count, begin_s, end_s, window_s),) = engine.query(
        f"SELECT sum(n), minIf(a, n > 0), maxIf(b, n > 0), max(s) FROM ({ends}) AS e", values
    ).rows
    if not count:
        return None
    begin_s, end_s, window_s = int(begin_s), int(end_s), max(1, int(window_s))
    labels = tuple(filter(None, (_kept(engine, tables, values, name) for name in (*_FEW, *_MANY))))
    widths = [width_of(end_s - begin_s, window_s, buckets) for buckets, *_ in _FINENESS]
    finest = Detail(begin_s, end_s, widths[0], labels)
    # What a page would have is told by a part of the stacks, which are numbered by chance.
    stride = 1 + int(count) // _PROBED_ROWS
    where = f"{tables['samples'][0]} AND stack_id % {stride} = 0"
    which = _fitting(engine, where, values, finest, widths, apart, stride)
    return Detail(
        begin_s, end_s, widths[which], tuple(_at_most(kept, _most(kept, which)) for kept in labels)
    )


def _tables(selector: Selector) -> dict[str, tuple[str, dict[str, Parameter]]]:
    of_devices = Selector(selector.begin_s, selector.end_s, selector.labels)
    return {"samples": selector.where(), "gpu": of_devices.where()}


def _kept(
    engine: Engine,
    tables: dict[str, tuple[str, dict[str, Parameter]]],
    values: dict[str, Parameter],
    name: str,
) -> KeptLabel | None:
    # What devices did is no time of threads: a value is weighed by the larger of its shares.
    weights = {"samples": ("sum(value)", "0"), "gpu": ("0", "sum(samples) + sum(busy_ns)")}
    sums = " UNION ALL ".join(
        f"SELECT toString({name}) AS k, toFloat64({weights[table][0]}) AS v,"
        f" toFloat64({weights[table][1]}) AS g FROM {table} WHERE {where} GROUP BY k"
        for table, (where, _) in tables.items()
    )
    rows = engine.query(
        "SELECT k, count() OVER () AS every,"
        " greatest(vs / greatest(1, sum(vs) OVER ()), gs / greatest(1, sum(gs) OVER ())) AS share"
        f" FROM (SELECT k, sum(v) AS vs, sum(g) AS gs FROM ({sums}) AS u GROUP BY k) AS s"
        " ORDER BY share DESC, k LIMIT {most:UInt64}",
        {**values, "most": _FINENESS[0][1]},
    ).rows
    if len(rows) < 2:
        return None
    names: list[str] = []
    room = _MOST_NAME_BYTES
    for key, *_ in rows:
        room -= len(quote(str(key))) + len("'',")
        if room < 0 and names:
            break
        names.append(str(key))
    return KeptLabel(name, tuple(names), int(rows[0][1]) - len(names))


def _most(kept: KeptLabel, fineness: int) -> int:
    _, few, many = _FINENESS[fineness]
    return few if kept.name in _FEW else many


def _at_most(kept: KeptLabel, most: int) -> KeptLabel:
    gone = max(0, len(kept.values) - most)
    return KeptLabel(kept.name, kept.values[:most], kept.others + gone)


def _fitting(
    engine: Engine,
    where: str,
    values: dict[str, Parameter],
    finest: Detail,
    widths: list[int],
    apart: str,
    stride: int,
) -> int:
    """Returns the first fineness with which a page is small enough, else the last."""
    bucket, *named = finest.columns
    keys = [f"k{i}" for i in range(len(named))]
    columns = ", ".join(
        [
            f"cityHash64({apart}) AS own, cityHash64(class, stack_id) AS what, {bucket} AS b",
            *(f"{column} AS {key}" for column, key in zip(named, keys, strict=True)),
        ]
    )
    counts = []
    for i, width in enumerate(widths):
        most = [_most(kept, i) for kept in finest.labels]
        named = [f"if({key} > {n}, 0, {key})" for key, n in zip(keys, most, strict=True)]
        who = ", ".join(["own", *named])
        # Buckets of the finest need not end with those of a coarser one: it is an estimate.
        coarse = f"intDiv(b * {finest.bucket_s}, {width})"
        counts += [f"uniq(cityHash64({who}))", f"uniq(cityHash64(what, {coarse}, {who}))"]
    grouped = f"SELECT DISTINCT {columns} FROM samples WHERE {where}"
    (found,) = engine.query(
        f"SELECT {', '.join(counts)} FROM ({grouped}) AS g", {**values, **finest.parameters}
    ).rows
    fits = [
        int(found[2 * i]) <= _MOST_WHO and int(found[2 * i + 1]) * stride <= MOST_ROWS
        for i in range(len(_FINENESS))
    ]
    return fits.index(True) if any(fits) else len(fits) - 1
