# SPDX-License-Identifier: Apache-2.0
"""Functions that run first on a stack of their own, and so have no caller there.

A greenlet begins in the middle of whoever starts it: greenlet's switching keeps the part of the C
stack that is the greenlet's, from `inner_bootstrap` on, and puts it back when the greenlet goes on.
What lies above it then is of any other greenlet (greenlet 2.0 to 3.5, TUserGreenlet.cpp,
g_initialstub; TStackState.cpp).
"""

from __future__ import annotations

import numpy as np
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.elf.symbols import find_symbols_beginning
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.records import U64

# greenlet::UserGreenlet::inner_bootstrap, whose arguments differ from version to version.
_GREENLET = b"_ZN8greenlet12UserGreenlet15inner_bootstrapE"


def with_stack_starts(file: TargetFile, image: ElfImage, addresses: U64, states: U64) -> U64:
    """Returns the states of a table, with no caller for functions at the start of a stack.

    Args:
        file: The file.
        image: Its headers.
        addresses: Where each state begins, ascending, shape (n,).
        states: See `x86_64`, shape (n,).

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    try:
        found = find_symbols_beginning(file, image, _GREENLET)
    except BadElf:
        return states  # unwinding does without symbols
    states = states.copy()
    for symbol in found:
        ends = (symbol.address, min(symbol.address + symbol.size, arch.ALL_BITS))
        begin, end = np.searchsorted(addresses, np.array(ends, np.uint64)).tolist()
        states[begin:end] = np.uint64(arch.ROOT_STATE)
    return states
