#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether what names and sends an agent's stretches grows: days of them, as fast as it can.

It is given stretches that an agent has recorded, one after the other and again from the first. In
each the containers are others after a while, and a quarter of the Python functions have new names.
Mapped files that are on this host are open, as the collector has them.

    sudo .venv/bin/python tests/bench/days.py FOLDER --stretches 1440
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aiflame.agent.fleet.config import load
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import (
    FROM_NAMING,
    Configure,
    DoLess,
    StretchBegun,
    StretchDone,
    StretchEnded,
)
from aiflame.agent.fleet.naming_worker import _kernel_symbols, _Worker
from aiflame.agent.fleet.stretch_naming import Lateness
from aiflame.agent.fleet.stretches import folders_of
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.naming_messages import Windows
from aiflame.agent.sinks.segments import RecordedWindows, SegmentSink
from aiflame.agent.sinks.written import Naming
from aiflame.agent.symbolize.files import GivenFiles, OpenFile
from aiflame.agent.symbolize.known_names import KnownNames
from aiflame.agent.symbols.file_facts import facts_for_names
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir
from bench.usage import family

_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
# A container lives for so many stretches.
_LIFE_STRETCHES = 15
# Of Python's functions, one in so many is new in each stretch.
_NEW_FUNCTIONS = 4
_NS_PER_S = 1_000_000_000

# A back-end that takes everything, and keeps nothing.
_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def _back_end() -> Iterator[tuple[int, int]]:
    """Yields the pid and the port of one."""
    command = (sys.executable, "-c", _SERVER)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def _changed(window: Window, number: int) -> Window:
    """Returns a window of later: other containers, and some functions that are new."""
    life = str(number // _LIFE_STRETCHES)

    def of_now(found: re.Match[str]) -> str:
        return hashlib.sha256((found[0] + life).encode()).hexdigest()

    functions = {*window.code_objects["name"].tolist()}
    texts = [
        f"{text}_{number}"
        if at in functions and (at + number) % _NEW_FUNCTIONS == 0
        else _CONTAINER_ID.sub(of_now, text)
        for at, text in enumerate(window.texts)
    ]
    return replace(window, texts=tuple(texts))


def _given(recorded: Sequence[Sequence[Window]]) -> GivenFiles:
    """Returns the files that windows mention, as far as they are on this host."""
    files = GivenFiles()
    for window in (window for windows in recorded for window in windows):
        for binary, path in window.binaries[["binary", "path"]].tolist():
            if files.open(binary, "", "").fd is None:
                with suppress(OSError):
                    files.add(binary, OpenFile(os.open(window.texts[path], os.O_RDONLY), ""))
    return files


def _pss_bytes(without: int) -> dict[str, int]:
    """Returns memory by name of this process and those below it, but for one."""
    found: dict[str, int] = {}
    for each in family(os.getpid()):
        if each.name == str(without):
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            name = (each / "comm").read_text().strip()
            lines = (each / "smaps_rollup").read_text().splitlines()
            size = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
            found[name] = found.get(name, 0) + size
    return found


def main() -> None:
    """Prints memory after each sixtieth of the stretches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="an agent's `directory`")
    parser.add_argument("--stretches", type=int, default=1_440)
    arguments = parser.parse_args()
    recorded, facts = [], {}
    for folder in folders_of(arguments.folder):
        windows = RecordedWindows(folder)
        facts = windows.facts
        if found := [*windows]:
            recorded.append(found)
    with ExitStack() as parts:
        directory = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        server_pid, port = parts.enter_context(_back_end())
        service = parts.enter_context(SymbolService(cache_dir()))
        server = parts.enter_context(closing(ForkServer()))
        file_facts = parts.enter_context(closing(facts_for_names(server)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lateness, files = Lateness(), _given(recorded)
        known = KnownNames(lambda: _kernel_symbols(directory))
        naming = Naming(files, service, file_facts, lateness.budget_s, known)
        worker = _Worker(directory, theirs, naming, files, lateness, Log())
        url = f"http://127.0.0.1:{port}"
        flags = {
            "sinks.otlp.url": url,
            "sinks.pyroscope.url": url,
            "sinks.captures.directory": str(directory / "captures"),
            "sinks.captures.max_size": "100MB",
        }
        worker.take(Configure(load(None, flags, {})))
        # As an agent over its budget names: a stretch as a whole, in a copy of this process.
        worker.take(DoLess(thrift=16, delay_factor=2))
        began_s, at_ns, names = time.monotonic(), time.time_ns(), 0
        for number in range(arguments.stretches):
            source = recorded[number % len(recorded)]
            length_ns = source[-1].end_ns - source[0].start_ns
            folder = directory / str(at_ns)
            folder.mkdir()
            own = {**facts, "started_unix_ns": at_ns - source[0].start_ns}
            with closing(SegmentSink(folder, own)) as sink:
                for window in source:
                    sink.put(_changed(window, number))
            worker.take(StretchBegun(folder))
            worker.take(Windows(len(source)))
            worker.take(StretchEnded())
            service.poll()
            names += isinstance(FROM_NAMING.decode(ours.recv(1 << 20)), StretchDone)
            shutil.rmtree(folder)
            at_ns += length_ns
            if number % max(arguments.stretches // 60, 1) == 0:
                memory = _pss_bytes(server_pid)
                words = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in memory.items())
                print(
                    f"{number + 1:6} stretches, {(at_ns - time.time_ns()) / _NS_PER_S / 3600:6.1f}"
                    f" h ahead, {time.monotonic() - began_s:6.0f} s:"
                    f" {sum(memory.values()) / 1e6:6.1f} MB: {words}",
                    flush=True,
                )
        print(f"{names} of {arguments.stretches} were named and queued")
        for delivery in worker._deliveries.values():
            print(delivery.state())
            delivery.close()


if __name__ == "__main__":
    main()
