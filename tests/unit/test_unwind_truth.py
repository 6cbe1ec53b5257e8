# SPDX-License-Identifier: Apache-2.0
"""Unwind tables of real binaries against readelf, and walks of real stacks against backtrace()."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from aiflame.agent.elf.image import BadElf
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.walk import Mapping, ReplayWalker, WalkEnd
from aiflame.agent.unwind.x86_64 import RbpKind, Rule, RuleKind
from cfibytes import table_of_file

# Frames of every kind that compilers make without frame pointers. The innermost prints, in
# binary: RSP, RBP, its own address, the words of the stack, and what backtrace() says.
SOURCE = r"""
#include <alloca.h>
#include <execinfo.h>
#include <signal.h>
#include <stdexcept>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
extern "C" void *__libc_stack_end;
typedef float wide __attribute__((vector_size(32)));
static void keep(void *p) { asm volatile("" : : "r"(p) : "memory"); }
__attribute__((noinline)) void dump(void)
{
    void *trace[200];
    uint64_t head[5];
    head[4] = backtrace(trace, 200);
    asm volatile("mov %%rsp, %0; mov %%rbp, %1; lea 0(%%rip), %2"
             : "=r"(head[0]), "=r"(head[1]), "=r"(head[2]));
    head[3] = ((uint64_t)__libc_stack_end - head[0]) / 8;
    fwrite(head, 8, 5, stdout);
    fwrite((void *)head[0], 8, head[3], stdout);
    fwrite(trace, 8, head[4], stdout);
    for (int c, i = 0; i < 1; i++) {
        FILE *maps = fopen("/proc/self/maps", "r");
        while ((c = getc(maps)) != EOF)
            putchar(c);
    }
    fflush(stdout);
    _Exit(0);
}
__attribute__((noinline)) void trap(int depth)
{
    if (depth)
        asm volatile("ud2");
    keep(&depth);
}
__attribute__((noinline)) int realigned(int n)
{
    wide block[4] = {};
    char *more = (char *)alloca(n * 16);
    memset(more, n, n * 16);
    keep(block);
    keep(more);
    trap(n);
    return more[n] + (int)block[1][2];
}
__attribute__((noinline)) int variable(int n)
{
    int numbers[n];
    memset(numbers, n, sizeof numbers);
    keep(numbers);
    return (n > 4 ? variable(n - 1) : realigned(n)) + numbers[n / 2];
}
__attribute__((noinline)) int throws(int n)
{
    if (n == 3)
        throw std::runtime_error("at " + std::to_string(n));
    return n + 1;
}
__attribute__((noinline)) int compare(const void *a, const void *b)
{
    static int calls;
    if (calls++ == 2)
        variable(12);
    return *(const int *)a - *(const int *)b;
}
__attribute__((noinline)) void cold(int n)
{
    try {
        for (int i = 0; i < n; i++)
            n += throws(i);
    } catch (const std::exception &error) {
        int numbers[] = {5, 3, 1, 4};
        qsort(numbers, 4, sizeof(int), compare);
        keep(numbers);
    }
}
int main(int argc, char **argv)
{
    signal(SIGILL, (void (*)(int))dump);
    cold(argc + 5);
    keep(argv);
    return 0;
}
"""

BUILDS = {
    "optimised": ["-O3", "-fomit-frame-pointer"],
    "not position-independent": ["-O2", "-fno-pie", "-no-pie"],
    "static": ["-O2", "-static"],
    "CET": ["-O2", "-fcf-protection=full", "-Wl,-z,ibtplt,-z,lazy"],
    "frame pointers": ["-O0", "-fno-omit-frame-pointer"],
}


@pytest.fixture(scope="module", params=BUILDS.values(), ids=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("truth")
    (directory / "a.cc").write_text(SOURCE)
    output = directory / "a"
    command = ["g++", "-w", *request.param, "-o", output, directory / "a.cc"]
    subprocess.run(command, check=True)
    return output


def library(name: str) -> Path:
    for directory in ("/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib"):
        if (Path(directory) / name).is_file():
            return Path(directory) / name
    pytest.skip(f"no {name}")


def disagreements(path: Path, table: UnwindTable) -> tuple[list[object], Counter[str]]:
    """Compare every row of readelf, at its first and its last byte."""
    command = ["readelf", "--debug-dump=frames-interp", path]
    # It exits with 1 where the separate debug file that the binary names is not installed.
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    seen: Counter[str] = Counter()
    wrong: list[object] = []
    pattern = r"FDE .*?pc=([0-9a-f]+)\.\.([0-9a-f]+)\n((?:.+\n)*)"
    for begin, end, block in re.findall(pattern, listing):
        # "r10 (r10)" is one column.
        lines = [re.sub(r" \(r\w+\)", "", line).split() for line in block.splitlines()]
        if not lines:
            continue
        starts = [int(line[0], 16) for line in lines[1:]]
        for start, following, line in zip(
            starts, [*starts[1:], int(end, 16)], lines[1:], strict=True
        ):
            expected = dict(zip(lines[0][1:], line[1:], strict=True))
            for address in {start, following - 1} if start < following else set():
                rule = table.lookup(address)
                seen[rule.kind.name] += 1
                if not agrees(rule, expected):
                    wrong.append((hex(address), begin, expected, rule))
    return wrong, seen


def agrees(rule: Rule, expected: dict[str, str]) -> bool:
    if expected["ra"] == "u":
        return rule.kind == RuleKind.UNDEFINED_RA
    if expected["ra"] != "c-8":
        return rule.kind in (RuleKind.UNSUPPORTED, RuleKind.SIGNAL)
    if expected["CFA"] == "exp":
        return rule.kind in (RuleKind.PLT, RuleKind.RBP_DEREF, RuleKind.UNSUPPORTED)
    register, offset = re.fullmatch(r"(\w+)([+-]\d+)", expected["CFA"]).groups()  # type: ignore[union-attr]
    kinds = {"rsp": RuleKind.RSP, "rbp": RuleKind.RBP, "rbx": RuleKind.RBX}
    kind = kinds.get(register, RuleKind.UNSUPPORTED)
    if rule.kind != kind or kind == RuleKind.UNSUPPORTED:
        return rule.kind == kind
    rbp = expected.get("rbp", "u")
    if rbp.startswith("c"):
        saved = (rule.rbp_kind, rule.rbp_offset) == (RbpKind.AT_CFA, int(rbp[1:]))
    else:
        # At the `ret` of a function that realigned its stack RBP has been popped.
        is_saved = rbp == "exp" and (register, int(offset)) != ("rsp", 8)
        saved = rule.rbp_kind == (RbpKind.AT_RBP if is_saved else RbpKind.SAME)
    return saved and rule.cfa_offset == int(offset)


def test_programs_agree_with_readelf(program: Path) -> None:
    wrong, seen = disagreements(program, table_of_file(program))
    assert wrong == []
    assert seen["RSP"] > 50 and seen["RBP"] > 5 and seen["RBP_DEREF"] + seen["RBP"] > 5


@pytest.mark.parametrize("name", ["libc.so.6", "ld-linux-x86-64.so.2", "libstdc++.so.6"])
def test_libraries_agree_with_readelf(name: str) -> None:
    path = library(name)
    wrong, seen = disagreements(path, table_of_file(path))
    assert wrong == []
    # What rules cannot express is assembly.
    assert seen["UNSUPPORTED"] < 30 and seen["RSP"] > 1000


def mappings_of(maps: str) -> list[Mapping]:
    """The executable mappings of a process that has exited, with their tables."""
    found = []
    for line in maps.splitlines():
        area, permissions, offset, _, _, *path = line.split()
        start, end = (int(edge, 16) for edge in area.split("-"))
        if "x" not in permissions:
            continue
        table, bias = None, 0
        if path and path[0].startswith("/"):
            table = table_of_file(Path(path[0]))
            bias = start - virtual_address(Path(path[0]), int(offset, 16))
        found.append(Mapping(start, end, bias, table))
    return found


def virtual_address(path: Path, offset: int) -> int:
    headers = subprocess.run(["readelf", "-lW", path], capture_output=True, text=True, check=True)
    for line in headers.stdout.splitlines():
        words = line.split()
        if words[:1] == ["LOAD"] and "E" in words[6:-1] and int(words[1], 16) & -4096 == offset:
            return int(words[2], 16) & -4096
    raise AssertionError(f"no segment at {offset:#x} in {path}")


def test_walk_agrees_with_backtrace(program: Path) -> None:
    """Through a signal handler, a realigned stack, variable arrays, qsort and a catch block."""
    data = subprocess.run([program], capture_output=True, check=True).stdout
    rsp, rbp, rip, words, depth = struct.unpack_from("<5Q", data)
    stack = struct.unpack_from(f"<{words}Q", data, 40)
    trace = list(struct.unpack_from(f"<{depth}Q", data, 40 + 8 * words))
    maps = data[40 + 8 * (words + depth) :].decode()
    memory = {rsp + 8 * index: word for index, word in enumerate(stack)}
    walked = ReplayWalker(mappings_of(maps), memory.get).walk(rip, rsp, rbp)
    assert walked.end == WalkEnd.ROOTED
    assert [frame.address for frame in walked.frames[1:]] == trace[1:]
    assert len(trace) > 15


def test_vdso(tmp_path: Path) -> None:
    # GIVEN the image that the kernel maps into every process
    areas = Path("/proc/self/maps").read_text().splitlines()
    (area,) = (line.split()[0] for line in areas if line.endswith("[vdso]"))
    start, end = (int(edge, 16) for edge in area.split("-"))
    image = tmp_path / "vdso"
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    image.write_bytes(os.pread(fd, end - start, start))
    os.close(fd)
    wrong, seen = disagreements(image, table_of_file(image))
    assert wrong == [] and seen["RSP"] > 5


def test_debug_frame_of_a_program_without_eh_frame(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text("int f(int *x) { int a[9]; a[*x] = 2; return a[x[1]]; } int main() { }")
    program = tmp_path / "a"
    flags = ["-O1", "-g", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]
    subprocess.run(["gcc", "-w", *flags, "-o", program, source], check=True)
    listing = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout
    address = next(int(line.split()[0], 16) for line in listing.splitlines() if "T main" in line)
    assert table_of_file(program).lookup(address) == Rule(RuleKind.RSP, RbpKind.SAME, 0, 8)


def test_text_is_no_binary(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    with pytest.raises(BadElf):
        table_of_file(tmp_path / "a")
