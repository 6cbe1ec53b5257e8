#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A store of many hosts, made of one agent's captures: its size, and how long questions take.

First what one host sends: rows and bytes of the captures as they are. Then each host has in each
stretch what the recorded one had in another of its stretches, with values that vary by chance.
Generated, not recorded: hosts of a fleet have more different stacks, and other repetitions.

    python tests/bench/fleet.py FOLDER --hosts 1000 --stretches 5 15 30
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aiflame.agent.commands.captures import read_recording
from aiflame.agent.fleet.batches import batches_of
from aiflame.agent.store import questions
from aiflame.agent.store.comparison import compare
from aiflame.agent.store.engines import DirectoryEngine, open_store
from aiflame.agent.store.inserts import inserts_of
from aiflame.agent.store.profiles import DEFAULT_STACKS, By, profile_of
from aiflame.agent.store.schema import Rows, migrate
from aiflame.agent.store.selector import Selector

_BEGIN_S = 1_795_392_000
_NS_PER_S = 1_000_000_000
_S_PER_DAY = 86_400
_TRIES = 3
# Of these something is in each stretch; stacks are sent once a week.
_OF_STRETCHES = (Rows.SAMPLES, Rows.GPU, Rows.AGENTS)


def _add_recorded(engine: DirectoryEngine, captures: list[Path], stretch_s: int) -> None:
    """Adds captures, one after the other from `_BEGIN_S` on, as an agent sends them."""
    sent: set[int] = set()

    def is_new(stack_id: int) -> bool:
        is_first = stack_id not in sent
        sent.add(stack_id)
        return is_first

    for number, path in enumerate(captures):
        profile = read_recording(path)
        begin_ns = (_BEGIN_S + number * stretch_s) * _NS_PER_S
        batches = [
            replace(batch, begin_unix_ns=begin_ns) for batch in batches_of(profile, profile.labels)
        ]
        for piece in inserts_of(batches, "", is_new):
            engine.insert(piece.table.value, piece.rows, piece.token)
    for table in Rows:  # one host makes few and small parts, which are merged within a day
        engine.execute(f"OPTIMIZE TABLE {table.value} FINAL")


def _print_size(engine: DirectoryEngine) -> None:
    """Prints rows and bytes of each table that has any, merged as far as they are by now."""
    for table in (*Rows, "stacks_1h"):
        name = table if isinstance(table, str) else table.value
        ((rows, size_bytes),) = engine.query(
            "SELECT sum(rows), sum(data_compressed_bytes) FROM system.parts"
            " WHERE active AND database = currentDatabase() AND table = {table:String}",
            {"table": name},
        ).rows
        if int(rows):
            each = int(size_bytes) / int(rows)
            print(
                f"  {name:10} {int(rows):12,} rows {int(size_bytes) / 1e6:9.2f} MB"
                f" {each:6.1f} bytes a row"
            )


def _keep_as_templates(engine: DirectoryEngine, stretch_s: int) -> None:
    """Moves rows of stretches away, with the numbers of these and times since they began."""
    for table in _OF_STRETCHES:
        since = f"(toUnixTimestamp(t) - {_BEGIN_S})"
        engine.execute(
            f"CREATE TABLE template_{table.value} ENGINE = Memory AS SELECT *,"  # noqa: S608
            f" toUInt32(intDiv({since}, {stretch_s})) AS recorded,"
            f" {since} % {stretch_s} AS since_s FROM {table.value}"
        )
    for name in (*(table.value for table in _OF_STRETCHES), "stacks_1h"):
        engine.execute(f"TRUNCATE TABLE {name}")


def _columns(engine: DirectoryEngine, table: str) -> list[str]:
    found = engine.query(
        "SELECT name FROM system.columns WHERE database = currentDatabase()"
        " AND table = {table:String} ORDER BY position",
        {"table": table},
    )
    return [str(name) for (name,) in found.rows]


def _fill(
    engine: DirectoryEngine, hosts: int, recorded: int, stretch_s: int, begin: int, end: int
) -> float:
    """Adds stretches from begin to end of all hosts; returns how many seconds that took."""
    made = {
        "node": "concat('node-', toString(host))",
        "version": f"if(host < {hosts // 2}, '1', '2')",
        "pod": "if(container = '', '', concat(container, '-', toString(host)))",
        "value": "toUInt64(value * (0.5 + rand(1) / 4294967296))",
        "events": "greatest(1, toUInt64(events * (0.5 + rand(2) / 4294967296)))",
    }
    started = time.monotonic()
    for stretch in range(begin, end):
        made["t"] = f"toDateTime({_BEGIN_S + stretch * stretch_s} + since_s)"
        for table in _OF_STRETCHES:
            columns = ", ".join(
                f"{made[name]} AS {name}" if name in made else name
                for name in _columns(engine, table.value)
            )
            # Seven has no divisor in common with numbers of stretches that are likely.
            engine.execute(
                f"INSERT INTO {table.value} SELECT {columns}"  # noqa: S608
                f" FROM (SELECT * FROM template_{table.value}) AS template INNER JOIN"
                f" (SELECT number AS host, toUInt32((number * 7 + {stretch}) % {recorded})"
                f" AS recorded FROM numbers({hosts})) AS hosts USING recorded"
                " SETTINGS prefer_column_name_to_alias = 1"
            )
    return time.monotonic() - started


def _ask(engine: DirectoryEngine, seconds: int) -> dict[str, float]:
    """Returns the median time of each question over everything, in seconds."""
    whole = Selector(_BEGIN_S, _BEGIN_S + seconds, {}, ("on_cpu",))
    ((service,),) = engine.query(
        "SELECT service FROM samples WHERE class = 'on_cpu'"
        " GROUP BY service ORDER BY sum(value) DESC LIMIT 1"
    ).rows
    one = replace(whole, labels={"service": (str(service),)})
    node = replace(whole, labels={"node": ("node-7",)})
    sides = [replace(one, labels={**one.labels, "version": (version,)}) for version in "12"]
    asked: dict[str, Callable[[], object]] = {
        "top, all": lambda: questions.top(engine, whole, 20),
        f"top, {service}": lambda: questions.top(engine, one, 20),
        "top, one host": lambda: questions.top(engine, node, 20),
        "top, blocked, all": lambda: questions.top(
            engine, replace(whole, classes=("blocked",)), 20
        ),
        "flame, all": lambda: profile_of(engine, whole, By.SERVICE, DEFAULT_STACKS),
        f"flame, {service}": lambda: profile_of(engine, one, By.SERVICE, DEFAULT_STACKS),
        "flame, one host": lambda: profile_of(engine, node, By.SERVICE, DEFAULT_STACKS),
        f"diff, {service}": lambda: compare(engine, *sides, is_self=False, least_share=0.002),
        "kernels": lambda: questions.kernels(engine, whole, 20),
        "stalls": lambda: questions.stalls(engine, whole, 20),
        "stalls by line": lambda: questions.stalls_by_line(engine, whole, 20),
        "agents": lambda: questions.agents(engine, whole, 20),
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
    parser.add_argument("folder", type=Path, help="of an agent's captures")
    parser.add_argument("--hosts", type=int, default=1_000)
    parser.add_argument("--stretches", type=int, nargs="+", default=[5, 15, 30])
    args = parser.parse_args()
    captures = sorted(args.folder.glob("*.aiflame"))
    lengths_ns = [read_recording(path).recording.duration_ns for path in captures]
    stretch_s = -(-max(lengths_ns) // _NS_PER_S)
    with tempfile.TemporaryDirectory() as folder:
        engine = open_store(str(Path(folder) / "fleet"), is_read_only=False, is_new=True)
        assert isinstance(engine, DirectoryEngine)
        migrate(engine, 0)
        _add_recorded(engine, captures, stretch_s)
        days = sum(lengths_ns) / _NS_PER_S / _S_PER_DAY
        print(f"1 host, {len(captures)} stretches, {sum(lengths_ns) / 1e9:.0f} s:")
        print(f"  times {1 / days:.0f} for a day, but for stacks")
        _print_size(engine)
        _keep_as_templates(engine, stretch_s)
        done = 0
        for stretches in args.stretches:
            took = _fill(engine, args.hosts, len(captures), stretch_s, done, stretches)
            done = stretches
            seconds = stretches * stretch_s
            print(f"{args.hosts} hosts, {seconds / 60:.0f} min, added in {took:.1f} s:")
            _print_size(engine)
            for name, took_s in _ask(engine, seconds).items():
                print(f"  {name:30} {took_s:7.3f} s")
        engine.close()


if __name__ == "__main__":
    main()
