# SPDX-License-Identifier: Apache-2.0
"""Rows of code without CFI and without symbols, against what the compiler says of the same code."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.build import build
from aiflame.agent.unwind.flow_x86_64 import Range, follow
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.x86_64 import NO_CFI_STATE, RbpKind, Rule, RuleKind, rule_of

# One function is named. The others are called, jumped to, or have their address taken; frames are
# made after a jump, arguments are pushed, a call does not return, a switch has a table.
_SOURCE = """
#define HIDDEN static __attribute__((noinline))
extern int out(const char *, ...); extern void die(void) __attribute__((noreturn));
HIDDEN int leaf(int a, int b) { return out("leaf") * a + b; }
HIDDEN int late(int *a, int n) {
    if (n < 3) return n;
    int sum = 0;
    for (int i = 0; i < n; i++) sum += leaf(a[i], sum) * leaf(sum, i) + leaf(n, n);
    return sum + n;
}
HIDDEN int many(int a, int b) {
    int x = out("%d%d%d%d%d%d%d", a, b, a + b, a - b, a * b, b - a, a ^ b);
    return x + leaf(a, x);
}
HIDDEN int refuses(int a) { if (a > 7) { out("no"); die(); } return a; }
HIDDEN int pointed(int a) { char text[300]; out(text, a); return many(text[0], a) + a; }
HIDDEN int chooses(int kind, int a) {
    switch (kind) {
    case 0: return leaf(a, 1) + 1; case 1: return many(a, 2) + 2; case 2: return out("c") + 3;
    case 3: out("d"); return leaf(2, a) + a; case 4: return many(a, 5) + 5; case 5: return a;
    case 6: return refuses(a) + 8; default: return out("e") + leaf(a, 9);
    }
}
HIDDEN int grows(int a) {
    char *text = __builtin_alloca(a + 16);
    out(text, a);
    return leaf(text[3], a);
}
int (*hook)(int);
int run(int *a, int n) {
    hook = pointed;
    int sum = late(a, n) + many(n, 2) + refuses(n) + grows(n);
    return chooses(n, sum) + sum + leaf(sum, n);
}
"""
# Passes the address of one of these functions on, as what starts a program does with main's.
_PROGRAM = """
int run(int *, int); int out(const char *text, ...) { return *text; }
void die(void) { for (;;) __asm__ volatile("pause"); }
int (*volatile hooked)(int *, int);
void _start(void) { int a[4] = {1, 2, 3, 4}; hooked = run; hooked(a, 4); die(); }
"""
_OF_FLOW = {RuleKind.RSP: RuleKind.RSP_HEURISTIC, RuleKind.RBP: RuleKind.RBP_HEURISTIC}


def _built(folder: Path, name: str, *options: str) -> Path:
    source, library = folder / "flow.c", folder / name
    source.write_text(_SOURCE)
    command = ["cc", "-shared", "-fPIC", "-nostdlib", *options, "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def _table(path: Path) -> UnwindTable:
    fd = os.open(path, os.O_RDONLY)
    try:
        return build(TargetFile(fd), ElfImage.from_fd(fd))
    finally:
        os.close(fd)


def _instructions(path: Path) -> list[int]:
    """Returns the addresses of all instructions in .text but those that fill it up."""
    command = ["objdump", "-d", "-j", ".text", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split(":\t") for line in text.splitlines() if ":\t" in line]
    return [int(at.strip(), 16) for at, what in lines if "nop" not in what and "xchg" not in what]


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3", "-Os", "-O2 -fno-omit-frame-pointer"])
@pytest.mark.parametrize("more", [(), ("-fcf-protection=none",)], ids=["ibt", "plain"])
def test_flow_agrees_with_the_compilers_own_cfi(
    tmp_path: Path, level: str, more: tuple[str, ...]
) -> None:
    # GIVEN a library with CFI, and the same code without it, and without symbols but for one
    options = [*level.split(), "-Wl,--build-id=none", *more]
    told = _built(tmp_path, "told.so", *options)
    untold = _built(tmp_path, "untold.so", *options, "-fno-asynchronous-unwind-tables", "-s")
    # THEN what is known is right, and nearly all is known
    wrong, unknown = _compared(told, untold)
    assert not wrong
    assert unknown <= 0.02


def _compared(told: Path, untold: Path) -> tuple[list[tuple[str, Rule, Rule]], float]:
    """Returns which rules are wrong, and the share of instructions without one."""
    truth, found = _table(told), _table(untold)
    addresses = _instructions(told)
    shift = _instructions(untold)[0] - addresses[0]
    wrong, unknown = [], 0
    for address in addresses:
        true, rule = truth.lookup(address), found.lookup(address + shift)
        if rule.kind == RuleKind.NO_CFI:
            unknown += 1
            continue
        expected = true._replace(kind=_OF_FLOW[true.kind])
        if rule == true:  # by CFI
            continue
        if -true.rbp_offset > true.cfa_offset:
            # RBP has been popped: it is the same in the register and below the stack pointer.
            expected = expected._replace(rbp_kind=RbpKind.SAME, rbp_offset=0)
        if rule != expected:
            wrong.append((hex(address), rule, expected))
    return wrong, unknown / len(addresses)


@pytest.mark.parametrize("form", ["-no-pie -static", "-static-pie"])
def test_a_stripped_static_program_is_followed_from_where_it_begins(
    tmp_path: Path, form: str
) -> None:
    # GIVEN a program that has CFI of its own code only, not of what is linked to it, and no symbols
    (tmp_path / "flow.c").write_text(_SOURCE)
    (tmp_path / "own.c").write_text(_PROGRAM)
    kind = "-fno-pie" if "-no-pie" in form else "-fPIE"
    for name, options in (("told", ""), ("untold", "-fno-asynchronous-unwind-tables")):
        for file, more in (("flow", options), ("own", "")):
            build = ["cc", "-O2", kind, *more.split(), "-c", f"{file}.c", "-o", f"{file}.o"]
            subprocess.run(build, cwd=tmp_path, check=True)
        link = ["cc", *form.split(), "-nostdlib", "-Wl,--build-id=none", "own.o", "flow.o"]
        strip = ["-s"] if options else []
        subprocess.run([*link, *strip, "-o", name], cwd=tmp_path, check=True)
    # THEN what is known is right, and nearly all is known
    wrong, unknown = _compared(tmp_path / "told", tmp_path / "untold")
    assert not wrong
    assert unknown <= 0.02


@pytest.mark.parametrize("seed", range(30))
def test_any_bytes_are_followed_to_an_end(seed: int) -> None:
    chance = random.Random(seed)
    pieces = ["e800000000", "eb05", "7403", "ffe0", "c3", "55", "5d", "4883ec08", "4883c408", "c9"]
    code = b"".join(
        chance.randbytes(chance.randrange(6))
        if chance.random() < 0.3
        else bytes.fromhex(chance.choice(pieces))
        for _ in range(3_000)
    )
    ranges = [Range(4096, code[:5_000]), Range(1 << 20, code[5_000:])]
    rows, lost = follow(ranges, [4096, 4100, 1 << 20, 1 << 40])
    addresses = [address for address, _ in rows]
    assert addresses == sorted(addresses)
    assert all(
        any(one.begin <= at <= one.begin + len(one.code) for one in ranges) for at in addresses
    )
    assert all(rule_of(state).cfa_offset >= 8 for _, state in rows if state != NO_CFI_STATE)
    assert lost == sorted(lost)


def test_switches_without_end_take_no_long() -> None:
    # Jumps to anywhere, after each of which code is looked for up to the end.
    code = bytes.fromhex("ffe0c3") * 100_000
    # There is too much of it, and it is given up.
    assert follow([Range(0, code)], [0]).rows == []


def test_functions_at_each_byte_take_no_long() -> None:
    assert follow([Range(0, bytes(400_000))], range(300_000)).rows == []
