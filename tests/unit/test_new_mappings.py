# SPDX-License-Identifier: Apache-2.0
"""New mappings reach the kernel half before anything is asked about what they hold."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aiflame.agent.recording.recorder import Recorder


def _done_for(
    images: list[str], *, known: tuple[str, ...] = (), has_entered: bool = True
) -> list[str]:
    """Returns what a recorder does, in order, once the mappings of images were read.

    Args:
        images: Their names.
        known: Those that map nothing but what others had mapped before.
        has_entered: Whether the threads that were there at the start are entered.
    """
    done: list[str] = []
    recorder: Any = SimpleNamespace(
        table=SimpleNamespace(
            take_remapped=lambda: images, is_current=lambda image: image != "ended"
        ),
        tables=SimpleNamespace(
            maps_new_files=lambda image: image not in known,
            push=lambda image: done.append(f"push {image}"),
            poll=lambda: done.append("poll"),
        ),
        _left_out=SimpleNamespace(leave_out=lambda image: image == "left out"),
        _options=SimpleNamespace(user_stacks=True),
        _has_entered=has_entered,
        _look=lambda image: done.append(f"look {image}"),
        _renew_files=lambda: None,
    )
    Recorder._follow_mappings(recorder)
    return done


def test_stacks_can_be_walked_before_files_are_asked_about() -> None:
    done = _done_for(["first", "second"])
    assert done == ["push first", "push second", "poll", "look first", "look second"]


def test_what_is_left_out_or_over_is_not_looked_at() -> None:
    assert _done_for(["left out", "ended"]) == ["push ended", "poll"]


def test_changes_are_made_together_where_no_file_is_new() -> None:
    assert _done_for(["first"], known=("first",)) == ["push first", "look first"]
    assert _done_for([]) == []


def test_no_change_is_waited_for_while_existing_threads_are_entered() -> None:
    assert _done_for(["first"], has_entered=False) == ["push first", "look first"]


def test_what_was_said_of_files_that_were_not_there_is_forgotten_by_all() -> None:
    # GIVEN a file that could not be opened and is due, and one that was opened late
    done: list[str] = []

    def does(what: str) -> Callable[[set[int]], None]:
        return lambda files: done.append(f"{what} {files}")

    binaries = SimpleNamespace(take_unopened=lambda: {3}, take_renewed=lambda: {7})
    keeper = SimpleNamespace(forget_binaries=does("forget"))
    recorder: Any = SimpleNamespace(
        table=SimpleNamespace(
            binaries=binaries, open_again=does("open"), look_again=does("look again")
        ),
        tables=SimpleNamespace(renew=does("renew")),
        pythons=keeper,
        devices=keeper,
        facts=keeper,
        stacks=SimpleNamespace(look_again=does("show stacks of")),
    )
    Recorder._renew_files(recorder)
    # THEN it is looked for once more, before who maps them is told of as new
    assert done[0] == "open {3}" and done[-2:] == ["show stacks of {7}", "look again {7}"]
    assert sorted(done[1:-2]) == [*3 * ["forget {7}"], "renew {7}"]
