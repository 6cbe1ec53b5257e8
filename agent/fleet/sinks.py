# SPDX-License-Identifier: Apache-2.0
"""The sinks that an agent may have: a row each.

The module of a sink declares its keys as `Settings` (see `aiflame.agent.settings`), and makes it
with `make(settings, node)`: a `RequestSink`, whose requests are queued on disk and sent, or
`CaptureFiles`, which takes whole captures. What it names may be away just then: `check(settings)`
refuses that before an agent begins. `describe(settings)` says in a few words where it sends.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from aiflame.agent.sinks.captures import CaptureFiles
from aiflame.agent.sinks.requests import RequestSink

# By name, as in the configuration: [sinks.captures].
SINKS: dict[str, str] = {
    "captures": "aiflame.agent.sinks.captures",
    "pyroscope": "aiflame.agent.sinks.pyroscope",
    "otlp": "aiflame.agent.sinks.otlp",
    "clickhouse": "aiflame.agent.sinks.clickhouse",
}

Sink = RequestSink | CaptureFiles


class SinkModule(Protocol):
    """What the module of a sink has."""

    Settings: type[Any]

    def check(self, settings: Any) -> None:
        """Refuses settings that make no sense, or name what is not there."""

    def make(self, settings: Any, node: str) -> Sink:
        """Makes the sink of a host with that name; reads no file, for it may be being replaced."""

    def describe(self, settings: Any) -> str:
        """Says where it sends, in a few words."""


def sink_module(name: str) -> SinkModule:
    """Returns the module of a sink by the sink's name."""
    module: Any = importlib.import_module(SINKS[name])
    found: SinkModule = module
    return found
