# SPDX-License-Identifier: Apache-2.0
"""What a fork closes: all that is open and is not to be kept, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What is open in the end, as the kernel tells of each number.
_OPEN = (
    "def is_open(number):\n"
    "    try:\n"
    "        os.fstat(number)\n"
    "    except OSError:\n"
    "        return False\n"
    "    return True\n"
    "print([number for number in range(1100) if is_open(number)])\n"
)
_BEGIN = (
    "import os, resource\n"
    "from aiflame.agent.closing import close_all_but\n"
    "for number in (5, 6, 7, 40, 1000):\n"
    "    os.dup2(0, number)\n"
)


def _open_after(script: str, **more: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, **more
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ("{0, 1, 2, 6}", [0, 1, 2, 6]),
        ("range(3)", [0, 1, 2]),
        ("{1, 1000}", [1, 1000]),
        ("{1, 3000}", [1]),
    ],
)
def test_what_is_not_kept_is_closed(kept: str, left: list[int]) -> None:
    assert _open_after(f"{_BEGIN}close_all_but({kept})\n{_OPEN}") == str(left)


def test_where_no_descriptor_is_left_to_list_them_with() -> None:
    fill = (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "try:\n"
        "    while True:\n"
        "        os.dup(0)\n"
        "except OSError:\n"
        "    pass\n"
    )
    # 1000 is above the limit that there is then.
    script = f"{_BEGIN}os.close(1000)\n{fill}close_all_but({{1, 40}})\n{_OPEN}"
    assert _open_after(script) == "[1, 40]"


def test_a_limit_of_a_billion_costs_nothing() -> None:
    # GIVEN a Python that closes each number of a range by itself
    script = (
        f"{_BEGIN}closed = []\n"
        "closerange = os.closerange\n"
        "os.sysconf = lambda name: 1 << 30\n"
        "os.closerange = lambda *ends: (closed.append(ends[1] - ends[0]), closerange(*ends))\n"
        "close_all_but(range(3))\n"
        "assert sum(closed) < 1100, closed\n"
        f"{_OPEN}"
    )
    assert _open_after(script) == "[0, 1, 2]"
