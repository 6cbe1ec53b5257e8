# SPDX-License-Identifier: Apache-2.0
"""One series as pprof's profile.proto, whose ids all count from 1 without a gap.

What there are tens of thousands of is encoded by numpy: tags, lengths and numbers are all varints,
so that a table of messages is one row of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Binary
from aiflame.agent.model.ranges import ranges
from aiflame.agent.reports.pprof_parts import (
    LineField,
    LocationField,
    ProfileField,
    SampleField,
    function_message,
    mapping,
    value_type,
)
from aiflame.agent.reports.protowire import (
    StringTable,
    message_field,
    packed,
    varint_field,
    varint_sizes,
    varints,
)
from aiflame.agent.sinks.pushed import I64, U64, Series, Tables

_U64_MAX = np.uint64((1 << 64) - 1)

_NUMBER, _MESSAGE = 0, 2  # wire types


def _tag(field: int, wire_type: int) -> int:
    return field << 3 | wire_type


class PprofTables:
    """The tables of a batch, as columns."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        rows = tables.locations
        lines = [one[3] for one in rows]
        self.mapping = np.array([one[1] for one in rows], np.int64)
        self.address = np.array([one[2] for one in rows], np.uint64)
        self.lines = np.array([len(some) for some in lines], np.int64)
        self.first_line = np.cumsum(self.lines) - self.lines
        self.function = np.array([number for some in lines for number, _ in some], np.int64)
        self.line = np.array([line for some in lines for _, line in some], np.uint64)

    def profile(
        self,
        series: Series,
        sample_type: tuple[str, str],
        period_type: tuple[str, ...],
        comments: Sequence[str],
    ) -> bytes:
        """Return the Profile message of a series, without its time.

        Args:
            series: Of this batch.
            sample_type: Type and unit of its values.
            period_type: Those of a sample's period; () for none.
            comments: For who reads the file itself.
        """
        strings = StringTable()
        parts = [message_field(ProfileField.SAMPLE_TYPE, value_type(strings, *sample_type))]
        offsets, flat = self.tables.stacks(series.stack)
        in_use, at = np.unique(flat, return_inverse=True)
        parts += _samples(offsets, (at + 1).astype(np.uint64), series.value)
        parts += self._tables(in_use, strings)
        if period_type:
            type_ = value_type(strings, *period_type)
            parts.append(message_field(ProfileField.PERIOD_TYPE, type_))
            parts.append(varint_field(ProfileField.PERIOD, series.period_ns or 1))
        parts.append(packed(ProfileField.COMMENT, [strings.id(text) for text in comments]))
        parts += [message_field(ProfileField.STRING_TABLE, text) for text in strings.encoded()]
        return b"".join(parts)

    def _tables(self, in_use: I64, strings: StringTable) -> Iterator[bytes]:
        lines = ranges(self.first_line[in_use], self.lines[in_use])
        functions, function = np.unique(self.function[lines], return_inverse=True)
        address, has_mapping = self.address[in_use], self.mapping[in_use] >= 0
        mappings, which = np.unique(self.mapping[in_use][has_mapping], return_inverse=True)
        mapping_id = np.zeros(len(in_use), np.uint64)
        mapping_id[has_mapping] = which + 1
        limits = np.zeros(len(mappings), np.uint64)
        np.maximum.at(limits, which, address[has_mapping])
        limits += limits < _U64_MAX
        function_id = (function + 1).astype(np.uint64)
        yield _locations(mapping_id, address, self.lines[in_use], function_id, self.line[lines])
        for number, (index, limit) in enumerate(
            zip(mappings.tolist(), limits.tolist(), strict=True), 1
        ):
            yield mapping(number, Binary(*self.tables.mappings[index]), limit, strings)
        for number, index in enumerate(functions.tolist(), 1):
            name, file = self.tables.functions[index]
            yield function_message(number, name, file, strings)


def _samples(offsets: I64, locations: U64, values: U64) -> Iterator[bytes]:
    encoded, ends = varints(locations)
    encoded_values, value_ends = varints(values)
    bounds, value_bounds = ends[offsets].tolist(), value_ends.tolist()
    for i in range(len(values)):
        body = message_field(SampleField.LOCATION_ID, encoded[bounds[i] : bounds[i + 1]])
        value = encoded_values[value_bounds[i] : value_bounds[i + 1]]
        yield message_field(ProfileField.SAMPLE, body + message_field(SampleField.VALUE, value))


def _locations(mapping_id: U64, address: U64, lines: I64, function_id: U64, line: U64) -> bytes:
    """Return Location messages with the ids 1, 2, ... as fields of a Profile.

    Args:
        mapping_id, address, lines: Of each location, `lines` being how many it has.
        function_id, line: Of each line, location by location.
    """
    number = np.arange(1, len(lines) + 1, dtype=np.uint64)
    # Tags and lengths of what they stand before take a byte each.
    of_line = 2 + varint_sizes(function_id) + varint_sizes(line)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_line + 2)])
    last = np.cumsum(lines)
    length = 3 + varint_sizes(number) + varint_sizes(mapping_id) + varint_sizes(address)
    length += before[last] - before[last - lines]
    heads: tuple[int | npt.NDArray[Any], ...] = (
        *(_tag(ProfileField.LOCATION, _MESSAGE), length),
        *(_tag(LocationField.ID, _NUMBER), number),
        *(_tag(LocationField.MAPPING_ID, _NUMBER), mapping_id),
        *(_tag(LocationField.ADDRESS, _NUMBER), address),
    )
    bodies: tuple[int | npt.NDArray[Any], ...] = (
        *(_tag(LocationField.LINE, _MESSAGE), of_line),
        *(_tag(LineField.FUNCTION_ID, _NUMBER), function_id),
        *(_tag(LineField.LINE, _NUMBER), line),
    )
    numbers = np.zeros(len(heads) * len(lines) + len(bodies) * len(line), np.uint64)
    owner = np.repeat(np.arange(len(lines)), lines)
    of_head = np.arange(len(lines)) * len(heads) + (last - lines) * len(bodies)
    of_body = np.arange(len(line)) * len(bodies) + (owner + 1) * len(heads)
    for begin, columns in ((of_head, heads), (of_body, bodies)):
        for place, column in enumerate(columns):
            numbers[begin + place] = column
    return varints(numbers)[0]
