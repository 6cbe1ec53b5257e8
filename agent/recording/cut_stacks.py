# SPDX-License-Identifier: Apache-2.0
"""Which stacks may be whole if they were walked again: those that came before their tables did."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes.table import ProcessImage

# How walks end without tables or mappings (bpf/capture.h). A chain of frame pointers that ends in a
# zero may be whole, which only names tell.
_ENDS = (
    StopReason.NO_TABLE,
    StopReason.NO_FRAME_POINTER,
    StopReason.UNREADABLE,
    StopReason.ROOTED,
)

# All that a host's first second brings; 3 MB.
_MOST_STACKS = 1 << 14


class TellsStarts(Protocol):
    """Whoever knows the interpreters; PythonProcesses is one."""

    def is_starting(self, image: ProcessImage) -> bool:
        """Whether the kernel half may not have known a process's interpreter a moment ago."""


@dataclass(slots=True)
class CutStack:
    """A stack that was cut.

    Attributes:
        image: Whose it is.
        end: How it ends.
        call, call_return: Of the call that it is inside of, as STACK_RECORD_DTYPE has them.
    """

    image: ProcessImage
    end: StopReason
    call: int
    call_return: int


class CutStacks:
    """Stacks that are cut, and may be whole in a walk of now.

    Args:
        pythons: Knows interpreters.
    """

    def __init__(self, pythons: TellsStarts) -> None:
        self._pythons = pythons
        self.by_id: OrderedDict[int, CutStack] = OrderedDict()  # the oldest first

    def see(self, stack: int, image: ProcessImage, record: np.void) -> None:
        """Takes note of a stack, by its STACK_RECORD_DTYPE, if it is one."""
        lacks_python = not record["python"] and self._pythons.is_starting(image)
        end = StopReason(int(record["end"]))
        if end not in _ENDS and not lacks_python:
            return
        call = int(record["call"]), int(record["call_return"])
        self.by_id[stack] = CutStack(image, end, *call)
        if len(self.by_id) > _MOST_STACKS:
            self.by_id.popitem(last=False)

    def forget(self, stack: int) -> None:
        """Takes out a stack that another walk cut as well."""
        self.by_id.pop(stack, None)

    def are_cut(self, stacks: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Tells which of some stacks are."""
        # One by one: those that are asked about are few, and those that are known 16,384.
        known = self.by_id
        return np.array([stack in known for stack in stacks.tolist()], np.bool_)
