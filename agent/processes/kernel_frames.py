# SPDX-License-Identifier: Apache-2.0
"""Kernel frames of threads that sleep, as /proc shows them: names and offsets, no addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from aiflame.agent import kernelfs

# `[<0>] hrtimer_nanosleep+0x74/0xf0 [module]` (fs/proc/base.c, proc_pid_stack, v6.1).
_STACK_LINE = re.compile(
    r"^\[<[0-9a-f]+>\] ([^\s+]+)\+0x([0-9a-f]+)/0x[0-9a-f]+(?: \[([^\s\]]+)\])?"
)
# Names tell no module where a thread's wait channel is all that the kernel shows.
_ANY_MODULE = "*"

# `ffffffff81000000 T name`, of modules with a tab and `[module]` (s_show of kernel/kallsyms.c,
# v6.1): always 16 digits, as this is for 64 bits.
_KALLSYMS = "/proc/kallsyms"
_TYPE_AT, _NAME_AT = 16, 19
_FUNCTIONS = frozenset((b" t ", b" T ", b" w ", b" W "))


class KernelFrame(NamedTuple):
    """A location in the kernel, as /proc shows it.

    Attributes:
        name: Of the function.
        offset: Of the return address in it, in bytes; 0 where unknown.
        module: That has the function, "" for the kernel itself.
    """

    name: str
    offset: int
    module: str

    @property
    def path(self) -> str:
        """What stands for its binary: the module in brackets, or "[kernel]"."""
        return f"[{'kernel' if self.module in ('', _ANY_MODULE) else self.module}]"


def kernel_frames(pid: int, tid: int) -> tuple[KernelFrame, ...]:
    """Returns the kernel frames of a sleeping thread, leaf first."""
    found = []
    for line in kernelfs.read_text(f"/proc/{pid}/task/{tid}/stack").splitlines():
        match = _STACK_LINE.match(line)
        if match is not None:
            found.append(KernelFrame(match[1], int(match[2], 16), match[3] or ""))
    if found:
        return tuple(found)
    wait_channel = kernelfs.read_text(f"/proc/{pid}/task/{tid}/wchan").strip()
    is_known = wait_channel not in ("", "0")
    return (KernelFrame(wait_channel, 0, _ANY_MODULE),) if is_known else ()


def kernel_addresses(
    functions: set[tuple[str, str]], path: str | Path = _KALLSYMS
) -> dict[tuple[str, str], int]:
    """Returns the addresses of kernel functions by name and module.

    Several functions of one module may have one name: the first counts. Those that the kernel
    hides from this process have none.
    """
    names = {name.encode() for name, _ in functions}
    found: dict[tuple[str, str], int] = {}
    # Next to none of a hundred thousand lines is more than looked at.
    for line in kernelfs.lines(path):
        name, _, module = line[_NAME_AT:-1].partition(b"\t")
        if name not in names or line[_TYPE_AT:_NAME_AT] not in _FUNCTIONS:
            continue
        address = int(line[:_TYPE_AT], 16)
        if address:
            words = name.decode()
            found.setdefault((words, module.decode(errors="replace").strip("[]")), address)
            found.setdefault((words, _ANY_MODULE), address)
    return found
