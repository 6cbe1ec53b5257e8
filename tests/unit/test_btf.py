# SPDX-License-Identifier: Apache-2.0
"""Struct offsets from kernel type information, built here byte by byte."""

from __future__ import annotations

import struct

import pytest
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel.btf import VMLINUX, Btf

_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _TYPEDEF = 1, 2, 3, 4, 5, 6, 8
_FUNC, _FUNC_PROTO, _VAR, _DATASEC, _DECL_TAG, _ENUM64 = 12, 13, 14, 15, 17, 19


class _Builder:
    """Makes a blob; types are numbered from 1 in the order in which they are added."""

    def __init__(self) -> None:
        self._strings = b"\0"
        self._types = b""
        self._count = 0

    def name(self, text: str) -> int:
        if not text:
            return 0
        self._strings += text.encode() + b"\0"
        return len(self._strings) - len(text) - 1

    def add(
        self,
        kind: int,
        name: str = "",
        target: int = 0,
        vlen: int = 0,
        flag: int = 0,
        data: bytes = b"",
    ) -> int:
        info = flag << 31 | kind << 24 | vlen
        self._types += struct.pack("<III", self.name(name), info, target) + data
        self._count += 1
        return self._count

    def composite(
        self, name: str, *members: tuple[str, int, int], kind: int = _STRUCT, flag: int = 0
    ) -> int:
        """Adds a struct or union of (name, type, offset in bits)."""
        data = b"".join(struct.pack("<III", self.name(n), t, bits) for n, t, bits in members)
        return self.add(kind, name, 64, len(members), flag, data)

    def build(self, magic: int = 0xEB9F) -> bytes:
        header = struct.pack(
            "<HBBIIIII", magic, 1, 0, 24, 0, len(self._types), len(self._types), len(self._strings)
        )
        return header + self._types + self._strings


def _blob() -> bytes:
    b = _Builder()
    number = b.add(_INT, "int", 4, data=struct.pack("<I", 32))
    # One of each kind whose record is followed by data, so that a wrong size shifts the rest.
    b.add(_ARRAY, data=struct.pack("<III", number, number, 4))
    b.add(_ENUM, "colour", 4, 2, data=struct.pack("<IiIi", b.name("RED"), 0, b.name("BLUE"), 1))
    b.add(_ENUM64, "large", 8, 1, data=struct.pack("<III", b.name("HUGE"), 0, 1))
    b.add(_VAR, "variable", number, data=struct.pack("<I", 1))
    b.add(_DATASEC, ".data", 4, 1, data=struct.pack("<III", 5, 0, 4))
    b.add(_DECL_TAG, "tag", number, data=struct.pack("<i", -1))
    inner = b.composite("", ("deep", number, 32), ("deeper", number, 64))
    union = b.composite("", ("choice", number, 0), ("", inner, 64), kind=_UNION)
    named = b.composite("list_head", ("next", number, 0), ("prev", number, 64))
    b.composite(
        "task_struct",
        ("__state", number, 0),
        ("", union, 128),
        ("tasks", named, 512),
        ("pid", number, 640),
    )
    # Bitfields: the upper 8 bits of an offset are the field's width.
    b.composite("flags", ("low", number, 3 << 24), ("high", number, 5 << 24 | 35), flag=1)
    for arguments in (1, 4):
        data = struct.pack("<II", 0, number) * (arguments + 1)
        prototype = b.add(_FUNC_PROTO, vlen=arguments + 1, data=data)
        pointer = b.add(_PTR, target=prototype)
        b.add(_TYPEDEF, f"btf_trace_with_{arguments}", pointer)
    b.add(_FUNC, "btf_trace_not_a_typedef", number)
    return b.build()


@pytest.mark.parametrize(
    ("struct_name", "names", "offset"),
    [
        ("task_struct", ["__state"], 0),
        ("task_struct", ["pid"], 80),
        ("task_struct", ["tasks"], 64),
        ("list_head", ["prev"], 8),
        # In anonymous structs and unions, in one another.
        ("task_struct", ["choice"], 16),
        ("task_struct", ["deep"], 28),
        ("task_struct", ["deeper"], 32),
        # Under an older name, and the newer one first.
        ("task_struct", ["new_pid", "pid"], 80),
        ("task_struct", ["__state", "pid"], 0),
        # Bitfields: of the byte that they begin in.
        ("flags", ["low"], 0),
        ("flags", ["high"], 4),
    ],
)
def test_member_offset(struct_name: str, names: list[str], offset: int) -> None:
    assert Btf(_blob()).member_offset(struct_name, *names) == offset


@pytest.mark.parametrize(
    ("struct_name", "names"),
    [
        ("task_struct", ["nope", "neither"]),
        ("task_struct", ["next"]),  # of a named struct: not the struct's own
        ("task_struct", ["ask_struct"]),  # the tail of a name
        ("no_struct", ["pid"]),
        ("int", ["pid"]),
        ("colour", ["RED"]),
    ],
)
def test_what_the_kernel_does_not_have_is_named(struct_name: str, names: list[str]) -> None:
    with pytest.raises(EnvironmentUnfit, match=rf"this kernel has no {struct_name}\.{names[0]} "):
        Btf(_blob()).member_offset(struct_name, *names)


def test_arguments_of_a_tracepoint() -> None:
    btf = Btf(_blob())
    assert btf.tracepoint_arguments("with_1") == 1
    assert btf.tracepoint_arguments("with_4") == 4
    for name in ("with_2", "with_", "not_a_typedef"):
        with pytest.raises(EnvironmentUnfit, match=f"this kernel has no tracepoint {name} "):
            btf.tracepoint_arguments(name)


def test_type_of_a_function() -> None:
    b = _Builder()
    number = b.add(_INT, "int", 4, data=struct.pack("<I", 32))
    prototype = b.add(_FUNC_PROTO)
    b.add(_TYPEDEF, "bpf_iter_tasks", number)
    function = b.add(_FUNC, "bpf_iter_task", prototype)
    btf = Btf(b.build())
    assert btf.function_type("bpf_iter_task") == function
    for name in ("bpf_iter_tasks", "bpf_iter", "int"):
        with pytest.raises(EnvironmentUnfit, match=f"this kernel has no function {name} "):
            btf.function_type(name)


def test_a_blob_of_something_else() -> None:
    with pytest.raises(EnvironmentUnfit, match="bad magic 0x464c"):
        Btf(_Builder().build(magic=0x464C))


def _offset_of_pid(blob: bytes) -> int | str:
    try:
        return Btf(blob).member_offset("task_struct", "pid")
    except EnvironmentUnfit as error:
        return " ".join(str(error).split()[:3])


def test_a_cut_blob_is_named_or_answers_right() -> None:
    whole = _blob()
    answers = {_offset_of_pid(whole[:length]) for length in range(len(whole))}
    # Its name may still be there where only the names of others are gone.
    assert answers == {80, "kernel type information", "this kernel has"}


def test_types_that_refer_to_nothing() -> None:
    b = _Builder()
    b.composite("broken", ("", 99, 0), ("pid", 99, 8))
    b.add(_TYPEDEF, "btf_trace_broken", 99)
    btf = Btf(b.build())
    with pytest.raises(EnvironmentUnfit, match="kernel type information"):
        btf.member_offset("broken", "pid")
    with pytest.raises(EnvironmentUnfit, match="kernel type information"):
        btf.tracepoint_arguments("broken")


def test_a_kernel_without_it(tmp_path) -> None:
    with pytest.raises(EnvironmentUnfit, match=r"no type information: .*: No such file") as error:
        Btf.of_kernel(tmp_path / "vmlinux")
    assert "CONFIG_DEBUG_INFO_BTF=y" in (error.value.hint or "")


@pytest.mark.bpf
def test_the_running_kernel() -> None:
    btf = Btf.of_kernel(VMLINUX)
    assert btf.member_offset("list_head", "prev") == 8
    assert btf.member_offset("task_struct", "tgid") == btf.member_offset("task_struct", "pid") + 4
    assert btf.tracepoint_arguments("sched_switch") in (3, 4)  # v5.18 added prev_state
    assert btf.function_type("bpf_iter_task") > 0
