# SPDX-License-Identifier: Apache-2.0
"""Sinks that send requests to a back-end: what they share with who queues and retries these.

A sink encodes batches when their names are known, once: a request stands for itself, also on disk
and a day later, when the processes that it names are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiflame.agent.errors import AiflameError
from aiflame.agent.model.batch import Batch


class SinkAway(AiflameError):
    """A back-end that cannot take a request now, but may later.

    Attributes:
        retry_after_s: When, as the back-end says; None where it does not.
        rest: What is to be sent again, where the back-end has taken some; None for all.
    """

    def __init__(
        self, why: str, retry_after_s: float | None = None, rest: Rest | None = None
    ) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.rest = rest


class SinkRefused(AiflameError):
    """A request that a back-end will never take: it is dropped and counted.

    Attributes:
        reason: To count it by: a few words of ours, or a number of the back-end's, of which there
            are not many. The message has the back-end's own words, which may name each profile.
    """

    def __init__(self, why: str, reason: str) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        body: As it goes over the wire, compressed if the sink does so.
        begin_unix_ns: When what it tells of began: back-ends refuse what is too old.
        samples: How many samples it holds, to count them where they are lost: those of threads on a
            CPU, intervals in which threads were off it, and samples of devices. All sinks count so:
            of one stretch their requests have the same number together.
    """

    body: bytes
    begin_unix_ns: int
    samples: int


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a request of which a back-end has taken some.

    Attributes:
        request: What is to be sent again.
        refused: How many samples never are, by what the back-end says.
    """

    request: Request
    refused: Counter[str]


class RequestSink(Protocol):
    """One back-end.

    Attributes:
        name: As in the configuration.
        max_age_s: What is older is refused by the back-end; None for no such limit.
        sends_spans: Whether it says in which seconds time was; else profiles need no spans.
        modules: What is imported when it encodes or sends for the first time, not before: checking
            settings needs none of it.
    """

    name: str
    max_age_s: float | None
    sends_spans: bool
    modules: tuple[str, ...]

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        """Encodes what one stretch of time has, in requests that the back-end's limits allow.

        It runs in a fork of the process that sends: what it takes note of is forgotten, and it
        takes no lock.
        """
        ...

    def send(self, request: Request) -> Counter[str]:
        """Sends a request; returns how many samples were refused, by what the back-end says.

        Raises:
            SinkAway: It is to be sent again.
            SinkRefused: It is not.
        """
        ...
