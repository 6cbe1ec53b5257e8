# SPDX-License-Identifier: Apache-2.0
"""What a recording lost, in words: how many, what it means, what helps, and which files did it."""

from __future__ import annotations

from aiflame.agent.commands.record_losses import loss_rows
from aiflame.agent.losses import LossKind


def test_what_was_lost_is_told_with_its_cure() -> None:
    losses = {LossKind.SUMS_FULL: 3, LossKind.STACK_LOST: 0}
    assert loss_rows(losses, {}) == [
        (
            "sums_full",
            3,
            "samples and waits that found no room at all: their time is missing;"
            " raise --hash-storage-size",
        )
    ]


def test_files_to_blame_are_named_and_harmless() -> None:
    files = {LossKind.BAD_ELF: {f"/lib/{letter}" for letter in "abcdefghij"} | {"/\x1b[2J"}}
    ((name, count, words),) = loss_rows({LossKind.BAD_ELF: 11}, files)
    assert (name, count) == ("bad_elf", 11)
    assert words.endswith(
        "its frames have no names: /\ufffd[2J, /lib/a, /lib/b, /lib/c, /lib/d, /lib/e, /lib/f,"
        " /lib/g and 3 more"
    )
