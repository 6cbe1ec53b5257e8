#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tests' OTLP receiver as a process of its own, which appends what it got to a file.

It is killed and started again by who measures: a line of JSON for each request is on disk before
the request is answered.

    python tests/bench/receiver.py PORT FILE
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass
from email.message import Message
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pushes import as_pyroscope
from receivers.otlp import Collector
from receivers.server import Reply, serving


@dataclass(frozen=True)
class GotProfile:
    """One Profile of a request.

    Attributes:
        begin_unix_ns, duration_ns: Of the stretch that it is of.
        container: The name, "" for what is in none.
        type_id: By Pyroscope's name.
        total: The sum of its samples, in the unit of its type.
    """

    begin_unix_ns: int
    duration_ns: int
    container: str
    type_id: str
    total: int


@dataclass(frozen=True)
class GotRequest:
    """One request.

    Attributes:
        at_unix_s: When it came.
        status: What it was answered.
        size_bytes: As it was sent, with gzip.
        held_bytes: Without; 0 where it was refused.
        digest: Of the body: what was answered too late is sent again.
        profiles: What it holds.
    """

    at_unix_s: float
    status: int
    size_bytes: int
    held_bytes: int
    digest: str
    profiles: tuple[GotProfile, ...]


class _Kept:
    """A Collector that keeps of each request only what is to be added up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("a") as file:
            file.write("\n")  # behind a line that was cut when another was killed

    def take(self, path: str, headers: Message, body: bytes) -> Reply:
        collector = Collector()
        reply = collector.take(path, headers, body)
        profiles = []
        for one in collector.got:
            ((type_id, stacks),) = as_pyroscope(Collector(got=[one])).items()
            container = str(one.resource.get("container.name", ""))
            total = sum(stacks.values())
            profiles.append(GotProfile(one.time_ns, one.duration_ns, container, type_id, total))
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        held = sum(collector.sizes)
        got = GotRequest(time.time(), reply.status, len(body), held, digest, tuple(profiles))
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(got)) + "\n")
        return reply


def read_requests(path: Path) -> list[GotRequest]:
    """Returns what came, each request once."""
    found: dict[tuple[str, int], GotRequest] = {}
    for line in path.read_text().splitlines():
        try:
            words = json.loads(line)
        except ValueError:  # cut, or empty: it was not answered, and came again
            continue
        profiles = tuple(GotProfile(**each) for each in words.pop("profiles"))
        got = GotRequest(**words, profiles=profiles)
        found.setdefault((got.digest, got.status), got)
    return [*found.values()]


def main() -> None:
    """Receives until it is told to end."""
    with serving(_Kept(Path(sys.argv[2])), port=int(sys.argv[1])):
        signal.pause()


if __name__ == "__main__":
    main()
