# SPDX-License-Identifier: Apache-2.0
"""The series of a request to Pyroscope, and which of them failed, as its answer says.

A server pushes each series by itself, and stores the others whatever becomes of one. One text tells
of all that failed, of each "push series with index N and id ID failed: CODE: why" (`PushBatch` in
pkg/distributor of https://github.com/grafana/pyroscope). Why quotes labels, which targets choose:
what counts are ids, which are made by chance, and how many there have to be.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiflame.agent.reports.pprof_parts import ProfileField

_MANY = re.compile(r"(\d+) errors: ")
_FAILED = re.compile(
    r"push series with index (\d{1,7}) and id ([0-9a-f-]{36}) failed: (?:([a-z_]{1,40}): )?"
)

# Connect's codes (https://connectrpc.com/docs/protocol#error-codes): of what is wrong with a series
# for ever, and of what may be another time.
_FINAL = ("invalid_argument", "failed_precondition", "out_of_range", "unimplemented")
_LATER = (
    *("canceled", "unknown", "deadline_exceeded", "resource_exhausted", "aborted", "internal"),
    *("unavailable", "data_loss", "unauthenticated", "permission_denied"),
)

# Of protobuf: what stands before a value, and the most bytes that a number of 64 bits takes.
_NUMBER, _BYTES = 0, 2
_MOST_VARINT_BYTES = 10


class PushField:
    """Of PushRequest, RawProfileSeries, RawSample and LabelPair of push.proto."""

    SERIES = 1
    LABELS, SAMPLES = 1, 2
    RAW_PROFILE, ID = 1, 2
    NAME, VALUE = 1, 2


class SentSeries(NamedTuple):
    """One series of a request; it has one profile.

    Attributes:
        field: As it is in the request.
        id: Of its profile.
        stacks: How many that has.
    """

    field: bytes
    id: str
    stacks: int


class Failures(NamedTuple):
    """Which series of a request failed; all others are stored.

    Attributes:
        series: All that were sent.
        refused: Those that will never be taken.
        later: Those that may be.
    """

    series: Sequence[SentSeries]
    refused: Sequence[SentSeries]
    later: Sequence[SentSeries]

    def samples(self, some: Sequence[SentSeries], samples: int) -> int:
        """Returns how many samples some have, of so many of all: as is their share of stacks."""
        return samples * _stacks(some) // max(1, _stacks(self.series))


def _stacks(series: Sequence[SentSeries]) -> int:
    return sum(one.stacks for one in series)


def failures_of(body: bytes, answer: bytes, *, is_final: bool) -> Failures | None:
    """Returns what an error says of the series of a request.

    Args:
        body: The request.
        answer: Connect's error, in JSON.
        is_final: What the answer means for series of which it gives no code.

    Returns:
        None where it does not tell them apart: all have failed.
    """
    text = _message(answer)
    many = _MANY.match(text)
    told = {(int(found[1]), found[2]): found[3] or "" for found in _FAILED.finditer(text)}
    if not told:
        return None
    try:
        series = [*_series(body)]
    except (ValueError, OSError, EOFError, zlib.error):  # none of those that are sent today
        return None
    codes = [(one, told[at, one.id]) for at, one in enumerate(series) if (at, one.id) in told]
    if str(len(codes)) != (many[1] if many else "1"):
        return None
    is_refused = [code in _FINAL or (is_final and code not in _LATER) for _, code in codes]
    return Failures(
        series,
        [one for (one, _), is_over in zip(codes, is_refused, strict=True) if is_over],
        [one for (one, _), is_over in zip(codes, is_refused, strict=True) if not is_over],
    )


def _message(answer: bytes) -> str:
    try:
        told = json.loads(answer)
    except (ValueError, RecursionError):
        return ""
    message = told.get("message") if isinstance(told, dict) else ""
    return message if isinstance(message, str) else ""


def _series(body: bytes) -> Iterator[SentSeries]:
    for _, field, value in _fields(body):
        ((_, _, sample),) = (one for one in _fields(value) if one[0] == PushField.SAMPLES)
        of_sample = {number: content for number, _, content in _fields(sample)}
        profile = gzip.decompress(of_sample.get(PushField.RAW_PROFILE, b""))
        stacks = sum(number == ProfileField.SAMPLE for number, _, _ in _fields(profile))
        yield SentSeries(field, of_sample.get(PushField.ID, b"").decode("ascii"), stacks)


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields of each field its number, all of it, and its value where that is no number.

    Raises:
        ValueError: It is no message, or has fields of another kind.
    """
    at = 0
    while at < len(message):
        begin = at
        tag, at = _varint(message, at)
        length, value = _varint(message, at)
        if tag & 7 == _BYTES:
            at = value + length
        elif tag & 7 == _NUMBER:
            at = value
        if tag & 7 not in (_NUMBER, _BYTES) or at > len(message):
            raise ValueError(f"no field at {begin}")
        yield tag >> 3, message[begin:at], message[value:at]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns a number and where it ends."""
    found = 0
    for place, byte in enumerate(message[at : at + _MOST_VARINT_BYTES]):
        found |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return found, at + place + 1
    raise ValueError(f"no number at {at}")
