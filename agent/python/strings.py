# SPDX-License-Identifier: Apache-2.0
"""Reads str objects of a target (PEP 393)."""

from __future__ import annotations

import struct
from typing import NamedTuple

from aiflame.agent.python.layouts import Layout
from aiflame.agent.python.memory import Reading, sound_address

_CODECS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}


class Text(NamedTuple):
    """What was read of a str.

    Attributes:
        characters: As the target has them: not safe to show.
        is_cut: It is longer.
    """

    characters: str
    is_cut: bool


def read_str(layout: Layout, address: int, most_characters: int) -> Reading[Text | None]:
    """Reads a compact str, which all are but those that old extension modules make.

    Args:
        layout: Of the interpreter.
        address: Of the object.
        most_characters: How much is read of it, whatever it says its length is.

    Returns:
        None where there is none.
    """
    head = (yield address, layout.str_state + 4) if sound_address(address) else None
    if head is None:
        return None
    length = struct.unpack_from("<q", head, layout.str_length)[0]
    state = struct.unpack_from("<I", head, layout.str_state)[0] >> layout.str_kind_shift
    width, compact, ascii_only = state & 7, state >> 3 & 1, state >> 4 & 1
    if width not in _CODECS or not compact or length < 0 or (ascii_only and width != 1):
        return None
    if length == 0:
        return Text("", False)
    data_at = layout.str_ascii_data if ascii_only else layout.str_compact_data
    data = yield address + data_at, min(length, most_characters) * width
    if data is None:
        return None
    # UCS-2 is UTF-16 without surrogate pairs, and may hold lone surrogates.
    return Text(data.decode(_CODECS[width], "replace"), length > most_characters)
