# SPDX-License-Identifier: Apache-2.0
"""Probes lie on an instruction that the kernel emulates, where all arguments are still there."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from aiflame.agent.kernel.uprobe_tries import NopTreatment, Treatment
from aiflame.agent.launches.probe_sites import ProbeSite, choose_site, read_prologue
from aiflame.agent.launches.symbols import find_functions
from aiflame.agent.target_files import TargetFile
from hypothesis import given
from hypothesis import strategies as st

ENDBR64 = "f3 0f 1e fa "
PUSH_RBP = "55 "
PUSH_R12 = "41 54 "
NOP5 = "0f 1f 44 00 00 "
RET = "c3"
RET_BYTES = bytes.fromhex(RET)


# As of the newest kernels.
_ALL_EMULATED = NopTreatment(Treatment.EMULATED, Treatment.EMULATED)


def _site(text: str, nops: NopTreatment = _ALL_EMULATED, **options: bool) -> ProbeSite:
    return choose_site(read_prologue(bytes.fromhex(text), 0x401000), nops, **options)


@pytest.mark.parametrize(
    ("what", "code", "offset", "stack"),
    [
        ("push rbp at the entry", PUSH_RBP + "48 89 e5" + RET, 0, 0),
        ("push r12 at the entry", PUSH_R12 + RET, 0, 0),
        ("a no-operation for patching", NOP5 + PUSH_RBP + RET, 0, 0),
        ("one byte of no-operation", "90" + RET, 0, 0),
        ("endbr64 is stepped over", ENDBR64 + PUSH_RBP + RET, 4, 0),
        ("endbr64, then room for patching", ENDBR64 + NOP5 + RET, 4, 0),
        ("a jump to the implementation", "e9 00 10 00 00", 0, 0),
        ("a short jump", "eb 10", 0, 0),
        ("endbr64, then a jump", ENDBR64 + "e9 00 10 00 00", 4, 0),
        ("a loader's table: mov rax, [rip+n]; push rbx", "48 8b 05 61 77 00 00 53" + RET, 7, 0),
        ("mov rax, [rip+n]; test; jne", "48 8b 05 e9 7c 00 00 48 85 c0 75 14" + RET, 10, 0),
        ("sub rsp, 0x68; mov rax, fs:[0x28]; push rbx", "48 83 ec 68 64 48 8b 04 25 28 00 00 00 53"
         + RET, 13, 0x68),
        ("sub rsp, 0x1000; push rbx", "48 81 ec 00 10 00 00 53" + RET, 7, 0x1000),
        ("add rsp, -0x80 grows it too; push rbx", "48 83 c4 80 53" + RET, 4, 0x80),
        ("sub rsp, 0x18; a copy of rdi in the own frame; call", "48 83 ec 18 48 89 7c 24 08"
         " e8 00 00 00 00" + RET, 9, 0x18),
        ("an argument is read: mov rax, rdi; push rbx", "48 89 f8 53" + RET, 3, 0),
        ("push 8; push rbx: what is not emulated counts", "6a 08 53" + RET, 2, 8),
        ("an argument of the caller's stack is read", "4c 8b 54 24 08 53" + RET, 5, 0),
    ],
)  # fmt: skip
def test_first_emulated_instruction_is_taken(what: str, code: str, offset: int, stack: int) -> None:
    assert _site(code) == ProbeSite(offset, stack, True), what


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("mov rdi, rsi", "48 89 f7 53"),
        ("xor esi, esi", "31 f6 53"),
        ("mov dl, 1", "b2 01 53"),
        ("mov r8w, ax", "66 41 89 c0 53"),
        ("movzx r9d, al", "44 0f b6 c8 53"),
        ("cmove rcx, rax", "48 0f 44 c8 53"),
        ("xchg rax, rdi", "48 97 53"),
        ("cdq writes rdx unseen", "99 53"),
        ("mul rax writes rdx unseen", "48 f7 e0 53"),
        ("rep stosq", "f3 48 ab 53"),
        ("lock add: a write of memory", "f0 48 83 00 01 53"),
        ("mov [rax], rbx may be anywhere", "48 89 18 53"),
        ("mov [rip+n], rax", "48 89 05 00 00 00 00 53"),
        ("mov [rsp+8], rdi: the caller's first argument on the stack", "48 89 7c 24 08 53"),
        ("mov [rsp], rax: the return address", "48 89 04 24 53"),
        ("sub rsp, 8; mov [rsp+4], rax: partly the return address", "48 83 ec 08"
         " 48 89 44 24 04 53"),
        ("mov [rsp+rax-0x40], rbx", "48 89 5c 04 c0 53"),
        ("and rsp, -16", "48 83 e4 f0 53"),
        ("lea rsp, [rsp-8]", "48 8d 64 24 f8 53"),
        ("mov rsp, rax", "48 89 c4 53"),
        ("pop rax", "58 53"),
        ("add rsp, 8", "48 83 c4 08 53"),
        ("sub rsp, -8", "48 83 ec f8 53"),
        ("sub esp, 8 cuts the pointer", "83 ec 08 53"),
        ("push ax: two bytes", "66 50 53"),
        ("sub rsp, rax", "48 29 c4 53"),
        ("enter 16, 0", "c8 10 00 00 53"),
        ("leave", "c9 53"),
        ("jmp rax", "ff e0 53"),
        ("call [rip+n]", "ff 15 00 00 00 00 53"),
        ("ret", "c3 53"),
        ("syscall", "0f 05 53"),
        ("int3", "cc 53"),
        ("ud2", "0f 0b 53"),
        ("an invalid byte", "06 53"),
        ("nothing", ""),
        ("cut inside an instruction", "48 8b"),
        ("too far in", "48 89 f8" * 11 + "53"),
    ],
)  # fmt: skip
def test_entry_is_taken_where_an_argument_could_be_lost(what: str, code: str) -> None:
    assert _site(code + RET if code else "") == ProbeSite(0, 0, False), what


@pytest.mark.parametrize(
    ("what", "jump"),
    [
        ("jmp to it", "eb f6"),
        ("jne to it", "75 f6"),
        ("loop to it", "e2 f6"),
        ("jrcxz to it", "e3 f6"),
        ("jmp with four bytes", "e9 f3 ff ff ff"),
        ("jne with four bytes", "0f 85 f2 ff ff ff"),
        ("jmp before it, past the entry", "eb f5"),
    ],
)
def test_site_inside_a_loop_is_refused(what: str, jump: str) -> None:
    # GIVEN mov rax, rdi; push rbx (at 3); and instructions up to 11
    head = "48 89 f8 53 48 89 c3 48 89 d8 90"
    assert _site(head + RET).offset_bytes == 3
    # WHEN something later jumps to it THEN a call would be counted more than once
    code = head + jump + RET
    assert _site(code) == ProbeSite(0, 0, False), what


def test_jump_from_afar_is_seen() -> None:
    head = bytes.fromhex("48 89 f8 53") + b"\x90" * 5000
    back = b"\xe9" + (3 - len(head) - 5).to_bytes(4, "little", signed=True)
    assert choose_site(read_prologue(head + RET_BYTES, 0), _ALL_EMULATED).offset_bytes == 3
    assert choose_site(read_prologue(head + back + RET_BYTES, 0), _ALL_EMULATED).offset_bytes == 0


def test_probe_of_the_return_needs_the_return_address_on_top() -> None:
    on_top = ENDBR64 + PUSH_RBP + RET
    assert _site(on_top, for_return=True) == ProbeSite(4, 0, True)
    below = "48 83 ec 68 53" + RET
    assert _site(below) == ProbeSite(4, 0x68, True)
    assert _site(below, for_return=True) == ProbeSite(0, 0, False)


def test_jump_to_the_entry_does_no_harm() -> None:
    assert _site("48 89 f8 53 5b eb f9 c3").offset_bytes == 3


def test_long_no_operations_that_are_stepped_are_passed_over() -> None:
    code = ENDBR64 + NOP5 + PUSH_RBP + RET
    assert _site(code) == ProbeSite(4, 0, True)
    assert _site(code, NopTreatment()) == ProbeSite(9, 0, True)
    assert _site(NOP5 + RET, NopTreatment()) == ProbeSite(0, 0, False)


def test_a_no_operation_that_is_refused_gets_no_probe() -> None:
    lea = "48 8d 3d 00 10 00 00 "
    assert _site("66 90 " + PUSH_RBP + RET, NopTreatment()) == ProbeSite(2, 0, True)
    assert _site("66 90 " + lea + RET, NopTreatment()) == ProbeSite(2, 0, False)
    stepped = NopTreatment(prefixed=Treatment.STEPPED)
    assert _site("66 90 " + lea + RET, stepped) == ProbeSite(0, 0, False)
    # Nothing else may be taken: whoever attaches it will say so.
    jumped_to = "66 90 " + lea + "eb f7 " + RET
    assert _site(jumped_to, NopTreatment()) == ProbeSite(0, 0, False)


def test_code_after_it_that_cannot_be_read_may_jump_back() -> None:
    assert _site("48 89 f8 53 06 c3") == ProbeSite(0, 0, False)


_PARTS = st.sampled_from(
    [
        bytes.fromhex(text)
        for text in (
            "f3 0f 1e fa", "55", "41 57", "0f 1f 44 00 00", "48 89 f8", "48 83 ec 18", "31 f6",
            "48 89 7c 24 08", "75 02", "eb fd", "48 8b 05 00 10 00 00", "90", "c3", "48 85 ff",
        )
    ]
)  # fmt: skip


@given(st.lists(_PARTS, min_size=1, max_size=12), st.integers(0, 1 << 48))
def test_site_is_an_instruction_that_every_call_passes_with_its_arguments(
    parts: list[bytes], address: int
) -> None:
    code = b"".join(parts)
    site = choose_site(read_prologue(code, address), _ALL_EMULATED)
    starts = [len(b"".join(parts[:index])) for index in range(len(parts))]
    assert site.offset_bytes in starts
    before = parts[: starts.index(site.offset_bytes)]
    assert bytes.fromhex("31 f6") not in before
    assert b"\xc3" not in before
    assert site.stack_bytes == 0x18 * before.count(bytes.fromhex("48 83 ec 18"))
    assert site == choose_site(read_prologue(code, 0), _ALL_EMULATED)


@given(st.binary(max_size=300))
def test_any_bytes_have_a_site(code: bytes) -> None:
    site = choose_site(read_prologue(code, 0), _ALL_EMULATED)
    assert 0 <= site.offset_bytes < max(1, min(32, len(code)))
    assert site.is_emulated or site == ProbeSite(0, 0, False)


def _objdump_starts(path: str) -> set[int]:
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "-j", ".text", path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {int(text, 16) for text in re.findall(r"^ *([0-9a-f]+):", listing, re.MULTILINE)}


def test_places_in_a_real_library_are_instructions() -> None:
    # GIVEN functions of the C library, where addresses of code are offsets in the file
    path = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libc.so.6" in line
    )
    names = frozenset(("getenv", "qsort_r", "fopen", "printf", "strtol", "realpath", "glob"))
    descriptor = os.open(path, os.O_RDONLY)
    found = find_functions(TargetFile(descriptor), names)
    os.close(descriptor)
    # WHEN sites are chosen THEN another disassembler sees instructions there
    sites = {
        f.file_offset + choose_site(read_prologue(f.code, 0), _ALL_EMULATED).offset_bytes
        for f in found.values()
    }
    assert len(sites) >= 5
    assert sites <= _objdump_starts(path)


def test_loader_of_opencl_is_probed_cheaply() -> None:
    path = ctypes.util.find_library("OpenCL")
    if path is None:
        pytest.skip("no OpenCL loader")
    ctypes.CDLL(path)
    mapped = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libOpenCL" in line
    )
    descriptor = os.open(mapped, os.O_RDONLY)
    found = find_functions(
        TargetFile(descriptor), frozenset(("clEnqueueNDRangeKernel", "clFinish"))
    )
    os.close(descriptor)
    assert set(found) == {"clEnqueueNDRangeKernel", "clFinish"}
    # THEN its functions need no emulation of no-operations
    sites = [
        choose_site(read_prologue(f.code, f.file_offset), NopTreatment()) for f in found.values()
    ]
    assert all(site.is_emulated for site in sites)
