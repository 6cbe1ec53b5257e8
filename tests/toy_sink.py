# SPDX-License-Identifier: Apache-2.0
"""A back-end for tests: requests are the sums of a stretch in JSON, over plain HTTP.

`python toy_sink.py agent ARGUMENTS` is `aiflame agent` with this sink, and `receive PORT FOLDER`
the server, which writes each request into a file.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from aiflame.agent.fleet import naming, naming_worker
from aiflame.agent.fleet.sinks import SINKS
from aiflame.agent.inspector.fork_server import Program
from aiflame.agent.model.batch import Batch
from aiflame.agent.model.profile import Profile
from aiflame.agent.sinks.requests import Request, SinkAway, SinkRefused


@dataclass(frozen=True)
class Settings:
    """Keys of [sinks.toy].

    Attributes:
        url: Where to.
    """

    url: str


def sums_of(profile: Profile) -> dict[str, int]:
    """Returns what a profile has in all, of each class of time."""
    samples, gpu = profile.samples, profile.gpu
    found = {
        "launches": int(gpu.calls["count"].sum()),
        "device samples": int(gpu.samples["count"].sum()),
    }
    for klass in range(4):
        rows = samples[samples["klass"] == klass]
        found[f"ns of {klass}"] = int(rows["ns"].sum())
        found[f"count of {klass}"] = int(rows["count"].sum())
    return found


class ToySink:
    """Sends the sums of all batches, and the time on the CPU of each service."""

    name = "toy"
    max_age_s = None
    sends_spans = False
    modules: tuple[str, ...] = ()

    def __init__(self, url: str) -> None:
        self._url = url

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """One request for all."""
        sums: Counter[str] = Counter()
        services: Counter[str] = Counter()
        for batch in batches:
            found = sums_of(batch.profile)
            sums.update(found)
            services[batch.labels.service] += found["ns of 0"]
        begin_ns = batches[0].begin_unix_ns
        losses = {loss.name: loss.count for loss in batches[0].profile.losses}
        words = {"begin": begin_ns, "sums": sums, "services": services, "losses": losses}
        yield Request(json.dumps(words).encode(), begin_ns, sums["count of 0"])

    def send(self, request: Request) -> Counter[str]:
        """Posts it."""
        try:
            posted = urllib.request.Request(self._url, request.body, method="POST")  # noqa: S310
            with urllib.request.urlopen(posted, timeout=5) as answer:  # noqa: S310 - localhost
                answer.read()
        except urllib.error.HTTPError as error:
            raise SinkRefused(str(error), f"{error.code}") from error
        except OSError as error:
            raise SinkAway(str(error)) from error
        return Counter()


def check(_settings: Settings) -> None:
    """Refuses nothing."""


def make(settings: Settings, _node: str) -> ToySink:
    """Makes it."""
    return ToySink(settings.url)


def describe(settings: Settings) -> str:
    """Says where it sends."""
    return settings.url


def _receive(port: int, folder: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            begin = json.loads(body)["begin"]
            number = len([*folder.iterdir()])
            unfinished = folder / "unfinished"
            unfinished.write_bytes(body)
            unfinished.rename(folder / f"{number:04}-{begin}.json")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def run(arguments: Sequence[str]) -> None:
    """The process of an agent that names and sends."""
    SINKS["toy"] = "toy_sink"
    naming_worker.run(arguments)


if __name__ == "__main__":
    # Of a fork server that is started again.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    SINKS["toy"] = "toy_sink"
    naming.PROGRAM = Program("naming", "toy_sink:run", ("toy_sink",))
    verb, *arguments = sys.argv[1:]
    if verb == "receive":
        _receive(int(arguments[0]), Path(arguments[1]))
    else:
        from aiflame.agent.cli import main as command_line

        sys.exit(command_line(["agent", *arguments]))
