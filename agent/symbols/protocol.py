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
from aiflame.agent.symbols.frames import Problem, RawFrame, Resolved, SourceFrame

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
    """The same for frames that are not demangled yet, and where functions without a name begin."""
    table: dict[RawFrame, int] = {}
    packed = [[table.setdefault(frame, len(table)) for frame in chain] for chain in resolved.chains]
    return {
        "frames": [list(frame) for frame in table],
        "chains": packed,
        "starts": resolved.nameless_starts,
    }


def unpack_raw(message: dict[str, Any], count: int) -> Resolved:
    """The reverse of `pack_raw`.

    Raises:
        BadMessage: It is not what `pack_raw` makes for `count` addresses.
    """
    try:
        table = [
            RawFrame(str(name), str(file), int(line)) for name, file, line in message["frames"]
        ]
        chains = [tuple(table[index] for index in chain) for chain in message["chains"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
    if len(chains) != count:
        raise BadMessage(f"{len(chains)} answers for {count} addresses")
    return Resolved(chains, unpack_starts(message, count))


def unpack_starts(message: dict[str, Any], count: int) -> list[int | None]:
    """Where functions without a name begin, as `pack_raw` has it.

    Raises:
        BadMessage: It is not what `pack_raw` makes for `count` addresses.
    """
    starts = message.get("starts")
    if not isinstance(starts, list) or len(starts) != count:
        raise BadMessage(f"no starts for {count} addresses")
    if not all(s is None or (type(s) is int and 0 <= s < 1 << 64) for s in starts):
        raise BadMessage("no addresses")
    return starts


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
