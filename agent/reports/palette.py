# SPDX-License-Identifier: Apache-2.0
"""Colours: hue tells what a frame is, a shade within the hue tells neighbours apart.

The hues are those readers of flame graphs know: kernel orange, C++ yellow, C and other native code
red, Python pink. Code that a compiler made at run time is yellow-green. Time off the CPU is blue,
whatever waits there. The shade comes from the name alone, so two flame graphs of the same program
can be compared, and golden tests hold.

Every fill is light enough for `INK` to be read on it: at least 4.5:1 (WCAG 2.1, 1.4.3), which a
test computes for the whole table.
"""

from __future__ import annotations

import colorsys
import enum
import zlib

from aiflame.agent.model.profile import FrameKind, Function, SampleClass, is_generated

# Text on every frame, in light and in dark mode: the fills are the same in both.
INK = "#14171a"

# A frame that the search found, in any view.
HIT = "#ee6cee"

# Enough to tell neighbours apart, few enough that a hue is still seen as one.
SHADES = 8


class Category(enum.IntEnum):
    """What the legend lists. Values are indexes into `CATEGORIES` and into the page's data."""

    NATIVE = 0
    CPP = 1
    PYTHON = 2
    KERNEL = 3
    MARKER = 4
    BLOCKED = 5
    WAITING_TO_RUN = 6
    PREEMPTED = 7
    DEVICE_CODE = 8  # kernel and source line
    DEVICE_LOCATION = 9  # instruction, stall reason, offset
    BOUNDARY = 10  # between the launching stack and the kernel
    GENERATED = 11  # code that Java, Node and the like made at run time


# Words of the legend, in the order of `Category`.
CATEGORIES = (
    "C and other native",
    "C++",
    "Python",
    "kernel",
    "process, thread, mark",
    "blocked",
    "waiting to run",
    "preempted",
    "GPU kernel and source",
    "GPU instruction and stall",
    "CPU/GPU boundary",
    "generated code",
)

# Frames that stand for something on a device.
DEVICE_CATEGORIES = (Category.DEVICE_CODE, Category.DEVICE_LOCATION)

# Off-CPU classes, by the category of the marker that stands for them.
CLASS_CATEGORY = {
    SampleClass.BLOCKED: Category.BLOCKED,
    SampleClass.WAITING_TO_RUN: Category.WAITING_TO_RUN,
    SampleClass.PREEMPTED: Category.PREEMPTED,
}

# (hue in degrees, saturation, lightness of the darkest and of the lightest shade). Python's range
# is red 245-255 with green and blue 138-178, as in published AI flame graphs.
_ON_CPU = {
    Category.NATIVE: (6, 0.86, 0.62, 0.72),
    Category.CPP: (49, 0.88, 0.52, 0.64),
    Category.PYTHON: (0, 0.90, 0.76, 0.835),
    Category.GENERATED: (84, 0.50, 0.55, 0.66),
    Category.KERNEL: (28, 0.93, 0.55, 0.65),
    Category.MARKER: (210, 0.04, 0.72, 0.78),
    # The aqua, the green and the light grey of published AI flame graphs.
    Category.DEVICE_CODE: (180, 0.52, 0.56, 0.66),
    Category.DEVICE_LOCATION: (120, 0.55, 0.60, 0.71),
    Category.BOUNDARY: (0, 0, 200 / 255, 200 / 255),
}

# Blue for all; a turn of the hue keeps the kinds of frames apart within it.
_OFF_CPU = {
    Category.NATIVE: (212, 0.72, 0.68, 0.76),
    Category.CPP: (204, 0.66, 0.66, 0.74),
    Category.PYTHON: (228, 0.72, 0.77, 0.83),
    Category.GENERATED: (186, 0.36, 0.64, 0.72),
    Category.KERNEL: (197, 0.60, 0.62, 0.70),
    Category.MARKER: (215, 0.30, 0.76, 0.80),
    # The markers of the three classes: asleep is the plain blue, the two that want to run are
    # turned towards violet and towards green.
    Category.BLOCKED: (216, 0.82, 0.66, 0.72),
    Category.WAITING_TO_RUN: (272, 0.72, 0.77, 0.82),
    Category.PREEMPTED: (152, 0.42, 0.58, 0.64),
}


def category_of(function: Function) -> Category:
    """Return the category of a function."""
    if is_generated(function):
        return Category.GENERATED
    if function.kind in (FrameKind.NATIVE, FrameKind.INTERPRETER):
        return Category.CPP if "::" in function.name else Category.NATIVE
    return {
        FrameKind.KERNEL: Category.KERNEL,
        FrameKind.PYTHON: Category.PYTHON,
    }.get(function.kind, Category.MARKER)


def shade_of(name: str) -> int:
    """Return the shade, 0 to SHADES - 1, that `name` has in every flame graph."""
    return zlib.crc32(name.encode("utf-8", "replace")) % SHADES


def _mix(spec: tuple[int, float, float, float], shade: int) -> str:
    hue, saturation, darkest, lightest = spec
    lightness = darkest + (lightest - darkest) * shade / (SHADES - 1)
    rgb = colorsys.hls_to_rgb(hue / 360, lightness, saturation)
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in rgb)


def fill(category: Category, shade: int, off_cpu: bool) -> str:
    """Return `#rrggbb` for a frame of `category`.

    The off-CPU categories are blue in any case; time spent in them is never on a CPU. Frames of a
    device have no off-CPU time.
    """
    if (off_cpu and category in _OFF_CPU) or category not in _ON_CPU:
        return _mix(_OFF_CPU[category], shade)
    return _mix(_ON_CPU[category], shade)


def tables() -> tuple[list[list[str]], list[list[str]]]:
    """Return the on-CPU and the off-CPU colours as tables [category][shade]."""
    on_cpu = [[fill(c, shade, False) for shade in range(SHADES)] for c in Category]
    off_cpu = [[fill(c, shade, True) for shade in range(SHADES)] for c in Category]
    return on_cpu, off_cpu


def class_fills() -> list[str]:
    """Return the colour of each SampleClass where nothing but the class is shown."""
    middle = SHADES // 2
    waits = [fill(category, middle, True) for category in CLASS_CATEGORY.values()]
    return [fill(Category.NATIVE, middle, False), *waits]
