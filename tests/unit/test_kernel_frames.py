# SPDX-License-Identifier: Apache-2.0
"""Addresses of kernel functions that /proc names."""

from __future__ import annotations

from pathlib import Path

from aiflame.agent.processes.kernel_frames import kernel_addresses

_LIST = """\
0000000000000100 A pcpu_value
ffffffff81000010 T schedule
ffffffff81000020 t pause
ffffffff81000030 t pause
ffffffff81000040 D schedule_data
ffffffff81000050 D poll
ffffffffc0000010 t pause\t[fuse]
ffffffffc0000020 T request\t[fuse]
0000000000000000 T hidden
"""


def test_functions_are_told_by_name_and_module(tmp_path: Path) -> None:
    path = tmp_path / "kallsyms"
    path.write_text(_LIST)
    wanted = {("schedule", ""), ("pause", ""), ("request", "fuse"), ("poll", ""), ("hidden", "")}
    found = kernel_addresses(wanted, path)
    assert found == {
        ("schedule", ""): 0xFFFFFFFF81000010,
        ("schedule", "*"): 0xFFFFFFFF81000010,
        ("pause", ""): 0xFFFFFFFF81000020,
        ("pause", "*"): 0xFFFFFFFF81000020,
        ("pause", "fuse"): 0xFFFFFFFFC0000010,
        ("request", "fuse"): 0xFFFFFFFFC0000020,
        ("request", "*"): 0xFFFFFFFFC0000020,
    }


def test_a_list_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    assert kernel_addresses({("schedule", "")}, tmp_path / "none") == {}
