# SPDX-License-Identifier: Apache-2.0
"""Rows read off prologues: against the compiler's own CFI, and on code made to mislead."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind.build import build
from aiflame.agent.unwind.prologue_x86_64 import rows_of_function
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.x86_64 import RbpKind, Rule, RuleKind, rule_of

# Frames as compilers make them: leaf, saved registers, room, RBP as frame pointer, alloca.
_SOURCE = """
int sink(int); void fill(char *, int); void *memcpy(void *, const void *, unsigned long);
__attribute__((noinline)) int leaf(int a, int b) { return a * b + 7; }
__attribute__((noinline)) int saves(int a, int b, int c, int d) {
    int sum = 0;
    for (int i = 0; i < a; i++) sum += sink(b) * sink(c) + sink(d) * sum + i;
    return sum + b + c + d;
}
__attribute__((noinline)) int room(int a) { char buffer[600]; fill(buffer, a); return buffer[a]; }
__attribute__((noinline)) int both(int a, int b) {
    char buffer[90];
    fill(buffer, a); fill(buffer + 9, b);
    return buffer[a] + sink(b) + sink(a);
}
__attribute__((noinline)) int grows(int a) {
    char *buffer = __builtin_alloca(a + 16);
    fill(buffer, a);
    return buffer[3] + sink(a);
}
int sink(int a) { return a; }
void fill(char *buffer, int a) { for (int i = 0; i < a; i++) buffer[i] = i; }
int main(int argc, char **argv) {
    return leaf(argc, 2) + saves(argc, 1, 2, 3) + room(argc) + both(argc, 2) + grows(argc);
}
"""
_FUNCTIONS = ("leaf", "saves", "room", "both", "grows", "sink", "fill")


def _built(folder: Path, name: str, *options: str) -> Path:
    source, program = folder / "frames.c", folder / name
    source.write_text(_SOURCE)
    command = ["cc", "-no-pie", "-fno-inline", *options, "-o", str(program), str(source)]
    subprocess.run(command, check=True)
    return program


def _table(path: Path) -> UnwindTable:
    fd = os.open(path, os.O_RDONLY)
    try:
        return build(TargetFile(fd), ElfImage.from_fd(fd))
    finally:
        os.close(fd)


def _instructions(path: Path, function: str) -> list[int]:
    """Returns the addresses of a function's instructions."""
    command = ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={function}", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = (line.split(":")[0].strip() for line in text.splitlines() if ":\t" in line)
    return [int(line, 16) for line in lines]


_OF_PROLOGUES = {RuleKind.RSP: RuleKind.RSP_HEURISTIC, RuleKind.RBP: RuleKind.RBP_HEURISTIC}


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3", "-Os", "-O2 -fno-omit-frame-pointer"])
def test_prologues_agree_with_the_compilers_own_cfi(tmp_path: Path, level: str) -> None:
    # GIVEN one program with CFI, and the same code without
    options = [*level.split(), "-fno-optimize-sibling-calls", "-fcf-protection=full"]
    told = _built(tmp_path, "told", *options)
    untold = _built(tmp_path, "untold", *options, "-fno-asynchronous-unwind-tables")
    truth, heuristic = _table(told), _table(untold)
    agreed = 0
    for function in _FUNCTIONS:
        pairs = zip(_instructions(told, function), _instructions(untold, function), strict=True)
        for with_cfi, without_cfi in pairs:
            true, found = truth.lookup(with_cfi), heuristic.lookup(without_cfi)
            if found.kind == RuleKind.NO_CFI:
                continue  # not plain: no rule is no wrong rule
            # THEN the rule is right at each instruction
            expected = true._replace(kind=_OF_PROLOGUES[true.kind])
            if -true.rbp_offset > true.cfa_offset:
                # RBP has been popped: it is the same in the register and below the stack pointer.
                expected = expected._replace(rbp_kind=RbpKind.SAME, rbp_offset=0)
            assert found == expected, (function, hex(with_cfi))
            agreed += 1
    assert agreed > 60


def test_what_cfi_says_is_never_overruled(tmp_path: Path) -> None:
    told = _built(tmp_path, "told", "-O2")
    table = _table(told)
    kinds = {table.lookup(pc).kind for name in _FUNCTIONS for pc in _instructions(told, name)}
    assert kinds <= {RuleKind.RSP, RuleKind.RBP}


def _rules(code: bytes) -> list[tuple[int, Rule]]:
    return [(offset, rule_of(state)) for offset, state in rows_of_function(code)]


def _heuristic(cfa: int, rbp: int | None = None) -> Rule:
    saved = (RbpKind.SAME, 0) if rbp is None else (RbpKind.AT_CFA, rbp)
    return Rule(RuleKind.RSP_HEURISTIC, *saved, cfa)


def test_registers_stored_below_the_stack_pointer_of_the_caller() -> None:
    # endbr64; sub $0x80,%rsp; mov %rbx,(%rsp); mov %rbp,0x8(%rsp); vzeroupper; add; ret; nop
    code = bytes.fromhex("f30f1efa 4881ec80000000 48891c24 48896c2408 c5f877 4881c480000000 c3 90")
    assert _rules(code) == [
        (0, _heuristic(8)),
        (11, _heuristic(136)),
        (20, _heuristic(136, -128)),
        (30, _heuristic(8)),
        (31, _heuristic(136, -128)),
    ]


def test_rbp_that_holds_an_address_is_no_frame_pointer() -> None:
    # push %rbp; sub $0x18,%rsp; mov %fs:0x28,%rax; mov %rsp,%rbp; btr $0x3f,%rax; add; pop; ret
    code = bytes.fromhex("55 4883ec18 64488b042528000000 4889e5 480fbaf03f 4883c418 5d c3")
    assert _rules(code) == [
        (0, _heuristic(8)),
        (1, _heuristic(16, -16)),
        (5, _heuristic(40, -16)),
        (26, _heuristic(16, -16)),
        (27, _heuristic(8)),
    ]


# sub $0x60,%rsp; mov %rbx,(%rsp); mov %rbp,8(%rsp); mov %rsp,%rbx; sub $0x2080,%rsp; and $~4095,
# %rsp
_ALIGNED = "4883ec60 48891c24 48896c2408 4889e3 4881ec80200000 4881e400f0ffff"
# mov (%rsp),%rbx; mov 8(%rsp),%rbp; add $0x60,%rsp; ret
_RESTORED = "488b1c24 488b6c2408 4883c460 c3"


@pytest.mark.parametrize("back", ["4889dc", "488be3"])  # mov %rbx,%rsp in both encodings
def test_a_stack_that_is_aligned_is_known_by_what_rbx_keeps_of_it(back: str) -> None:
    # GIVEN such a function that uses RBP: mov $1,%ebp; and code after its return: nop
    code = bytes.fromhex(f"{_ALIGNED} bd01000000 {back} {_RESTORED} 90")
    kept = Rule(RuleKind.RBX, RbpKind.AT_CFA, -96, 104)
    assert _rules(code) == [
        (0, _heuristic(8)),
        (4, _heuristic(104)),
        (13, _heuristic(104, -96)),
        (23, kept),
        (38, _heuristic(104, -96)),  # back, and RBX may be the caller's from here on
        (51, _heuristic(8)),
        (52, kept),
    ]


# sub $0x40,%rsp; mov %rbp,8(%rsp); mov %rsp,%rbp; sub %rax,%rsp; and $~4095,%rsp; mov %rbp,N(%rsp)
_PARKED = "4883ec40 48896c2408 4889e5 4829c4 4881e400f0ffff 4889ac2498000000"


@pytest.mark.parametrize("back", ["488ba42498000000", "488b842498000000 4889c4"])  # or by RAX
def test_a_stack_that_is_aligned_is_known_by_what_is_kept_in_it(back: str) -> None:
    # GIVEN such a function, which then uses RBP: mov $1,%ebp; jmp
    code = bytes.fromhex(f"{_PARKED} bd01000000 eb00 {back} 488b6c2408 4883c440 c3")
    in_slot = Rule(RuleKind.RSP_SLOT, RbpKind.AT_CFA, -64, 0x98 << 16 | 72)
    end = len(code) - 10
    assert _rules(code) == [
        (0, _heuristic(8)),
        (4, _heuristic(72)),
        (9, _heuristic(72, -64)),
        (15, Rule(RuleKind.RBP_HEURISTIC, RbpKind.AT_CFA, -64, 72)),
        (30, in_slot),
        (end, _heuristic(72, -64)),
        (end + 9, _heuristic(8)),
    ]


@pytest.mark.parametrize(
    "code",
    [
        f"{_ALIGNED} {_RESTORED}",  # no way back by RBX
        f"{_ALIGNED} 4889dc 488b1c24 eb00",  # a way back that does not return
        f"{_ALIGNED} bb01000000 4889dc {_RESTORED}",  # RBX overwritten at once
        f"{_ALIGNED} 53 4889dc {_RESTORED}",  # pushes to where the stack may be anything
        # RBX not saved, or overwritten before the stack is aligned: mov %rsi,%rbx
        f"4883ec60 4889e3 4883e4c0 4889dc {_RESTORED}",
        f"4883ec60 48891c24 4889e3 4889f3 4883e4c0 4889dc {_RESTORED}",
        # The stack moved after it was kept in it, or no way back: sub $16,%rsp
        f"{_PARKED} 4883ec10 eb00 488ba42498000000 {_RESTORED}",
        f"{_PARKED} eb00 4883ec10 488ba42498000000 {_RESTORED}",
        f"{_PARKED} eb00 {_RESTORED}",
        # RBP overwritten before: mov $1,%ebp
        f"4883ec40 48896c2408 4889e5 4829c4 bd01000000 4889ac2498000000 eb00 4889ec {_RESTORED}",
    ],
)
def test_a_stack_that_is_not_sure_to_be_kept_gives_no_rows(code: str) -> None:
    assert rows_of_function(bytes.fromhex(code)) == []


def test_rbx_that_holds_the_stack_pointer_for_another_use_is_not_looked_at() -> None:
    # push %rbx; mov %rsp,%rbx; call; pop %rbx; ret
    code = bytes.fromhex("53 4889e3 e800000000 5b c3")
    assert _rules(code) == [(0, _heuristic(8)), (1, _heuristic(16)), (10, _heuristic(8))]


def test_ways_back_by_the_thousand_take_no_long() -> None:
    # GIVEN a megabyte of ways back, each with a long way to a return that is none of the frame's
    way = bytes.fromhex("4889dc") + 44 * b"\x90" + b"\xc3"
    code = bytes.fromhex(_ALIGNED) + ((1 << 20) // len(way)) * way
    begun = time.process_time()
    assert rows_of_function(code) == []
    assert time.process_time() - begun < 2  # 3 s if all were followed


def test_code_that_runs_past_its_end_is_no_way_to_a_return() -> None:
    # push %rbx; call; pop %rbx; mov $0xc3,%eax and no return
    code = bytes.fromhex("53 e800000000 5b b8c3000000")
    assert _rules(code) == [(0, _heuristic(8)), (1, _heuristic(16))]


@pytest.mark.parametrize(
    "code",
    [
        "488d642480 c3",  # lea -0x80(%rsp),%rsp
        "4889c4 c3",  # mov %rax,%rsp
        "488b6008 c3",  # mov 0x8(%rax),%rsp
        "bd00000000 4889c5 50 c3",  # RBP used before it is saved
        "488b2f 50 c3",  # RBP loaded from memory before it is saved
        "55 4889e5 4889fd c3",  # the frame pointer overwritten
        "4887e0 c3",  # xchg %rsp,%rax
        "6683ec08 c3",  # sub $8,%sp
        "7500 4881ec00010000 c3",  # room after a jump
        "7500 55 4889e5 51 c9 c3",  # a frame pointer after a jump, in either encoding
        "7500 55 488bec 51 c9 c3",
        "4883e4c0 c3",  # aligned without a frame pointer
        "4883ec08 50 58 c3",  # pushes below the room
    ],
)
def test_frames_that_are_not_plain_give_no_rows(code: str) -> None:
    assert rows_of_function(bytes.fromhex(code)) == []


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_give_rows_inside_the_function(seed: int) -> None:
    chooser = random.Random(seed)
    likely = [0x50, 0x55, 0x41, 0x48, 0x83, 0x81, 0xEC, 0x89, 0xE5, 0xC5, 0xC4, 0x62, 0x0F, 0xC3]
    for _ in range(500):
        length = chooser.randrange(1, 40)
        code = bytes(chooser.choice([*likely, chooser.randrange(256)]) for _ in range(length))
        offsets = [row.offset for row in rows_of_function(code)]
        assert all(0 <= offset < len(code) for offset in offsets)
