# SPDX-License-Identifier: Apache-2.0
"""Measures what recording costs, beside bpftrace, perf and py-spy: `make bench`.

Prints Markdown as it goes; with --update FILE the tables between the two markers of a file, as
OVERHEAD.md has them, are replaced by those of this run. Nothing here passes or fails: figures
depend on the machine, and an aim that is missed is shown as missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Also when started as a program, the parts are `bench.NAME`, as for the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import (
    agreement,
    events,
    first,
    footprint,
    large,
    launches,
    loads,
    machine,
    page,
    python_frames,
    slowdown,
    torch_threads,
    unwinding,
    waiting,
)
from bench.table import Table, aims_table

PARTS: dict[str, Callable[[Path, Path], list[Table]]] = {
    "events": events.measure,
    "unwinding": unwinding.measure,
    "python": python_frames.measure,
    "slowdown": slowdown.measure,
    "torch": torch_threads.measure,
    "agreement": agreement.measure,
    "footprint": footprint.measure,
    "first": first.measure,
    "waiting": waiting.measure,
    "launches": launches.measure,
    "large": large.measure,
    "page": page.measure,
}

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def updated(text: str, measured: str) -> str:
    """Returns a document with what is between its markers replaced.

    Raises:
        ValueError: It lacks a marker.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{measured}\n{END}{after}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--update", metavar="FILE", type=Path, help="put the tables into FILE")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if args.update is not None:
        updated(args.update.read_text(), "")  # before minutes are spent
    return args


def main() -> None:
    """Runs the parts in order."""
    args = _arguments()
    try:
        machine.provide_tracefs()
    except machine.NoTracefs as error:
        sys.exit(f"bench: {error}")
    texts = [machine.facts()]
    print(texts[0], flush=True)
    aims = []
    with tempfile.TemporaryDirectory(prefix="aiflame-bench-") as name:
        folder = Path(name)
        busy = loads.build(folder)
        for part in args.parts or PARTS:
            started_s = time.monotonic()
            for table in PARTS[part](busy, folder):
                texts.append(table.markdown())
                aims += table.aims
                print(texts[-1], flush=True)
            print(f"{part}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    if aims:
        texts.insert(1, aims_table(aims).markdown())
        print(texts[1])
    if args.update is not None:
        args.update.write_text(updated(args.update.read_text(), "\n" + "\n".join(texts)))


if __name__ == "__main__":
    main()
