# SPDX-License-Identifier: Apache-2.0
"""The eval loop's moved parts, told by their jumps without symbols; and thread keys' offsets."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.elf.symbols import first_symbols
from aiflame.agent.python.evalcode import AddressRange, eval_ranges, jump_targets, key_operand
from aiflame.agent.python.interpreter import Interpreter
from aiflame.agent.python.questions import interpreter_in
from aiflame.agent.target_files import TargetFile
from pymemory import debug_offsets

_EVAL = b"_PyEval_EvalFrameDefault"

# Each case calls a cold function and goes on, so GCC moves the call and jumps there and back.
# Equal functions surround it (kept apart by -fno-ipa-icf), whose parts must not be taken for its
# own.
_SOURCE = """
__attribute__((cold, noinline)) int rare(int n) { asm volatile(""); return n + 1; }
#define FEW(n) if (__builtin_expect(x == n, 0)) x += rare(n * 7) * x;
#define MORE(n) FEW(n) FEW(n + 1) FEW(n + 2) FEW(n + 3) FEW(n + 4) FEW(n + 5)
#define FUNCTION(name) int name(int x) { for (int i = 0; i < 100; i++) { \\
  MORE(100) MORE(200) MORE(300) x ^= i * x; } return x; }
FUNCTION(before)
FUNCTION(_PyEval_EvalFrameDefault)
FUNCTION(after)
"""


def _ranges(path: Path) -> tuple[tuple[AddressRange, ...], bool]:
    fd = os.open(path, os.O_RDONLY)
    try:
        file = TargetFile(fd)
        image = ElfImage.read(file)
        return eval_ranges(file, image, first_symbols(file, image, (_EVAL,))[_EVAL])
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    (folder / "eval.c").write_text(_SOURCE)
    command = [
        "gcc",
        "-O2",
        "-fno-ipa-icf",
        "-shared",
        "-fPIC",
        "-o",
        folder / "eval.so",
        folder / "eval.c",
    ]
    subprocess.run(command, check=True)
    return folder / "eval.so"


def test_cold_parts_are_found_without_symbols_as_with_them(library: Path) -> None:
    named, is_named = _ranges(library)
    assert is_named
    assert len(named) == 2
    stripped = library.with_name("stripped.so")
    subprocess.run(["strip", "-o", stripped, library], check=True)
    found, is_named = _ranges(stripped)
    assert not is_named
    assert found == named


# A tail-calling interpreter, as far as it is looked at: instructions are static functions, which
# jump to each other, among others.
_TAIL_CALLING = """
unsigned char _PyRuntime[16384] = { %s };
const unsigned long Py_Version = 0x030e08f0;
#define HANDLER static __attribute__((noinline, noclone)) int
HANDLER _TAIL_CALL_LOAD(int x) { asm volatile("nop"); return x + 1; }
HANDLER other(int x) { asm volatile("nop"); return x + 2; }
HANDLER _TAIL_CALL_CALL(int x) { asm volatile("nop"); return x + 3; }
int _PyEval_EvalFrameDefault(int x) { return _TAIL_CALL_LOAD(x) ^ other(x) ^ _TAIL_CALL_CALL(x); }
"""


def test_a_thread_in_an_instruction_that_is_a_function_runs_python(tmp_path: Path) -> None:
    # GIVEN an interpreter whose instructions are functions, which may be called from anywhere
    source, path = tmp_path / "tail.c", tmp_path / "libpython3.14.so"
    source.write_text(_TAIL_CALLING % ",".join(map(str, debug_offsets((3, 14)))))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", path, source], check=True)
    asked = interpreter_in(str(path))
    with path.open("rb") as opened:
        answer = asked.read(TargetFile(opened.fileno()), *asked.arguments)
        found = asked.checked(json.loads(json.dumps(answer)))
    assert isinstance(found, Interpreter)
    listed = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
    at = {name: int(address, 16) for address, _, name in re.findall(r"(\w+) (.) (\w+)", listed)}
    # WHEN it is loaded
    loaded = found.loaded_at(0x10000)
    # THEN a thread in any of them runs Python, as one in the eval function does
    for name in ("_TAIL_CALL_LOAD", "_TAIL_CALL_CALL", _EVAL.decode()):
        address = at[name] + 0x10000
        assert any(code.begin <= address < code.end for code in loaded.all_ranges), name
    # and which functions they are, names tell: others lie between them
    assert not loaded.is_eval(at["_TAIL_CALL_LOAD"] + 0x10000)


def test_a_jump_is_seen_at_any_offset() -> None:
    code = (
        b"\x90\xe9" + struct.pack("<i", 0x1000) + b"\x0f\x84" + struct.pack("<i", -0x20) + b"\x90"
    )
    assert set(jump_targets(code, 0x400000)) >= {0x400006 + 0x1000, 0x40000C - 0x20}


@pytest.mark.parametrize("length", range(13))
def test_code_that_is_cut(length: int) -> None:
    assert len(jump_targets(b"\x0f\x84" * 6 + b"\xe9", 0)[:length]) <= length


RUNTIME = AddressRange(0x9000, 0xA000)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        # mov edi, [rip + x] loads the key itself; lea rdi, [rip + x] is the struct around it
        (b"\x90\x8b\x3d" + struct.pack("<i", 0x9010 - 0x1007), 0x9010),
        (b"\x48\x8d\x3d" + struct.pack("<i", 0x9010 - 0x1007), 0x9014),
        (b"\x8b\x3d" + struct.pack("<i", 0x100), None),
        (b"\x8b\x3d", None),
        (b"", None),
    ],
)
def test_thread_keys_offset(code: bytes, expected: int | None) -> None:
    assert key_operand(code, 0x1000, RUNTIME) == expected
