# SPDX-License-Identifier: Apache-2.0
"""Messages between the recorder and its symbol worker: a length, then JSON.

JSON and not pickle, since the worker reads hostile files: should one take it over, its answers
must still be only data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.frames import Problem, Range, RawFrame, Resolved, SourceFrame

LENGTH = struct.Struct("<I")
# An answer for 1,000,000 addresses of distinct functions is about 200 MB.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024

Frames = list[tuple[SourceFrame, ...]]


class BadMessage(ValueError):
    """The other side sent something that is not a message of this protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """One message, ready to be written."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The body of one message.

    Raises:
        BadMessage: It is not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadMessage(str(error)) from error
    if not isinstance(message, dict):
        raise BadMessage("not an object")
    return message


def pack_frames(frames: Frames) -> dict[str, Any]:
    """Frames with every distinct one written once."""
    table: dict[SourceFrame, int] = {}
    chains = [[table.setdefault(frame, len(table)) for frame in chain] for chain in frames]
    rows = [[frame.name, frame.file, frame.line, frame.inlined] for frame in table]
    return {"frames": rows, "chains": chains}


def unpack_frames(message: dict[str, Any], count: int) -> Frames:
    """The reverse of `pack_frames`.

    Raises:
        BadMessage: It is not what `pack_frames` makes for `count` addresses.
    """
    try:
        table = [
            SourceFrame(str(name), str(file), int(line), bool(inlined))
            for name, file, line, inlined in message["frames"]
        ]
        frames = [tuple(table[index] for index in chain) for chain in message["chains"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
    if len(frames) != count:
        raise BadMessage(f"{len(frames)} answers for {count} addresses")
    return frames


def pack_raw(resolved: Resolved) -> dict[str, Any]:
    """The same for frames that are not demangled yet, and of which addresses that is known."""
    table: dict[RawFrame, int] = {}
    packed = [[table.setdefault(frame, len(table)) for frame in chain] for chain in resolved.chains]
    return {
        "frames": [list(frame) for frame in table],
        "chains": packed,
        "ranges": resolved.ranges,
    }


def unpack_raw(message: dict[str, Any], addresses: Sequence[int]) -> Resolved:
    """The reverse of `pack_raw`.

    Raises:
        BadMessage: It is not what `pack_raw` makes for these addresses.
    """
    try:
        table = [
            RawFrame(str(name), str(file), int(line)) for name, file, line in message["frames"]
        ]
        chains = [tuple(table[index] for index in chain) for chain in message["chains"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
    if len(chains) != len(addresses):
        raise BadMessage(f"{len(chains)} answers for {len(addresses)} addresses")
    return Resolved(chains, unpack_ranges(message, addresses))


def unpack_ranges(message: dict[str, Any], addresses: Sequence[int]) -> list[Range | None]:
    """Of which addresses the same is known, as `pack_raw` has it.

    Raises:
        BadMessage: It is not what `pack_raw` makes for these addresses.
    """
    ranges = message.get("ranges")
    if not isinstance(ranges, list) or len(ranges) != len(addresses):
        raise BadMessage(f"no ranges for {len(addresses)} addresses")
    return [
        None if said is None else _range_around(address, said)
        for said, address in zip(ranges, addresses, strict=True)
    ]


def _range_around(address: int, said: object) -> Range:
    if not isinstance(said, list) or [type(bound) for bound in said] != [int, int]:
        raise BadMessage("no range")
    found = Range(*said)
    if not 0 <= found.begin <= address < found.end <= 1 << 64:
        raise BadMessage("a range without its address")
    return found


def pack_problems(problems: Sequence[Problem]) -> list[list[str]]:
    """Problems as plain lists."""
    return [[problem.reason.stored_name, problem.detail] for problem in problems]


def unpack_problems(message: dict[str, Any]) -> list[Problem]:
    """The reverse of `pack_problems`.

    Raises:
        BadMessage: It is not a list of pairs, or a reason is none.
    """
    try:
        return [
            Problem(LossKind[str(reason).upper()], str(detail))
            for reason, detail in message["problems"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
