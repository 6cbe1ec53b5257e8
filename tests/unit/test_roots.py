# SPDX-License-Identifier: Apache-2.0
"""Where threads and processes start, by name and by the code that a stripped library has there."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.symbols import roots
from aiflame.agent.target_files import TargetFile


@pytest.mark.parametrize(
    "name",
    [
        "_start",
        "__libc_start_main",
        "__libc_start_main_impl",
        "__libc_start_main@@GLIBC_2.34",
        "__libc_start_call_main",
        "libc_start_main_stage2",
        "start_thread",
        "clone",
        "clone3",
        "__clone3",
        "runtime.goexit",
        "runtime.goexit.abi0",
        "runtime.mstart",
    ],
)
def test_start_names(name: str) -> None:
    assert roots.is_start_name(name)


@pytest.mark.parametrize(
    "name", ["", "main", "_starting", "my_start_thread", "start_threads", "runtime.main", "xclone"]
)
def test_other_names(name: str) -> None:
    assert not roots.is_start_name(name)


_STORE_0X630 = bytes.fromhex("64 48 89 04 25 30 06 00 00")  # mov %rax,%fs:0x630
_STORE_0X628 = bytes.fromhex("64 48 89 04 25 28 06 00 00")
_TO_EXIT = bytes.fromhex("89 c7 e8 11 22 33 44")  # mov %eax,%edi; call exit
_EXIT_THREAD = bytes.fromhex(
    "48 89 c7 b8 3c 00 00 00 0f 05"
)  # mov %rax,%rdi; mov $60,%eax; syscall


@pytest.fixture
def library() -> Iterator[Callable[..., TargetFile]]:
    """`library({offset: code})`: a file with this code, and nops elsewhere."""
    opened = []

    def make(code: dict[int, bytes], size: int = 4096) -> TargetFile:
        content = bytearray(b"\x90" * size)
        for offset, part in code.items():
            content[offset : offset + len(part)] = part
        fd = os.memfd_create("library")
        opened.append(fd)
        os.write(fd, content[:size])
        return TargetFile(fd)

    yield make
    for fd in opened:
        os.close(fd)


def _jump(at: int, to: int) -> bytes:
    return struct.pack("<Bi", 0xE9, to - (at + 5))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ({0x100: _STORE_0X630}, "start_thread"),
        ({0x100: _STORE_0X628}, "start_thread"),
        ({0x100: _TO_EXIT}, "__libc_start_call_main"),
        ({0xFE: bytes.fromhex("ff d0"), 0x100: _TO_EXIT}, "__libc_start_call_main"),
        # musl keeps main in a register: %rbx, %rbp, %r12 to %r15, but not %r11.
        ({0xFE: bytes.fromhex("ff d3"), 0x100: _TO_EXIT}, "libc_start_main_stage2"),
        ({0xFD: bytes.fromhex("f6 ff d5"), 0x100: _TO_EXIT}, "libc_start_main_stage2"),
        ({0xFD: bytes.fromhex("41 ff d4"), 0x100: _TO_EXIT}, "libc_start_main_stage2"),
        ({0xFD: bytes.fromhex("41 ff d3"), 0x100: _TO_EXIT}, "__libc_start_call_main"),
        ({0x100: _EXIT_THREAD}, "clone3"),
        ({0x100: bytes.fromhex("89 c7 31 c0 b0 3c 0f 05 f4")}, "clone"),  # musl
        # The compiler may have put what follows elsewhere: after and before.
        ({0x100: _jump(0x100, 0x800), 0x800: _STORE_0X630}, "start_thread"),
        ({0x100: _jump(0x100, 0x20), 0x20: _STORE_0X630}, "start_thread"),
        # Nearly: another segment register, another offset, another system call, no call.
        ({0x100: b"\x65" + _STORE_0X630[1:]}, None),
        ({0x100: _STORE_0X630[:6] + b"\x07\x00\x00"}, None),
        ({0x100: _EXIT_THREAD.replace(b"\x3c", b"\x3b")}, None),
        ({0x100: _TO_EXIT[:2] + b"\xe9"}, None),
        ({0x101: _STORE_0X630}, None),
        ({}, None),
        # Jumps to nowhere: before the file, past it, to a jump.
        ({0x100: _jump(0x100, -1)}, None),
        ({0x100: _jump(0x100, -0x7FFF_0000)}, None),
        ({0x100: _jump(0x100, 0x7FFF_0000)}, None),
        ({0x100: _jump(0x100, 0x100)}, None),
    ],
)
def test_code_after_the_call(
    library: Callable[..., TargetFile], code: dict[int, bytes], name: str | None
) -> None:
    assert roots.start_name_in_libc(library(code), 0x100) == name


@pytest.mark.parametrize("offset", [90, 95, 99, 100, 1 << 40])
def test_code_at_the_end_of_the_file(library: Callable[..., TargetFile], offset: int) -> None:
    file = library({90: _jump(90, 0x800)[:3], 95: _STORE_0X630}, size=100)
    assert roots.start_name_in_libc(file, offset) is None


@pytest.mark.parametrize(
    ("entry", "address", "is_there"),
    [
        (0x401040, 0x401040, True),
        (0x401040, 0x401065, True),
        (0x401040, 0x40103F, False),
        (0x401040, 0x401080, False),
        (0, 0, False),  # a library has no entry
        (0, 0x10, False),
    ],
)
def test_is_at_entry(entry: int, address: int, is_there: bool) -> None:
    assert roots.is_at_entry(entry, address) is is_there


def test_the_entry_of_a_real_program_is_known_by_its_header() -> None:
    with Path("/proc/self/exe").open("rb") as program:
        file = TargetFile(program.fileno())
        image = ElfImage.read(file)
        # A caller is looked up by the last byte of its call.
        assert roots.name_by_code(file, image, image.entry + 0x25) == ("_start", True)
        assert roots.name_by_code(file, image, 0) == ("", False)


def test_signal_trampoline_is_known_by_its_code(library: Callable[..., TargetFile]) -> None:
    trampoline = bytes.fromhex("48c7c00f000000 0f05")
    assert roots.is_signal_return(library({0x100: trampoline}), 0x100)
    assert not roots.is_signal_return(library({0x100: trampoline[:-1]}), 0x100)
