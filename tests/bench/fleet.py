#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A store of many hosts, made of one capture: its size, and how long questions take.

The capture's rows are given to each host and minute, a part of them by chance, with values that
vary: what a host has in a minute is as many rows as it says here, of that many distinct stacks.
Generated, not recorded: real hosts have more different stacks, and other repetitions.

    python tests/bench/fleet.py CAPTURE --hosts 1000 --minutes 10 30 60 --rows 200
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from aiflame.agent.commands.captures import read_recording
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.store import questions
from aiflame.agent.store.comparison import compare
from aiflame.agent.store.engines import DirectoryEngine, open_store
from aiflame.agent.store.inserts import inserts_of
from aiflame.agent.store.profiles import DEFAULT_STACKS, By, profile_of
from aiflame.agent.store.schema import migrate
from aiflame.agent.store.selector import Selector

_BEGIN_S = 1_795_392_000
_TRIES = 3
_SERVICES = 20


def _template(engine: DirectoryEngine, capture: Path) -> int:
    """Puts the capture's rows into a table of their own; returns how many."""
    profile = read_recording(capture)
    batch = Batch(Labels("s"), profile, _BEGIN_S * 10**9, 60 * 10**9)
    for piece in inserts_of([batch], "", lambda _: True):
        engine.insert(piece.table.value, piece.rows, piece.token)
    engine.execute("CREATE TABLE template ENGINE = Memory AS SELECT * FROM samples")
    for table in ("samples", "stacks_1h", "agents"):
        engine.execute(f"TRUNCATE TABLE {table}")
    return int(engine.query("SELECT count() FROM template").rows[0][0])


def _fill(engine: DirectoryEngine, hosts: int, begin: int, end: int, share: float) -> float:
    """Adds minutes from begin to end; returns how many seconds that took."""
    started = time.monotonic()
    for minute in range(begin, end):
        engine.execute(
            f"INSERT INTO samples SELECT toDateTime({_BEGIN_S + minute * 60}) AS t,"  # noqa: S608
            " 60 AS span_s, class, unit,"
            " 'c' AS cluster, concat('node-', toString(h)) AS node,"
            f" concat('service-', toString(h % {_SERVICES})) AS service,"
            f" if(h < {hosts // 2}, '1', '2') AS version, 'ns' AS namespace,"
            " concat('pod-', toString(h)) AS pod, '' AS workload, 'c' AS container,"
            " '' AS container_id, pid, comm, labels, stack_id,"
            " toUInt64(value * (0.5 + rand(1) / 4294967296)) AS value,"
            " greatest(1, toUInt64(events * (0.5 + rand(2) / 4294967296))) AS events"
            f" FROM template CROSS JOIN (SELECT number AS h FROM numbers({hosts})) AS hosts"
            f" WHERE rand(3) < {share} * 4294967296"
        )
    return time.monotonic() - started


def _ask(engine: DirectoryEngine, minutes: int) -> dict[str, float]:
    """Returns the median time of each question over everything, in seconds."""
    whole = Selector(_BEGIN_S, _BEGIN_S + minutes * 60, {}, ("on_cpu",))
    one = Selector(whole.begin_s, whole.end_s, {"service": ("service-3",)}, ("on_cpu",))
    node = Selector(whole.begin_s, whole.end_s, {"node": ("node-7",)}, ("on_cpu",))
    sides = [
        Selector(one.begin_s, one.end_s, {**one.labels, "version": (v,)}, one.classes) for v in "12"
    ]
    asked = {
        "top, all": lambda: questions.top(engine, whole, 20),
        "top, one service": lambda: questions.top(engine, one, 20),
        "top, one node": lambda: questions.top(engine, node, 20),
        "flame, all": lambda: profile_of(engine, whole, By.SERVICE, DEFAULT_STACKS),
        "flame, one service": lambda: profile_of(engine, one, By.SERVICE, DEFAULT_STACKS),
        "diff, one service": lambda: compare(engine, *sides, is_self=False, least_share=0.002),
    }
    found = {}
    for name, question in asked.items():
        took = []
        for _ in range(_TRIES):
            started = time.monotonic()
            question()
            took.append(time.monotonic() - started)
        found[name] = statistics.median(took)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("capture", type=Path)
    parser.add_argument("--hosts", type=int, default=1_000)
    parser.add_argument("--minutes", type=int, nargs="+", default=[10, 30, 60])
    parser.add_argument("--rows", type=int, default=200, help="of a host and minute")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = open_store(str(Path(folder) / "fleet"), is_read_only=False, is_new=True)
        assert isinstance(engine, DirectoryEngine)
        migrate(engine, 0)
        size = _template(engine, args.capture)
        share = min(1.0, args.rows / size)
        print(f"{size} rows of the capture, {share:.2f} of them for each host and minute")
        done = 0
        for minutes in args.minutes:
            took = _fill(engine, args.hosts, done, minutes, share)
            done = minutes
            ((rows,),) = engine.query("SELECT count() FROM samples").rows
            sizes = engine.query(
                "SELECT table, sum(data_compressed_bytes) FROM system.parts"
                " WHERE active AND database = currentDatabase() GROUP BY table ORDER BY table"
            ).rows
            print(f"{args.hosts} hosts, {minutes} min: {rows:,} rows, added in {took:.1f} s")
            for table, size_bytes in sizes:
                each = int(size_bytes) / rows
                print(f"  {table:16} {int(size_bytes) / 1e6:8.1f} MB {each:6.2f} bytes a row")
            for name, seconds in _ask(engine, minutes).items():
                print(f"  {name:20} {seconds:7.3f} s")
        engine.close()


if __name__ == "__main__":
    main()
