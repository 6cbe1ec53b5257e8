# SPDX-License-Identifier: Apache-2.0
"""A profile from a store, for the reports that captures have.

What a store does not keep is not there: threads, addresses, single waits, instructions of kernels,
and when within a window something was. All of a process's threads are one.

A page can show a part of what is asked for: of it is known besides, as finely as there is room for
(see detail.py), when it was and whose. All that is alike in these is then a thread.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from aiflame.agent import __version__
from aiflame.agent.losses import KINDS_BY_NAME
from aiflame.agent.model.gpu import (
    DEVICE_SAMPLE_DTYPE,
    KERNEL_TIME_DTYPE,
    NONE,
    Device,
    GpuProfile,
    Kernel,
    KernelCode,
    SharingError,
    StallReason,
    Tier,
)
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    NS_PER_S,
    SAMPLE_DTYPE,
    SPAN_DTYPE,
    WAIT_DTYPE,
    Binary,
    Difference,
    Fleet,
    FleetLabel,
    FrameKind,
    Function,
    GilState,
    Loss,
    Process,
    Profile,
    Recording,
    SampleClass,
    Stacks,
    StopReason,
    Thread,
)
from aiflame.agent.reports.change import lost_words
from aiflame.agent.reports.words import duration
from aiflame.agent.store.comparison import ComparedStack, sides_of_stacks
from aiflame.agent.store.detail import MOST_ROWS, Detail, KeptLabel, detail_of
from aiflame.agent.store.engine import Engine, Parameter
from aiflame.agent.store.rows import NO_STACK
from aiflame.agent.store.selector import (
    AGENT_LABELS,
    CLASS_WORDS,
    UNKNOWN_STACK,
    Selector,
    moment_words,
    nothing_there,
    owner_column,
)
from aiflame.gpu.attribution import ATTRIBUTED_DTYPE, Certainty
from aiflame.gpu.attribution.kernel_times import ATTRIBUTED_TIME_DTYPE

# The widest that a flame graph may be asked for; what is left out is named. More do not fit a page.
MOST_STACKS = 200_000
DEFAULT_STACKS = 20_000

# The name of what is in no stack that is shown, and its id, which no digest of 64 bits is.
LIGHTER_STACKS = "[lighter stacks]"
_LIGHTER = -1

# What devices did is no class of threads' time.
_OF_DEVICES = -1

_Member = TypeVar("_Member", bound=enum.IntEnum)


class By(enum.Enum):
    """What the outermost frames of a flame graph are."""

    SERVICE = "service"
    NODE = "node"
    NAMESPACE = "namespace"
    POD = "pod"
    CONTAINER = "container"
    VERSION = "version"
    PROCESS = "process"


class _SampleRow(NamedTuple):
    """Time of a process, a class and a stack.

    Attributes:
        process, number: What tells processes apart; see `_process_columns`.
        klass: The class's name.
        place: With detail: the bucket of time, and which value of each label.
    """

    process: str
    number: int
    klass: str
    stack_id: int
    ns: int
    samples: int
    place: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What it is of, whenever and wherever."""
        return self[:4]


class _DeviceRow(NamedTuple):
    """What a kernel did on a device, for a reason; see `_SampleRow`."""

    process: str
    number: int
    family: str
    model: str
    kernel: str
    reason: str
    period_ns: int
    launch_stack_id: int
    samples: int
    ns: int
    runs: int
    place: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A profile of a part of a store.

    Attributes:
        profile: It.
        left_out: Stacks that it has not, since there were too many.
        left_out_ns: Their time.
    """

    profile: Profile
    left_out: int
    left_out_ns: int


def profile_of(
    engine: Engine, selector: Selector, by: By, most_stacks: int, *, is_page: bool = False
) -> Found:
    """Returns the profile of a part of a store.

    Args:
        engine: The store.
        selector: Which part.
        by: What processes are told apart by.
        most_stacks: The heaviest so many (stack, process, class) are in it.
        is_page: It tells as well when its time was, and whose.

    Raises:
        NothingThere: The store has nothing of it.
    """
    rows, left_out, left_out_ns = _samples(engine, selector, by, most_stacks)
    detail = detail_of(engine, selector, ", ".join(_process_columns(by))) if is_page else None
    if detail is not None and rows:
        whole = {row.key for row in rows}
        whole_ns = left_out_ns + sum(row.ns for row in rows)
        rows = _detailed_samples(engine, selector, by, most_stacks if left_out else 0, detail)
        left_out += len(whole - {row.key for row in rows})
        left_out_ns = whole_ns - sum(row.ns for row in rows)
    most_of_devices = most_stacks if detail is None else MOST_ROWS
    device_rows: list[_DeviceRow] = []
    if not selector.classes:  # what devices did is of none
        device_rows = _device_rows(engine, selector, by, most_of_devices, detail)
    if not rows and not device_rows:
        raise nothing_there(engine, selector)
    build = _Builder(detail)
    wanted = {row.stack_id for row in rows} | {row.launch_stack_id for row in device_rows}
    build.add_stacks(_frames(engine, wanted - {NO_STACK}))
    profile = build.profile(rows, device_rows, selector)
    facts = profile.recording.facts
    if left_out_ns:
        words = f"{left_out:,} lighter stacks, {duration(left_out_ns)}"
        facts = (*facts, ("left out", words))
    if len(device_rows) == most_of_devices:
        facts = (*facts, ("of devices", f"the heaviest {most_of_devices:,} rows are here"))
    return Found(
        replace(
            profile,
            recording=replace(profile.recording, facts=facts),
            losses=_losses(engine, selector),
        ),
        left_out,
        left_out_ns,
    )


def difference_of(engine: Engine, base: Selector, new: Selector, most_stacks: int) -> Found:
    """Returns one profile of two parts of a store that are compared.

    Frames are those of one function if name and kind are, as in a table of functions, and of Python
    the file's name too: versions have other lines, and are installed elsewhere. Processes are not
    told apart, for the same reason.

    Args:
        engine: The store.
        base: What is compared with.
        new: What is compared; both of one class of time.
        most_stacks: Those with the largest shares are in it, so many.
    """
    (klass,) = new.classes
    found = sides_of_stacks(engine, base, new, most_stacks)
    build = _NamesOnly(None)
    build.add_stacks(_frames(engine, {stack.stack_id for stack in found.stacks} - {NO_STACK}))
    common = {
        label: values for label, values in new.labels.items() if base.labels.get(label) == values
    }
    name = ", ".join(" or ".join(values) for values in common.values()) or "[all]"
    # What is left out is no frame's, but is part of the whole: shares stay what they are.
    build.add_marker(_LIGHTER, LIGHTER_STACKS)
    lighter = ComparedStack(_LIGHTER, found.left_out_ns, found.left_out_samples)
    rows = [
        _SampleRow(name, 0, klass, one.stack_id, one.ns[side], one.samples[side], (0, side))
        for one in (*found.stacks, lighter)
        for side in (0, 1)
        if one.ns[side]
    ]
    base_words, new_words = _own_words(base, new, common), _own_words(new, base, common)
    profile = build.profile(rows, [], new)
    facts = [*profile.recording.facts, ("base", base.words), ("new", new.words)]
    left_out_ns = sum(found.left_out_ns)
    if left_out_ns:
        left_out = f"{found.left_out:,} lighter stacks, {duration(left_out_ns)}"
        facts.append(("left out", left_out))
    if any(found.lost):
        facts.append(("stack lost, in no share", lost_words(found.lost)))
    return Found(
        replace(
            profile,
            recording=replace(
                profile.recording,
                target=f"{name}, {new_words} against {base_words}",
                facts=tuple(facts),
            ),
            losses=_losses(engine, _around(base, new)),
            fleet=None,
            difference=Difference(base_words, new_words, build.is_new, CLASS_WORDS[klass]),
        ),
        found.left_out,
        left_out_ns,
    )


def _own_words(one: Selector, other: Selector, common: Mapping[str, tuple[str, ...]]) -> str:
    """Returns what is chosen for a side and not for the other."""
    own = {label: values for label, values in one.labels.items() if label not in common}
    words = [f"{label} {' or '.join(values)}" for label, values in own.items()]
    if (one.begin_s, one.end_s) != (other.begin_s, other.end_s) or not words:
        words.append(f"{moment_words(one.begin_s)} to {moment_words(one.end_s)}")
    return ", ".join(words)


def _around(base: Selector, new: Selector) -> Selector:
    """Returns what both sides are part of."""
    labels = {
        label: tuple(dict.fromkeys((*base.labels[label], *values)))
        for label, values in new.labels.items()
        if label in base.labels
    }
    return Selector(min(base.begin_s, new.begin_s), max(base.end_s, new.end_s), labels)


def _losses(engine: Engine, selector: Selector) -> tuple[Loss, ...]:
    """Returns what agents lost meanwhile: of whole hosts, whatever else is asked for."""
    hosts = {name: values for name, values in selector.labels.items() if name in AGENT_LABELS}
    where, values = Selector(selector.begin_s, selector.end_s, hosts).where()
    rows = engine.query(
        f"SELECT loss, sum(lost) FROM agents WHERE {where} AND loss != ''"
        " GROUP BY loss ORDER BY loss",
        values,
    ).rows
    meanings = {name: kind.meaning for name, kind in KINDS_BY_NAME.items()}
    return tuple(Loss(name, int(lost), meanings.get(name, "")) for name, lost in rows)


def _process_columns(by: By) -> tuple[str, str]:
    """Returns expressions for a process's name and number."""
    # A pid of one host says nothing of another's, and nothing of a service.
    return ("comm", "pid") if by is By.PROCESS else (owner_column(by.value), "0")


def _grouped(selector: Selector, by: By) -> tuple[str, dict[str, Parameter]]:
    where, values = selector.where()
    name, number = _process_columns(by)
    return (
        f"SELECT {name} AS process, {number} AS number, class, stack_id,"
        " sum(value) AS v, sum(events) AS n FROM samples"
        f" WHERE {where} GROUP BY process, number, class, stack_id"
    ), values


# The same ones whenever it is asked.
_HEAVIEST = " ORDER BY v DESC, n DESC, stack_id, process, number, class LIMIT {most:UInt64}"


def _samples(
    engine: Engine, selector: Selector, by: By, most: int
) -> tuple[list[_SampleRow], int, int]:
    """Returns the heaviest rows, how many others there are, and their time."""
    grouped, values = _grouped(selector, by)
    found = engine.query(
        f"SELECT process, number, class, stack_id, v, n FROM ({grouped}) AS g{_HEAVIEST}",
        {**values, "most": most},
    )
    rows = [*map(_sample_row, found.rows)]
    if len(rows) < most:
        return rows, 0, 0
    ((count, whole),) = engine.query(
        f"SELECT count(), sum(v) FROM ({grouped}) AS g",
        values,
    ).rows
    return rows, int(count) - len(rows), int(whole) - sum(row.ns for row in rows)


def _sample_row(columns: Sequence[Any]) -> _SampleRow:
    process, number, klass, *numbers = columns
    stack_id, ns, count, *place = map(int, numbers)
    return _SampleRow(str(process), int(number), str(klass), stack_id, ns, count, tuple(place))


def _device_row(columns: Sequence[Any]) -> _DeviceRow:
    process, number, *rest = columns
    family, model, kernel, reason = map(str, rest[:4])
    period_ns, stack_id, count, ns, runs, *place = map(int, rest[4:])
    return _DeviceRow(
        *(str(process), int(number), family, model, kernel, reason),
        *(period_ns, stack_id, count, ns, runs, tuple(place)),
    )


def _detailed_samples(
    engine: Engine, selector: Selector, by: By, most: int, detail: Detail
) -> list[_SampleRow]:
    """Returns rows as `_samples`, with their bucket and values; of the `most` heaviest, 0: all."""
    where, values = selector.where()
    name, number = _process_columns(by)
    columns = [f"{column} AS d{i}" for i, column in enumerate(detail.columns)]
    keys = [f"d{i}" for i in range(len(columns))]
    chosen = ""
    if most:
        grouped, _ = _grouped(selector, by)
        heaviest = f"SELECT process, number, class, stack_id FROM ({grouped}) AS g{_HEAVIEST}"
        chosen = f" AND ({name}, {number}, class, stack_id) IN ({heaviest})"
    found = engine.query(
        f"SELECT {name} AS process, {number} AS number, class, stack_id, sum(value) AS v,"
        f" sum(events) AS n, {', '.join(columns)} FROM samples WHERE {where}{chosen}"
        f" GROUP BY process, number, class, stack_id, {', '.join(keys)}"
        f" ORDER BY v DESC, n DESC, stack_id, process, number, class, {', '.join(keys)}"
        " LIMIT {rows:UInt64}",
        {**values, **detail.parameters, "most": most, "rows": MOST_ROWS},
    )
    return [*map(_sample_row, found.rows)]


def _device_rows(
    engine: Engine, selector: Selector, by: By, most: int, detail: Detail | None
) -> list[_DeviceRow]:
    where, values = Selector(selector.begin_s, selector.end_s, selector.labels).where()
    name, number = _process_columns(by)
    more = detail.columns if detail is not None else ()
    columns = "".join(f", {column} AS d{i}" for i, column in enumerate(more))
    keys = "".join(f", d{i}" for i in range(len(more)))
    found = engine.query(
        f"SELECT {name} AS process, {number} AS number,"
        " family, model, kernel, reason, period_ns, launch_stack, sum(samples) AS n,"
        f" sum(busy_ns) AS ns, sum(runs) AS r{columns} FROM gpu WHERE {where}"
        " GROUP BY process, number, family, model, kernel, reason, period_ns,"
        f" launch_stack{keys} HAVING n > 0 OR ns > 0"
        " ORDER BY n DESC, ns DESC, process, number, family, model, kernel, reason,"
        f" launch_stack{keys}"
        " LIMIT {most:UInt64}",
        {**values, **(detail.parameters if detail is not None else {}), "most": most},
    )
    return [*map(_device_row, found.rows)]


# Of one question for frames. They are a parameter, which stands in the URL: with 23 bytes each it
# stays below the 64 KiB that servers in between take at most.
_IDS_AT_ONCE = 2_000


def _frames(engine: Engine, ids: set[int]) -> Iterable[list[Any]]:
    ordered = sorted(ids)
    for first in range(0, len(ordered), _IDS_AT_ONCE):
        yield from engine.query(
            "SELECT stack_id, any(frames), any(kinds), any(modules), any(files), any(lines),"
            " any(ending), any(gil) FROM stacks WHERE stack_id IN {ids:Array(UInt64)}"
            " GROUP BY stack_id ORDER BY stack_id",
            {"ids": ordered[first : first + _IDS_AT_ONCE]},
        ).rows


def _member(kind: type[_Member], name: object) -> _Member:
    """Returns the member of a name; one that a later version knows is the last that this knows."""
    found = kind.__members__.get(str(name).upper())
    return found if found is not None else [*kind][-1]


class _Builder:
    """Numbers what a profile has, each once."""

    def __init__(self, detail: Detail | None) -> None:
        self._detail = detail
        self._binaries: dict[Binary, int] = {}
        self._functions: dict[Function, int] = {}
        self._frames: dict[tuple[int, int], int] = {}
        self._processes: dict[tuple[str, int], int] = {}
        # By process, class of what it has (_OF_DEVICES), and values of labels.
        self._threads: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._paths: list[list[int]] = []
        self._ends: list[int] = []
        self._gil: list[int] = []
        self._stacks: dict[int, int] = {}
        self._thread_of_kernel: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def add_stacks(self, rows: Iterable[Sequence[Any]]) -> None:
        for stack_id, names, kinds, modules, files, lines, ending, gil in rows:
            # Of rows that are not of one length, what all have.
            columns = zip(names, kinds, modules, files, lines, strict=False)
            frames = [self._frame(*column) for column in columns]
            self._add(
                int(stack_id), frames[::-1], _member(StopReason, ending), _member(GilState, gil)
            )

    def add_marker(self, stack_id: int, name: str) -> None:
        """Adds a stack of one frame that stands for others."""
        frame = self._frame(name, "marker", "", "", 0)
        self._add(stack_id, [frame], StopReason.ROOTED, GilState.NO_PYTHON)

    def _stack(self, stack_id: int) -> int:
        if stack_id not in self._stacks:
            self.add_marker(stack_id, UNKNOWN_STACK)
        return self._stacks[stack_id]

    def _add(self, stack_id: int, frames: list[int], end: StopReason, gil: GilState) -> None:
        self._stacks[stack_id] = len(self._paths)
        self._paths.append(frames)
        self._ends.append(end)
        self._gil.append(gil)

    def _frame(self, name: str, kind: str, module: str, file: str, line: int) -> int:
        binary = None
        if module:
            binary = self._binaries.setdefault(Binary(module, ""), len(self._binaries))
        function = Function(
            FrameKind.__members__.get(kind.upper(), FrameKind.NATIVE), name, binary, file
        )
        number = self._functions.setdefault(function, len(self._functions))
        return self._frames.setdefault((number, int(line)), len(self._frames))

    def _process(self, name: str, number: int) -> int:
        return self._processes.setdefault((name, number), len(self._processes))

    def _thread(self, process: int, klass: int, values: Sequence[int]) -> int:
        """Returns the number of what is alike, without detail the only thread of its process."""
        key = (process, klass if self._detail is not None else 0, tuple(values))
        return self._threads.setdefault(key, len(self._threads))

    def _gpu(self, rows: Sequence[_DeviceRow]) -> GpuProfile:
        devices: dict[tuple[str, str, int], int] = {}
        kernels: dict[tuple[int, int, str, str], int] = {}
        reasons: dict[StallReason, int] = {}
        samples: list[tuple[int, ...]] = []
        times: list[tuple[int, ...]] = []
        attributed, attributed_times = [], []
        for row in rows:
            first_s, end_ns = 0, 0
            if self._detail is not None:
                first_s = row.place[0] * self._detail.bucket_s
                end_ns = first_s * NS_PER_S
            device = devices.setdefault((row.family, row.model, row.period_ns), len(devices))
            owner = self._process(row.process, row.number)
            of = self._thread(owner, _OF_DEVICES, row.place[1:])
            named = kernels.setdefault((owner, of, row.family, row.kernel), len(kernels))
            is_known = row.launch_stack_id != NO_STACK
            stack = self._stack(row.launch_stack_id) if is_known else NONE
            # Who shared what is not kept.
            certainty = Certainty.UNATTRIBUTED if stack == NONE else Certainty.SHARED
            if row.reason and row.samples:
                reason = reasons.setdefault(StallReason(row.family, row.reason), len(reasons))
                attributed.append((len(samples), stack, certainty, row.samples))
                begin_end = (end_ns, end_ns)
                samples.append((first_s, device, named, 0, reason, NONE, *begin_end, row.samples))
            elif row.ns:
                attributed_times.append((len(times), stack, certainty, row.ns))
                times.append((device, named, 0, NONE, end_ns, end_ns, row.runs, row.ns, NONE))
        self._thread_of_kernel = np.array([of for _, of, *_ in kernels], np.int64)
        sampled = {sample[1] for sample in samples}
        return GpuProfile(
            devices=tuple(
                Device(family, model, Tier.STALLS if i in sampled else Tier.TIMES, "", period_ns)
                for (family, model, period_ns), i in devices.items()
            ),
            kernels=tuple(Kernel(owner, family, name, "") for owner, _, family, name in kernels),
            codes=tuple(KernelCode(i, None, 0) for i in range(len(kernels))),
            reasons=tuple(reasons),
            samples=np.array(samples, DEVICE_SAMPLE_DTYPE),
            times=np.array(times, KERNEL_TIME_DTYPE),
            attributed=np.array(attributed, ATTRIBUTED_DTYPE),
            error=SharingError(0.0, 0.0),
            attributed_times=np.array(attributed_times, ATTRIBUTED_TIME_DTYPE),
        )

    def _samples(
        self, rows: Sequence[_SampleRow]
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Returns samples, and when they were."""
        numbers: dict[tuple[int, int, int], int] = {}
        spans = []
        for row in rows:
            klass = _member(SampleClass, row.klass)
            owner = self._process(row.process, row.number)
            thread = self._thread(owner, klass, row.place[1:])
            sample = numbers.setdefault((self._stack(row.stack_id), thread, klass), len(numbers))
            # All of a bucket is in its first second: the page knows no shorter time.
            first_s = row.place[0] * self._detail.bucket_s if self._detail is not None else 0
            spans.append((sample, first_s, 1, row.samples, row.ns))
        table = np.zeros(len(numbers), SAMPLE_DTYPE)
        if numbers:
            table["stack"], table["thread"], table["klass"] = np.array(list(numbers)).T
        found = np.array(spans, SPAN_DTYPE)
        for column in ("count", "ns"):
            np.add.at(table[column], found["sample"], found[column])
        return table, found if self._detail is not None else found[:0]

    def _fleet(self, samples: npt.NDArray[np.void], selector: Selector) -> Fleet:
        detail = self._detail
        if detail is None:
            detail = Detail(
                selector.begin_s, selector.end_s, selector.end_s - selector.begin_s, labels=()
            )
        ns = np.zeros(len(self._threads), np.uint64)
        np.add.at(ns, samples["thread"], samples["ns"])
        values = np.array([found for *_, found in self._threads], np.int64)
        labels = [_label(label, values[:, i], ns) for i, label in enumerate(detail.labels)]
        classes = [klass for _, klass, _ in self._threads]
        there = sorted({*classes} - {_OF_DEVICES}) if self._detail is not None else []
        if len(there) > 1:
            which = np.array([there.index(k) if k in there else -1 for k in classes], np.int64)
            labels.append(FleetLabel("class", tuple(SampleClass(k).label for k in there), 0, which))
        when = f"{moment_words(detail.begin_s)} to {moment_words(detail.end_s)}"
        return Fleet(when, detail.begin_s, detail.bucket_s, tuple(labels), self._thread_of_kernel)

    def profile(
        self,
        rows: Sequence[_SampleRow],
        device_rows: Sequence[_DeviceRow],
        selector: Selector,
    ) -> Profile:
        """Returns the profile of rows."""
        table, spans = self._samples(rows)
        gpu = self._gpu(device_rows)
        fleet = self._fleet(table, selector)
        begin_s, end_s = selector.begin_s, selector.end_s
        if self._detail is not None:
            begin_s, end_s = self._detail.begin_s, self._detail.end_s
        processes = tuple(
            Process(number, 0, name or "[not known]", "", "", "", "", 0, None)
            for name, number in self._processes
        )
        on_cpu = table[table["klass"] == SampleClass.ON_CPU]
        count = int(on_cpu["count"].sum())
        return Profile(
            recording=Recording(
                aiflame_version=__version__,
                started_unix_ns=begin_s * NS_PER_S,
                duration_ns=(end_s - begin_s) * NS_PER_S,
                period_ns=int(on_cpu["ns"].sum()) // count if count else 0,
                command="",
                target=selector.words_with_class,
                recorder_cpu_ns=0,
                recorder_peak_rss_bytes=0,
                facts=(("from", "a fleet store: all threads of a process are one"),),
            ),
            processes=processes,
            threads=tuple(
                Thread(i, processes[i].pid, processes[i].name, 0, 0) for i, *_ in self._threads
            ),
            binaries=tuple(self._binaries),
            functions=tuple(self._functions),
            frames=np.array(
                [(function, line, 0, False) for function, line in self._frames], FRAME_DTYPE
            ),
            stacks=Stacks(
                np.cumsum([0, *map(len, self._paths)], dtype=np.uint64),
                np.array([frame for path in self._paths for frame in path], np.uint32),
                np.array(self._ends, np.uint8),
                np.array(self._gil, np.uint8),
            ),
            samples=table,
            waits=np.zeros(0, WAIT_DTYPE),
            gpu=gpu,
            spans=spans,
            fleet=fleet,
        )


class _NamesOnly(_Builder):
    """Merges functions of several versions; see `difference_of`."""

    @property
    def is_new(self) -> npt.NDArray[np.bool_]:
        """By thread, which side it is."""
        return np.array([side for *_, (side,) in self._threads], np.bool_)

    def _frame(self, name: str, kind: str, module: str, file: str, line: int) -> int:
        folder, slash, last = file.rpartition("/")
        shown = f".../{last}" if slash and folder else file
        return super()._frame(name, kind, "", shown if kind == "python" else "", 0)


def _label(
    label: KeptLabel, found: npt.NDArray[np.int64], ns: npt.NDArray[np.uint64]
) -> FleetLabel:
    """Returns a label as reports know it, the values with most time first.

    Args:
        label: It.
        found: By thread, 0 for others, else which value, from 1 on.
        ns: Time by thread.
    """
    size = len(label.values)
    sums = np.zeros(size + 1, np.uint64)
    np.add.at(sums, found, ns)
    order = np.argsort(-sums[1:].astype(np.float64), kind="stable")
    place = np.full(size + 1, size)
    place[1 + order] = np.arange(size)
    return FleetLabel(
        label.name, tuple(label.values[i] for i in order.tolist()), label.others, place[found]
    )
