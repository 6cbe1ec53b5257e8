# SPDX-License-Identifier: Apache-2.0
"""Into which processes helpers are loaded, and what is said of the others."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
from aiflame.agent.devices import helper_loads
from aiflame.agent.devices.helper_loads import HelperLoads
from aiflame.agent.losses import LossKind
from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import ProcessImage
from aiflame.gpu.base import HelperLibrary
from support import wait_until

_OLD, _NEW = 1, 2


@pytest.fixture
def loads(tmp_path: Path) -> Iterator[HelperLoads]:
    library = HelperLibrary(tmp_path / "libhelper.so", ("libcuda",), lambda _: {}, "more")
    found = HelperLoads(library, None, first_image=_OLD, begun_ns=lambda: 0)
    yield found
    found.close()


def _image(index: int, pid: int, image: int = _OLD) -> ProcessImage:
    return ProcessImage(index, pid, image, 0, name="job")


def _loader(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """Has processes of any number "loaded" by a stand-in, which does `says` for each `$pid`."""
    script = f"shift 2; for one; do pid=${{one%%:*}}; {says}; done"
    monkeypatch.setattr(helper_loads, "_LOADER", ("sh", "-c", script))
    monkeypatch.setattr(procfs, "start_ticks", lambda pid: 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(helper_loads, "time", found)
    return found


class Clock:
    """Stands in for `time`: what is waited for has a clock that tests set."""

    sleep, monotonic = staticmethod(time.sleep), staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.now_ns = 10**15

    def monotonic_ns(self) -> int:
        return self.now_ns


_LOADED = """echo '{"pid": '$pid', "stopped_ns": 3000000, "tries": 1, "was_there": false,' \
    '"why_held": ""}'"""
_THERE = """echo '{"pid": '$pid', "was_there": true}'"""


def _fails(*, is_final: bool) -> str:
    answer = json.dumps({"why": "no memory", "hint": "", "is_final": is_final})
    return f"""echo '{{"pid": '$pid', {answer[1:]}'"""


def _said(loads: HelperLoads) -> list[str]:
    said: list[str] = []
    wait_until(lambda: said.extend(loads.look()) or said, timeout_s=30)
    return said


def _finish(loads: HelperLoads) -> None:
    """Waits for the end of a loader that has nothing more to say."""

    def is_over() -> bool:
        assert loads.look() == []
        return loads._worker is None

    wait_until(is_over)


def test_a_process_that_has_ended_meanwhile_is_left_alone(loads: HelperLoads) -> None:
    # GIVEN a process that ends before its turn, so that another one may have its number
    child = subprocess.Popen(["sleep", "60"])
    started = procfs.start_ticks(child.pid)
    loads.ask(_image(0, child.pid))
    child.kill()
    child.wait()
    # THEN that is said, and counted
    (words,) = _said(loads)
    assert words.startswith(f"no helper was loaded into job ({child.pid}): ")
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 1
    assert started and not procfs.start_ticks(child.pid)


def test_a_process_that_has_just_begun_is_waited_for(loads: HelperLoads) -> None:
    # A command that was started with a helper has it a moment later.
    loads.ask(_image(0, os.getpid(), _NEW))
    assert loads.look() == []
    loads.forget(0)
    assert loads.losses.total() == 0


def test_what_is_known_at_the_end_is_said(loads: HelperLoads) -> None:
    # GIVEN a loader that is at work when the recording ends
    loads.ask(_image(0, child := os.getpid(), _OLD))
    loads.look()
    # THEN what came of it is waited for: a process does not trace its parent's like this one
    (words,) = loads.finish()
    assert words.startswith(f"no helper was loaded into job ({child}): ")


def test_those_that_are_too_many_wait_for_the_next_hour(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    # GIVEN more processes than helpers may be loaded into in an hour
    _loader(monkeypatch, _THERE)
    for index in range(300):
        loads.ask(_image(index, 1000 + index))
    there: list[ProcessImage] = []
    wait_until(lambda: loads.look() or there.extend(loads.take_there()) or len(there) == 256)
    _finish(loads)
    # THEN the others are counted, once
    assert loads.look() == []
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 300 - 256
    # AND an hour later they get theirs, and are counted no more
    clock.now_ns += 3_600 * 10**9
    wait_until(lambda: loads.look() or there.extend(loads.take_there()) or len(there) == 300)
    assert loads.losses.total() == 0


def test_a_loader_that_gets_nowhere_costs_only_the_process_it_is_at(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN three processes, of which the second one's file system never answers
    _loader(monkeypatch, f"[ $pid != 11 ] || exec sleep 600; {_THERE}")
    for index, pid in enumerate((10, 11, 12)):
        loads.ask(_image(index, pid))
    there: list[int] = []

    def look() -> list[str]:
        said = loads.look()
        there.extend(image.pid for image in loads.take_there())
        return said

    assert look() == []
    worker = loads._worker
    assert worker is not None
    # AND a loader that was long at the first one, and then said so
    select.select([worker.answers_fd], [], [], 10)
    worker.heard_ns -= 240 * 10**9
    assert look() == []
    assert there == [10]
    # WHEN nothing more has been heard of it for longer than any load takes
    worker.heard_ns -= 240 * 10**9
    # THEN that is said and counted, and the third one gets its helper
    (words,) = look()
    assert words == "no helper was loaded into job (11): its loader got nowhere in 240 s"
    wait_until(lambda: look() or 12 in there)
    assert there == [10, 12]
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 1
    # AND the loader is gone
    wait_until(lambda: worker.process.poll() is not None)


def test_a_loader_that_cannot_be_killed_is_left_alone(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN loaders that wait where no signal gets through to them
    _loader(monkeypatch, "exec sleep 600")
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    monkeypatch.setattr(subprocess.Popen, "wait", lambda *_: pytest.fail("waited"))
    stuck = []
    for index in range(4):
        loads.ask(_image(index, 10 + index))
        loads.look()
        assert loads._worker is not None
        stuck.append(loads._worker.process)
        loads._worker.heard_ns -= 240 * 10**9
        assert len(loads.look()) == 1
    # THEN there are no more than a few
    loads.ask(_image(4, 14))
    assert loads.look() == ["no helper was loaded: too many loaders do not end"]
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 5
    # AND there are others when one has ended after all
    monkeypatch.undo()
    for process in stuck:
        process.kill()
        process.wait()
    _loader(monkeypatch, _THERE)
    loads.ask(_image(5, 15))
    wait_until(lambda: not loads.look() and loads.take_there())
    loads.close()


def test_what_a_loader_that_ends_has_not_begun_is_not_lost(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a loader that ends at the first of three processes, of which another has ended by then
    _loader(monkeypatch, f"[ $pid != 10 ] || exit 1; {_THERE}")
    for index, pid in enumerate((10, 11, 12)):
        loads.ask(_image(index, pid))
    assert loads.look() == []
    loads.forget(2)
    # THEN the one that is left has its helper by the next
    (words,) = _said(loads)
    assert words == "no helper was loaded into job (10): its loader ended"
    there: list[ProcessImage] = []
    wait_until(lambda: loads.look() or there.extend(loads.take_there()) or there)
    assert [image.pid for image in there] == [11]
    _finish(loads)
    # AND where there is no time for another, it is counted
    for index, pid in enumerate((10, 11), 3):
        loads.ask(_image(index, pid))
    loads.look()
    assert len(loads.finish()) == 1
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 3


def test_a_failure_of_a_moment_is_tried_again(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    # GIVEN a process that has no memory for a helper for a while
    _loader(monkeypatch, _fails(is_final=False))
    loads.ask(_image(0, 10))
    # THEN that is said, and counted
    assert _said(loads) == ["no helper was loaded into job (10): no memory"]
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 1
    # AND it is tried again, after ever longer pauses, of which nothing is said and counted
    for pause_s in (300, 600, 1200, 2400, 4800, 9600, 14400, 14400):
        _finish(loads)
        clock.now_ns += (pause_s - 1) * 10**9
        assert loads.look() == []
        assert loads._worker is None
        clock.now_ns += 10**9
        assert loads.look() == []
        assert loads._worker is not None
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 1
    # AND success is said, and the process counted no more
    _finish(loads)
    _loader(monkeypatch, _LOADED)
    clock.now_ns += 14400 * 10**9
    (words,) = _said(loads)
    assert words.startswith("loaded libhelper.so into job (10), ")
    assert loads.losses.total() == 0


def test_what_failed_for_good_or_has_ended_is_not_tried_again(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    _loader(monkeypatch, _fails(is_final=True))
    loads.ask(_image(0, 10))
    assert len(_said(loads)) == 1
    _finish(loads)
    # GIVEN another one that ends while its loader is at work
    _loader(monkeypatch, _fails(is_final=False))
    loads.ask(_image(1, 11))
    assert loads.look() == []
    loads.forget(1)
    assert len(_said(loads)) == 1
    _finish(loads)
    clock.now_ns += 10**15
    assert loads.look() == []
    assert loads._worker is None
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 2


@pytest.mark.parametrize(("module", "name"), [(os, "pipe2"), (subprocess, "Popen")])
def test_a_loader_that_cannot_be_started_is_tried_again(
    module: ModuleType,
    name: str,
    loads: HelperLoads,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
) -> None:
    # GIVEN two processes, and no room for a loader
    _loader(monkeypatch, _THERE)
    loads.ask(_image(0, 10))
    loads.ask(_image(1, 11))
    with monkeypatch.context() as patch:
        patch.setattr(module, name, MagicMock(side_effect=OSError(0, "no room")))
        assert loads.look() == ["no helper was loaded: no room"]
        clock.now_ns += 300 * 10**9
        assert loads.look() == []
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 2
    # THEN they have theirs when there is room again
    clock.now_ns += 600 * 10**9
    there: list[ProcessImage] = []
    wait_until(lambda: loads.look() or there.extend(loads.take_there()) or len(there) == 2)
    assert loads.losses.total() == 0


def test_the_end_of_a_recording_waits_for_no_other_try(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    # GIVEN a process that is being tried again, and one that will be
    _loader(monkeypatch, _fails(is_final=False))
    loads.ask(_image(0, 10))
    assert len(_said(loads)) == 1
    _finish(loads)
    _loader(monkeypatch, f"[ $pid = 11 ] || exec sleep 600; {_fails(is_final=False)}")
    clock.now_ns += 299 * 10**9
    loads.ask(_image(1, 11))
    assert len(_said(loads)) == 1
    _finish(loads)
    clock.now_ns += 10**9
    assert loads.look() == []
    assert loads._worker is not None
    # THEN neither is waited for, and both are counted
    monkeypatch.setattr(clock, "sleep", lambda _: pytest.fail("waited"))
    assert loads.finish() == []
    assert loads.losses[LossKind.HELPERS_NOT_LOADED] == 2
    # AND none is begun with any more
    loads.close()
    clock.now_ns += 300 * 10**9
    assert loads.look() == []
    assert loads._worker is None


def test_a_process_that_shares_after_all_is_counted_no_more(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    # GIVEN a process that was too slow to load its helper
    _loader(monkeypatch, _fails(is_final=False))
    loads.ask(_image(0, 10))
    assert len(_said(loads)) == 1
    # WHEN it has it after all
    loads.has_helper(0)
    # THEN it is left alone
    _finish(loads)
    clock.now_ns += 300 * 10**9
    assert loads.look() == []
    assert loads._worker is None
    assert loads.losses.total() == 0


def test_a_process_that_a_loader_still_waits_for_has_no_second_one(
    loads: HelperLoads, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    # GIVEN a loader that waits where no signal gets through to it
    _loader(monkeypatch, "exec sleep 600")
    loads.ask(_image(0, 10))
    assert loads.look() == []
    assert loads._worker is not None
    stuck = loads._worker.process
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        clock.now_ns += 241 * 10**9
        assert len(loads.look()) == 1
    clock.now_ns += 300 * 10**9
    assert loads.look() == []
    assert loads._worker is None
    # WHEN it has ended after all, THEN there is another one
    stuck.kill()
    stuck.wait()
    _loader(monkeypatch, _THERE)
    wait_until(lambda: not loads.look() and loads.take_there())
    assert loads.losses.total() == 0
