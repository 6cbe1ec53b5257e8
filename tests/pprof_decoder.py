# SPDX-License-Identifier: Apache-2.0
"""A reader of profile.proto for tests, independent of the writer.

Field numbers: https://github.com/google/pprof/blob/main/proto/profile.proto. It refuses what the
format does not allow: ids that are zero, double or missing, and values of another number than
there are sample types.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import dataclass, field

Message = dict[int, list]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            assert value < 1 << 64
            return value, at


def _message(data: bytes) -> Message:
    fields: Message = defaultdict(list)
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
            assert len(value) == length
        fields[tag >> 3].append(value)
    return fields


def _packed(data: bytes) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        values.append(value)
    return values


def _one(message: Message, number: int) -> int:
    assert len(message[number]) <= 1
    return message[number][0] if message[number] else 0


@dataclass
class Sample:
    """Lines are `name file:line`, leaf first; inlined ones joined by " <- "."""

    lines: list[str]
    values: dict[str, int]
    labels: dict[str, str | int]
    addresses: list[int]
    mappings: list[str]


@dataclass
class Decoded:
    sample_types: list[str]
    default_type: str
    period: tuple[str, int]
    time_ns: int
    duration_ns: int
    comments: list[str]
    samples: list[Sample] = field(default_factory=list)
    build_ids: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return everything as lines, for a golden file."""
        out = [
            f"types: {' '.join(self.sample_types)} (default {self.default_type})",
            f"period: {self.period[0]} {self.period[1]}",
            f"time: {self.time_ns}, duration: {self.duration_ns}",
            *(f"comment: {comment}" for comment in self.comments),
            *(f"mapping: {name} {self.build_ids[name]}" for name in sorted(self.build_ids)),
        ]
        for sample in self.samples:
            out.append(" ".join(f"{k}={v}" for k, v in sample.values.items() if v))
            out.append("  " + ", ".join(f"{k}: {v}" for k, v in sample.labels.items()))
            out += [f"    {line}" for line in sample.lines]
        return "\n".join(out) + "\n"


class _Tables:
    def __init__(self, profile: Message) -> None:
        self.strings = [raw.decode() for raw in profile[6]]
        assert self.strings[0] == ""
        assert len(set(self.strings)) == len(self.strings)
        self.functions = self._by_id(profile[5])
        self.mappings = self._by_id(profile[3])
        self.locations = self._by_id(profile[4])

    @staticmethod
    def _by_id(raw: list[bytes]) -> dict[int, Message]:
        table = {}
        for message in map(_message, raw):
            number = _one(message, 1)
            assert number > 0
            assert number not in table
            table[number] = message
        return table

    def location(self, number: int) -> tuple[str, int, str]:
        message = self.locations[number]
        mapping = _one(message, 2)
        name = self.strings[_one(self.mappings[mapping], 5)] if mapping else ""
        if mapping:
            limits = self.mappings[mapping]
            assert _one(limits, 2) <= _one(message, 3) < _one(limits, 3)
        lines = []
        for line in map(_message, message[4]):
            function = self.functions[_one(line, 1)]
            file = self.strings[_one(function, 4)]
            where = f" {file}:{_one(line, 2)}" if file else ""
            lines.append(self.strings[_one(function, 2)] + where)
        assert lines
        return " <- ".join(lines), _one(message, 3), name

    def label(self, message: Message) -> tuple[str, str | int]:
        assert not (message[2] and message[3])
        value = self.strings[message[2][0]] if message[2] else _one(message, 3)
        return self.strings[_one(message, 1)], value


def decode(data: bytes) -> Decoded:
    """Read a gzipped profile."""
    profile = _message(gzip.decompress(data))
    tables = _Tables(profile)
    strings = tables.strings

    def value_type(raw: bytes) -> str:
        message = _message(raw)
        return f"{strings[_one(message, 1)]}/{strings[_one(message, 2)]}"

    types = [value_type(raw) for raw in profile[1]]
    decoded = Decoded(
        sample_types=types,
        default_type=strings[_one(profile, 14)],
        period=(value_type(profile[11][0]), _one(profile, 12)),
        time_ns=_one(profile, 9),
        duration_ns=_one(profile, 10),
        comments=[strings[i] for i in profile[13]],
        build_ids={strings[_one(m, 5)]: strings[_one(m, 6)] for m in tables.mappings.values()},
    )
    for message in map(_message, profile[2]):
        values = _packed(message[2][0])
        assert len(values) == len(types)
        locations = [tables.location(i) for i in _packed(b"".join(message[1]))]
        labels = [tables.label(_message(raw)) for raw in message[3]]
        assert len(dict(labels)) == len(labels)
        decoded.samples.append(
            Sample(
                [location[0] for location in locations],
                dict(zip(types, values, strict=True)),
                dict(labels),
                [location[1] for location in locations],
                [location[2] for location in locations],
            )
        )
    return decoded
