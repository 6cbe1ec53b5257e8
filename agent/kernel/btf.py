# SPDX-License-Identifier: Apache-2.0
"""Struct offsets from the running kernel's BTF.

Reads only what the programs need: member offsets of named structs, the number of arguments of a
tracepoint and the type of a function. The format is Documentation/bpf/btf.rst and
include/uapi/linux/btf.h (v6.1): a header, then type records of 12 bytes each followed by
kind-specific data, then strings.
"""

from __future__ import annotations

import array
import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aiflame.agent import kernelfs
from aiflame.agent.errors import EnvironmentUnfit

VMLINUX = Path("/sys/kernel/btf/vmlinux")

_MAGIC = 0xEB9F
_STRUCT, _UNION, _TYPEDEF, _FUNC = 4, 5, 8, 12
# Bytes that follow a type record: per member for the kinds with a count, else fixed.
_BYTES_PER_MEMBER = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_FIXED_BYTES = {1: 4, 3: 12, 14: 4, 17: 4}


class _Type(NamedTuple):
    kind: int
    members: int
    is_bitfield_encoded: bool
    target: int  # size of a struct, or the type referred to
    data_at: int


@contextlib.contextmanager
def _damage_explained() -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError) as error:
        raise EnvironmentUnfit(f"kernel type information is cut or damaged: {error}") from error


class Btf:
    """One BTF blob, indexed once.

    Args:
        blob: The bytes of /sys/kernel/btf/vmlinux.

    Raises:
        EnvironmentUnfit: The blob is not BTF, or not a whole one.
    """

    @_damage_explained()
    def __init__(self, blob: bytes) -> None:
        magic, _, _, header_bytes, types_at, types_bytes, strings_at, _ = struct.unpack_from(
            "<HBBIIIII", blob
        )
        if magic != _MAGIC:
            raise EnvironmentUnfit(f"kernel type information: bad magic {magic:#x}")
        self._blob = blob
        self._strings_at = header_bytes + strings_at
        # Where each type record is: a list of 100,000 objects would take 30 MB.
        self._type_at = array.array("I", [0])  # type 0 is void, and has none
        self._names = array.array("I", [0])  # offset of its name among the strings, likewise
        self._index(header_bytes + types_at, types_bytes)

    @classmethod
    def of_kernel(cls, path: Path = VMLINUX) -> Btf:
        """Reads the running kernel's BTF.

        Raises:
            EnvironmentUnfit: The kernel was built without it.
        """
        try:
            return cls(kernelfs.read_bytes(path))
        except OSError as error:
            raise EnvironmentUnfit(
                f"this kernel has no type information: {path}: {error.strerror}",
                "use a kernel built with CONFIG_DEBUG_INFO_BTF=y",
            ) from error

    def _index(self, at: int, length: int) -> None:
        unpack = struct.Struct("<II").unpack_from
        end, blob = at + length, self._blob
        append_offset, append_name = self._type_at.append, self._names.append
        while at < end:
            name, info = unpack(blob, at)
            kind = info >> 24 & 0x1F
            append_offset(at)
            append_name(name)
            member_bytes = _BYTES_PER_MEMBER.get(kind)
            if member_bytes is None:
                at += 12 + _FIXED_BYTES.get(kind, 0)
            else:
                at += 12 + member_bytes * (info & 0xFFFF)

    def _type(self, index: int) -> _Type:
        if not index:
            return _Type(0, 0, False, 0, 0)
        at = self._type_at[index]
        _, info, target = struct.unpack_from("<III", self._blob, at)
        return _Type(info >> 24 & 0x1F, info & 0xFFFF, bool(info >> 31), target, at + 12)

    def _string_offset(self, text: str) -> int:
        found = self._blob.find(b"\0" + text.encode() + b"\0", self._strings_at - 1)
        return found + 1 - self._strings_at if found >= 0 else -1

    def _find(self, kind: int, name: str) -> int | None:
        wanted, index = self._string_offset(name), 0
        with contextlib.suppress(ValueError):  # no such name, or no more types of that name
            while wanted > 0:
                index = self._names.index(wanted, index + 1)
                if self._type(index).kind == kind:
                    return index
        return None

    @_damage_explained()
    def member_offset(self, struct_name: str, *names: str) -> int:
        """Returns the offset in bytes of the first of `names` that the struct has.

        Several names stand for renames, newest first. Members of anonymous structs and unions
        count as the struct's own.

        Raises:
            EnvironmentUnfit: The struct or all of the members are missing.
        """
        index = self._find(_STRUCT, struct_name)
        if index is not None:
            for name in names:
                bits = self._member_bits(index, self._string_offset(name))
                if bits is not None:
                    return bits // 8
        raise EnvironmentUnfit(f"this kernel has no {struct_name}.{names[0]} (asked from its BTF)")

    def _member_bits(self, index: int, wanted: int) -> int | None:
        entry = self._type(index)
        for i in range(entry.members):
            name, kind_index, bits = struct.unpack_from("<III", self._blob, entry.data_at + 12 * i)
            bits = bits & 0xFFFFFF if entry.is_bitfield_encoded else bits
            if name == wanted:
                return int(bits)
            if name == 0 and self._type(kind_index).kind in (_STRUCT, _UNION):
                inner = self._member_bits(kind_index, wanted)
                if inner is not None:
                    return int(bits) + inner
        return None

    @_damage_explained()
    def tracepoint_arguments(self, name: str) -> int:
        """Returns how many arguments the kernel passes to raw tracepoint `name`.

        BTF has a typedef `btf_trace_<name>` of a function pointer whose first argument is the
        probe's private data (kernel commit e8c423fb31fa, v5.5).

        Raises:
            EnvironmentUnfit: The kernel has no such tracepoint.
        """
        index = self._find(_TYPEDEF, f"btf_trace_{name}")
        if index is None:
            raise EnvironmentUnfit(f"this kernel has no tracepoint {name} (asked from its BTF)")
        prototype = self._type(self._type(self._type(index).target).target)
        return prototype.members - 1

    def function_type(self, name: str) -> int:
        """Returns the id of a kernel function's type, by which a program attaches to it.

        Raises:
            EnvironmentUnfit: The kernel has no such function.
        """
        index = self._find(_FUNC, name)
        if index is None:
            raise EnvironmentUnfit(f"this kernel has no function {name} (asked from its BTF)")
        return index
