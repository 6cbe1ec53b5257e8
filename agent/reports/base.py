# SPDX-License-Identifier: Apache-2.0
"""What every report is given, and what it has to be.

A report is a pure function of a profile and its options: no clock, no host name, no file system.
The same capture gives the same bytes, so two flame graphs can be compared and golden tests hold.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile, SampleClass


class View(enum.Enum):
    """What is counted: which of a thread's nanoseconds, or what devices did."""

    WALL = "wall"  # all of them: on-CPU and off-CPU together are wall time, per thread
    CPU = "cpu"
    OFFCPU = "offcpu"
    GPU = "gpu"  # no time: samples of devices, by the stacks that launched what was sampled
    GPU_TIME = "gputime"  # how long devices ran kernels, by the stacks that launched them

    @property
    def label(self) -> str:
        """The words used in titles."""
        return _LABELS[self.value]

    @property
    def is_of_devices(self) -> bool:
        """Whether it is of devices, not of threads."""
        return self in (View.GPU, View.GPU_TIME)

    def selects(self, klass: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return a mask, of the shape of `klass` (values of SampleClass), of what is counted."""
        if self.is_of_devices:
            return np.zeros(len(klass), dtype=np.bool_)
        if self is View.WALL:
            return np.ones(len(klass), dtype=np.bool_)
        on_cpu: npt.NDArray[np.bool_] = klass == SampleClass.ON_CPU
        return on_cpu if self is View.CPU else ~on_cpu


_LABELS = {
    "wall": "wall time",
    "cpu": "CPU time",
    "offcpu": "off-CPU time",
    "gpu": "device samples",
    "gputime": "GPU time",
}

# The views of threads' nanoseconds; what they count can be added up.
TIME_VIEWS = (View.WALL, View.CPU, View.OFFCPU)


class Leaf(enum.Enum):
    """How far the frames of a device sample go below its kernel and source line."""

    OFFSET = "offset"  # instruction, stall reason, offset
    INSTRUCTION = "instruction"  # instruction, stall reason
    STALL = "stall"  # stall reason


class ColorBy(enum.Enum):
    """What colours say."""

    FRAME = "frame"  # what a frame is
    STALL = "stall"  # of device frames, what their samples waited for


class Frames(enum.Enum):
    """Which frames of a stack are shown; it matters where there are Python's."""

    BOTH = "both"  # Python, native and kernel, without the interpreter's own in between
    PYTHON = "python"  # only Python
    NATIVE = "native"  # all machine code, the interpreter's own too
    ALL = "all"


class Merge(enum.Enum):
    """Which processes are one."""

    NONE = "none"  # none: each is by itself, before and after an exec as well
    PROCESS = "process"  # those of one pid: before and after an exec
    COMM = "comm"  # those of one name
    CGROUP = "cgroup"
    CONTAINER = "container"


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """How a profile is to be shown.

    Attributes:
        view: What is counted.
        per_thread: Put a frame `thread name (tid)` under the one of the process.
        inverted: Merge from the leaf instead of from the root, where the format draws a tree.
        min_width_pct: Leave out what is narrower than this share of the whole, in percent;
            None takes the format's own default, which for the data formats is 0.
        title: Replaces the title made from the recording.
        plain: Leave off the suffixes that tell the kinds of frames apart in folded text.
        frames: Which frames of a stack are shown.
        hide_importlib: Leave out the Python frames that import modules or start the program.
        leaf: How far device samples are told apart.
        color_by: What colours say; None: of device samples the stall, else the frame.
        is_idle_shown: Flame graphs of wall time have threads that slept at one location throughout.
        merge: Which processes are one; None: by name where all processes were recorded, else none.
    """

    view: View = View.WALL
    per_thread: bool = False
    inverted: bool = False
    min_width_pct: float | None = None
    title: str | None = None
    plain: bool = False
    frames: Frames = Frames.BOTH
    hide_importlib: bool = False
    leaf: Leaf = Leaf.OFFSET
    color_by: ColorBy | None = None
    merge: Merge | None = None
    is_idle_shown: bool = False

    @property
    def shows_stalls(self) -> bool:
        """Whether colours are of stalls."""
        return self.view is View.GPU and self.color_by is not ColorBy.FRAME


class Report(Protocol):
    """One output format. Adding one is one new module and one line in `reports.FORMATS`."""

    name: str  # as typed after -f
    extension: str  # of the file, with its dot
    is_binary: bool  # not for a terminal

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the whole file."""
        ...
