# SPDX-License-Identifier: Apache-2.0
"""Stretches are read as a whole and encoded in a process that ends.

It is a copy of the naming process (`fork`), so it has the sinks and the labels. It writes requests
to a pipe, each a line of JSON with its body after it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet.batches import batch_of_nobody, batches_of
from aiflame.agent.fleet.fork import Fork, ForkEnded
from aiflame.agent.fleet.log import words_of
from aiflame.agent.losses import LossKind
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.sinks.name_limits import limited
from aiflame.agent.sinks.requests import Request, RequestSink

_PROCESS_NAME = "aiflame encodes"


class NotEncoded(AiflameError):
    """A sink cannot encode a stretch; others may.

    Attributes:
        reason: To count it by: the kind of error.
    """

    def __init__(self, why: str, reason: str) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class NamedStretch:
    """What is to be encoded.

    Attributes:
        database: Its capture, which is complete.
        labels: Of each of its processes, None of what is left out.
        node: The host's name.
    """

    database: Path
    labels: Sequence[Labels | None]
    node: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a stretch has.

    Attributes:
        samples: Of CPU time.
        to_send: Samples of those that are not left out, as `Request.samples` counts them.
        duration_ns: How long it was.
        losses: What was lost, by name.
    """

    samples: int
    to_send: int
    duration_ns: int
    losses: dict[str, int]


class Encoder:
    """The process that encodes one stretch, from where it is entered to where it is left.

    Args:
        stretch: What is encoded.
        sinks: Who encodes it, by name; they are asked for in this order.

    Raises:
        OSError: It cannot be forked.
    """

    def __init__(self, stretch: NamedStretch, sinks: Mapping[str, RequestSink]) -> None:
        self._fork = Fork(_PROCESS_NAME, partial(_encode, stretch, sinks))
        self._pipe = self._fork.pipe

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *error: object) -> None:
        self._fork.__exit__(*error)

    def summary(self) -> Summary:
        """Returns what the stretch has; to be asked for first, and once.

        Raises:
            AiflameError: Its capture cannot be read.
            ForkEnded: Nothing more comes.
        """
        found = self._message()
        if "error" in found:
            raise AiflameError(found["error"])
        return Summary(**found)

    def requests(self, name: str) -> Iterator[Request]:
        """Yields the requests of a sink. What was left of those before is passed over.

        Raises:
            NotEncoded: It cannot encode the stretch.
            ForkEnded: Nothing more comes.
        """
        while True:
            found = self._message()
            body = self._pipe.read(found.get("bytes", 0))
            if found["sink"] != name:
                continue
            if "error" in found:
                raise NotEncoded(found["error"], found["reason"])
            if "bytes" not in found:
                return
            if len(body) < found["bytes"]:
                raise self._ended()
            yield Request(body, found["begin_unix_ns"], found["samples"])

    def _message(self) -> dict[str, Any]:
        line = self._pipe.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        found: dict[str, Any] = json.loads(line)
        return found

    def _ended(self) -> ForkEnded:
        return ForkEnded("the process that encodes it has ended")


def _encode(stretch: NamedStretch, sinks: Mapping[str, RequestSink], pipe: IO[bytes]) -> None:
    gc.disable()  # this process ends before it would be worth it
    try:
        with_spans = any(sink.sends_spans for sink in sinks.values())
        profile = read_capture(stretch.database, with_spans=with_spans)
        counts = profile.samples["count"]
        on_cpu = profile.samples["klass"] == SampleClass.ON_CPU
        summary = Summary(
            int(counts[on_cpu].sum()),
            _to_send(profile, stretch.labels),
            profile.recording.duration_ns,
            {loss.name: loss.count for loss in profile.losses},
        )
        batches, unnamed = limited(batches_of(profile, stretch.labels)) if sinks else ([], 0)
        if unnamed:
            summary.losses[LossKind.NAMES_NOT_SENT.stored_name] = unnamed
        if sinks and not batches:  # back-ends that keep what agents lost are told all the same
            batches = [batch_of_nobody(profile, stretch.node)]
        del profile
    except Exception as error:
        _tell(pipe, {"error": words_of(error)})
        return
    _tell(pipe, asdict(summary))
    for name, sink in sinks.items():
        _encode_for(name, sink, batches, pipe)


def _to_send(profile: Profile, labels: Sequence[Labels | None]) -> int:
    gpu = profile.gpu
    is_sent = np.array([one is not None for one in labels], np.bool_)
    of_threads = np.array([thread.process for thread in profile.threads], np.int64)
    of_codes = np.array([gpu.kernels[code.kernel].process for code in gpu.codes], np.int64)
    return sum(
        int(rows["count"][is_sent[processes[rows[key]]]].sum())
        for rows, processes, key in (
            (profile.samples, of_threads, "thread"),
            (gpu.samples, of_codes, "code"),
        )
    )


def _encode_for(name: str, sink: RequestSink, batches: Sequence[Batch], pipe: IO[bytes]) -> None:
    try:
        for request in sink.encode(batches):
            facts = {"begin_unix_ns": request.begin_unix_ns, "samples": request.samples}
            _tell(pipe, {"sink": name, "bytes": len(request.body), **facts}, request.body)
    except BrokenPipeError:  # nobody reads it any more
        raise
    except Exception as error:  # of one sink
        _tell(pipe, {"sink": name, "error": words_of(error), "reason": type(error).__name__})
    else:
        _tell(pipe, {"sink": name})


def _tell(pipe: IO[bytes], message: Mapping[str, Any], body: bytes = b"") -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.write(body)
