# SPDX-License-Identifier: Apache-2.0
"""The helper for NVIDIA in a program, with a driver and a CUPTI that go wrong as real ones do."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic_ns as now_ns
from typing import Any, cast

import numpy as np
import pytest
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Tier
from aiflame.gpu.helpers import Helper
from aiflame.gpu.protocol import HelperError, HelperLoss, HelperTier, Why
from breadth import cases
from helper_memory import Host
from nvidia_helper import (
    ALONE,
    BLOCK_NS,
    MEMFD,
    SAMPLES_OF_BLOCK,
    Control,
    Helped,
    Target,
    Told,
    build_all,
    build_alone,
)
from support import wait_until

_ALL = "tier=2,read-out=20"
# A context, a module with two kernels, and a stream beside the default one.
_SETUP = ("init", "context 0", "module 1000", "function 0 scale", "function 0 fill", "stream")
_RING_BYTES = 4 << 20
_STALL = "smsp__pcsamp_warps_issue_stalled_"


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_alone(tmp_path_factory.mktemp("standin"))


def _samples_of(kernel: str, blocks: int) -> Counter[tuple[str, int, str]]:
    samples = blocks * SAMPLES_OF_BLOCK
    return Counter(
        {
            (kernel, 0x10, _STALL + "long_scoreboard"): samples // 2,
            (kernel, 0x10, _STALL + "long_scoreboard_not_issued"): samples // 4,
            (kernel, 0x20, _STALL + "selected"): samples // 4,
            (kernel, 0x40, _STALL + "wait"): samples // 4,
        }
    )


def _has_times(count: int) -> Callable[[Told], bool]:
    return lambda told: len(told.kernel_times) >= count


def _goes_on(target: Target, known: int) -> Callable[[Told], bool]:
    """Launches at each look; tells whether more kernel times are there."""
    return lambda told: bool(target.obey("launch 0 1 1 0")) or len(told.kernel_times) > known


def _has_stalls(blocks: int) -> Callable[[Told], bool]:
    # Of a block: a half, and three quarters.
    return lambda told: sum(told.samples().values()) >= blocks * SAMPLES_OF_BLOCK * 5 // 4


def _has_duty(duty_permille: int, told: Told) -> bool:
    return told.states[-1].duty_permille == duty_permille


def _sampled(host: Host) -> int:
    return sum(sample.count for sample in host.samples)


def _is_part(word: str) -> bool:
    return word.endswith("_not_issued")


def _samples(told: Told) -> bool:
    """Whether stalls are sampled: the helper's thread begins that, while launches go on."""
    return told.tier == HelperTier.STALLS


def _is_left_alone(target: Target) -> bool:
    """Whether launches do not wake the helper."""
    slept = target.switches_of_helper()
    target.obey("launch 0 1 100 0", "sync")
    return target.switches_of_helper() == slept


def _is_sound(told: Told) -> bool:
    return not told.losses and not told.errors and not told.damaged


# What it tells


def test_times_and_stalls_of_the_first_launch_on_are_exact(standin: Path) -> None:
    # GIVEN a process that the driver loads the helper into
    with Target(standin, gpu=_ALL) as target:
        begin_ns = time.monotonic_ns()
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            # WHEN it launches through the driver, and through the runtime, on two streams
            target.obey("launch 0 100 10 0", "runtime 1 50 4", "launch 0 300 2 1", "sync")
            told = target.read_until(_has_times(16))
            target.read_until(_has_stalls(1800))
            end_ns = time.monotonic_ns()
    # THEN each nanosecond and each sample is told
    assert told.durations_ns() == {"scale": 1600 * BLOCK_NS, "fill": 200 * BLOCK_NS}
    assert told.samples() == _samples_of("scale", 1600) + _samples_of("fill", 200)
    assert told.tier == HelperTier.STALLS
    assert _is_sound(told)
    # AND on the clock of the recorder
    times = told.kernel_times
    assert begin_ns < times["begin_ns"].min() and times["end_ns"].max() < end_ns
    # AND of which device and context
    assert set(zip(times["device"].tolist(), times["context"].tolist(), strict=True)) == {(0, 1)}
    assert told.contexts[1].period_cycles == 1 << 20
    assert (told.devices[1].name, told.devices[1].multiprocessors) == ("Standin B", 132)
    assert len(set(times["launch"].tolist())) == 16 and 0 not in times["launch"]


def test_a_helper_that_comes_late_tells_what_comes_then(standin: Path) -> None:
    # GIVEN a process that has launched
    with Target(standin) as target:
        target.obey(*_SETUP, "launch 0 100 10 0", "sync")
        # WHEN the helper is loaded
        assert target.obey(f"load {target.helper}") == 1
        # THEN it is off
        assert target.read().tier == HelperTier.LAUNCHES
        wait_until(lambda: target.threads() == {"program", "aiflame-nvidia"})
        # AND once it is on, it finds the context, and what is loaded late
        with target.control() as control:
            control.start()
            target.read_until(lambda told: told.tier == HelperTier.TIMES)
            target.obey("module 500", "function 1 late", "launch 1 50 4 0", "sync")
            target.read_until(_samples)
            target.obey("launch 1 50 4 0", "launch 2 10 5 0", "sync")
            told = target.read_until(_has_times(13))
            target.read_until(_has_stalls(250))
    assert told.durations_ns() == {"fill": 400 * BLOCK_NS, "late": 50 * BLOCK_NS}
    assert told.samples() >= _samples_of("fill", 200) + _samples_of("late", 50)
    assert _is_sound(told)


def test_graph_nodes_lead_to_the_launches_that_built_them(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            # GIVEN a graph of two kernels, built by capture
            assert target.obey("capture 1", "launch 0 10 1 1", "launch 1 20 1 1", "end 1") == 0
            # WHEN it is replayed, and a kernel launched
            target.obey("instantiate", "graph 1", "graph 1", "launch 0 10 1 0", "sync")
            told = target.read_until(_has_times(5))
    # THEN both kernels of a replay have its launch
    times = told.kernel_times
    replays = times[times["node"] != 0]
    by_launch = Counter(replays["launch"].tolist())
    assert list(by_launch.values()) == [2, 2]
    # AND their nodes are copies of those that two other launches have built
    built = {
        told.nodes[told.nodes[int(row["node"])].original].launch: told.names[int(row["name"])]
        for row in replays
    }
    assert sorted(built.values()) == ["fill", "scale"]
    assert not set(built) & set(times["launch"].tolist()) and 0 not in built
    assert _is_sound(told)


def test_code_is_told_with_its_bytes_and_when_it_goes(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey("init", "context 0")
        with target.control():
            target.obey("module 1000", "module 3000", "unload 1")
            told = target.read_until(lambda told: len(told.unloaded) == 1)
            first, second = told.codes
            # As program.c makes them.
            assert target.code(first) == bytes(at * 7 % 256 for at in range(1000))
            assert target.code(second) == bytes((at * 7 + 1) % 256 for at in range(3000))
    assert (told.unloaded[0].code, told.unloaded[0].module) == (second.code, second.module)
    assert _is_sound(told)


def test_ids_of_launches_go_on_where_cuptis_begin_anew(standin: Path) -> None:
    with Target(standin, f"first={2**32 - 5}", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.obey("launch 0 1 20 0", "sync")
            told = target.read_until(_has_times(19))
    ids = np.sort(told.kernel_times["launch"]).astype(np.int64)
    # Without the one that CUPTI numbers 0, which is no number.
    assert ids[ids != 0].size == 19
    assert set(np.diff(ids[ids != 0]).tolist()) == {1, 2}


def test_a_period_that_is_asked_for_is_set(standin: Path) -> None:
    with Target(standin, gpu="tier=2,read-out=20,period=18") as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            target.obey("launch 0 100 1 0", "sync")
            told = target.read_until(_has_stalls(400))
    assert told.contexts[1].period_cycles == 1 << 18
    assert told.samples() == _samples_of("scale", 400)


def test_kernels_beside_one_that_runs_are_told_in_the_end(standin: Path) -> None:
    # GIVEN a CUPTI that gives whole buffers, and a kernel in the second one that does not end
    with Target(standin, "held=100", gpu="tier=1,read-out=20") as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.obey("launch 0 1 150 0", "sync", "launch 1 60000000 1 1", "launch 0 1 7 0")
            told = target.read_until(_has_times(100))
            assert len(told.kernel_times) == 100
            # WHEN it is stopped
            control.stop()
            told = target.read_until(lambda told: told.tier == HelperTier.LAUNCHES)
    # THEN what had ended before it began is told, and what CUPTI refuses after it is counted
    assert len(told.kernel_times) == 150
    assert not told.errors
    assert told.losses == {HelperLoss.TIMES_REFUSED: 7}


def test_an_exit_tells_the_last_kernels(standin: Path) -> None:
    with Target(standin, gpu="tier=2,read-out=10000") as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            target.obey("launch 0 100 10 0", "sync")
            target.send("exit 7")
            assert target.process.wait(10) == 7
            told = target.read()
    assert told.durations_ns() == {"scale": 1000 * BLOCK_NS}
    assert told.samples() == _samples_of("scale", 1000)
    assert told.tier == HelperTier.LAUNCHES


# On and off


def test_a_recorder_that_is_killed_leaves_it_off(standin: Path) -> None:
    # GIVEN a recorder, which is another process, and children that were forked meanwhile
    with Target(standin) as target:
        target.obey(*_SETUP, f"load {target.helper}", "fork 1")
        with target.control() as control:
            holder = subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[control.pipe]
            )
            control.start()
        target.read_until(lambda told: told.tier == HelperTier.TIMES)
        target.obey("fork 1")
        # WHEN it is killed
        holder.kill()
        holder.wait()
        assert holder.stdin is not None
        holder.stdin.close()
        # THEN all is off, and nothing wakes up any more
        target.read_until(lambda told: told.tier == HelperTier.LAUNCHES)
        # HELLO is read before STATE.
        assert target.read().states[-1].why == Why.RECORDER_GONE
        wait_until(lambda: _is_left_alone(target))
        assert len(target.read().kernel_times) == 0
        # AND the next one finds it, and all that was told before
        with target.control() as control:
            control.start()
            target.read_until(lambda told: told.tier == HelperTier.TIMES)
            target.obey("launch 0 100 3 0", "sync")
            target.read_until(_has_times(3))
        assert target.read_anew().durations_ns() == {"scale": 300 * BLOCK_NS}
        assert _is_sound(target.told)


def test_stop_and_start_a_hundred_times(standin: Path) -> None:
    with Target(standin) as target:
        target.obey(*_SETUP, f"load {target.helper}")
        with target.control() as control:
            for turn in range(100):
                control.start()
                target.read_until(lambda told: told.tier == HelperTier.TIMES)
                target.obey("launch 0 100 1 0")
                target.read_until(_samples)
                target.obey("launch 0 100 1 0", "sync")
                target.read_until(_has_times(2 * turn + 2))
                control.stop()
                target.read_until(lambda told: told.tier == HelperTier.LAUNCHES)
        told = target.told
    assert told.durations_ns() == {"scale": 20000 * BLOCK_NS}
    assert told.samples() >= _samples_of("scale", 10000)
    assert _is_sound(told)


def test_instances_of_a_device_are_told_by_their_own_numbers(standin: Path) -> None:
    found = []
    for words in ("", "mig"):
        with Target(standin, words, gpu=_ALL) as target:
            target.obey(*_SETUP)
            told = target.read_until(lambda told: len(told.devices) == 2)
        found.append([device.uuid for _, device in sorted(told.devices.items())])
    wholes, instances = found
    assert not {*wholes} & {*instances}


def test_a_program_that_closes_what_it_did_not_open_goes_on_without(standin: Path) -> None:
    # GIVEN a helper that is on
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            # WHEN its program closes all descriptors but the standard ones
            target.obey("close")
            # THEN it ends, and nothing of it goes on
            wait_until(lambda: target.threads() == {"program"})
        target.obey("launch 0 10 1 0", "sync")
        target.send("exit 0")
        assert target.process.wait(10) == 0


@pytest.mark.slow
def test_it_is_off_when_no_recorder_comes(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP, "launch 0 1 1 0")
        target.read_until(_samples)
        told = target.read_until(lambda told: told.tier == HelperTier.LAUNCHES, timeout_s=20)
    assert told.states[-1].why == Why.RECORDER_GONE


@pytest.mark.slow
def test_a_duty_cycle_pauses_stalls_and_no_times(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            control.start(duty=100)
            target.obey("launch 0 100 1 0")
            paused = lambda told: any(state.why == Why.DUTY for state in told.states)  # noqa: E731
            target.read_until(paused, timeout_s=20)
            samples = sum(target.told.samples().values())
            target.obey("launch 0 100 5 0", "sync")
            target.read_until(_has_times(6))
            assert sum(target.told.samples().values()) == samples
            assert target.told.states[-1].tier == HelperTier.TIMES
            # After ten seconds it goes on.
            sampled = lambda told: told.states[-1].tier == HelperTier.STALLS  # noqa: E731
            target.read_until(sampled, timeout_s=20)
    assert _is_sound(target.told)


@pytest.mark.breadth
def test_a_duty_cycle_leaves_no_facts(tmp_path: Path) -> None:
    # GIVEN one that is a hundred times as fast
    folder = build_alone(tmp_path, "-DDUTY_NS=100000000ull")
    with Target(folder, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            control.start(duty=500)
            target.obey("launch 0 100 1 0")
            target.read_until(lambda told: len(told.states) > 4)
            facts = target.facts_bytes()
            # WHEN it has paused, and gone on
            target.read_until(lambda told: len(told.states) > 14)
            # THEN that is told in the ring, and all that stays true was told before
            assert target.facts_bytes() == facts
    assert {state.why for state in target.told.states} == {Why.ASKED, Why.DUTY}
    assert target.told.tier == HelperTier.STALLS
    assert _is_sound(target.told)


def test_more_than_always_is_always(standin: Path) -> None:
    with Target(standin, gpu="tier=2,read-out=20,duty=500") as target:
        target.obey(*_SETUP)
        target.read_until(partial(_has_duty, 500))
    with Target(standin, gpu="tier=2,read-out=20,duty=5000") as target:
        target.obey(*_SETUP)
        # No other number is one of the protocol.
        target.read_until(partial(_has_duty, 1000))


@pytest.mark.breadth
def test_samples_of_other_duty_cycles_stand_for_all_of_the_time(tmp_path: Path) -> None:
    # GIVEN a cycle of half a second, and a program whose device is always busy
    folder, host = build_alone(tmp_path, "-DDUTY_NS=500000000ull"), Host()
    with Target(folder, gpu=_ALL) as target:
        target.obey(*_SETUP, "launch 0 1 1 0")
        target.read_until(_samples)
        helper = Helper(target.find_memory(), cast(Any, host), lambda _: 0, _is_part, 0)
        with target.control() as control:
            # WHEN stalls are sampled always, for a part of the time, never, and always again
            for duty in (1000, 400, 0, 1000):
                control.start(duty=duty)
                target.read_until(partial(_has_duty, duty))
                helper.read(0)
                before, begun_ns, blocks = _sampled(host), now_ns(), 0
                while now_ns() - begun_ns < 5_000_000_000:
                    target.obey("launch 0 10000 1 0", "sync")
                    blocks += 10_000
                    target.read()
                    helper.read(0)
                # THEN what was sampled stands for all
                truth = blocks * SAMPLES_OF_BLOCK if duty else 0
                assert _sampled(host) - before == pytest.approx(truth, rel=0.15), duty
    assert _is_sound(target.told)


def _ring_head(target: Target) -> int:
    return int.from_bytes(target.find_memory().read(8, 24), "little")


class _Piped:
    """The memory of a target, as a recorder has it."""

    process = 0

    def __init__(self, target: Target, control: Control) -> None:
        self.read = target.find_memory().read
        self._control = control

    def tell(self, _number: int, message: bytes) -> bool:
        return os.write(self._control.pipe, message) == len(message)

    def is_over(self) -> bool:
        return False

    def leave(self) -> None:
        self._control.close()


def test_who_comes_second_leaves_what_the_first_has_asked_for(tmp_path: Path) -> None:
    # GIVEN a recorder that samples a tenth of the time, and a ring that has gone round since
    folder = build_alone(tmp_path, "-DDUTY_NS=200000000ull", "-DWINDOWS_NS=200000000ull")
    with Target(folder, gpu="tier=2,duty=1000,read-out=20") as target:
        target.obey(*_SETUP)
        with target.control() as first, target.control() as second:
            first.start(duty=100)
            target.read_until(partial(_has_duty, 100))
            while _ring_head(target) < _RING_BYTES:
                target.obey("launch 0 1 20000 0", "sync")
                target.read()
            # WHEN another one samples always, with serialised windows
            helper = Helper(
                cast(Any, _Piped(target, second)), cast(Any, Host()), lambda _: 0, _is_part, 0
            )
            helper.read(0)
            assert helper.told.state is None
            helper.start(Tier.STALLS, 1000, 200)
            target.read_until(partial(_has_duty, 1000))
            target.read_until(lambda told: told.windows)
            helper.read(1)
            # THEN its end is that of what it asked for
            helper.leave()
            target.read_until(partial(_has_duty, 100))
            windows = len(target.read().windows)
            cycles = len(target.told.states) + 6
            target.read_until(lambda told: len(told.states) > cycles)
            assert len(target.told.windows) <= windows + 1


def test_graphs_and_modules_without_end_leave_room_for_names(tmp_path: Path) -> None:
    folder = build_alone(tmp_path, "-DMOST_NODES=20", "-DMOST_RELOADS=3")
    with Target(folder, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            # GIVEN a graph that is made again and again, and a module that is loaded as often
            target.obey("capture 1", "launch 0 10 1 1", "launch 1 20 1 1", "end 1")
            target.obey(*["instantiate"] * 30, *["again 0"] * 10)
            # THEN what is too much is counted
            told = target.read_until(lambda told: told.losses[HelperLoss.FACTS] == 42 + 7)
            assert (len(told.nodes), len(told.codes)) == (20, 1 + 3)
            # AND kernels are told as before
            target.obey("function 0 other", "launch 2 10 1 0", "sync")
            told = target.read_until(_has_times(1))
    assert told.durations_ns() == {"other": 10 * BLOCK_NS}
    assert set(told.losses) == {HelperLoss.FACTS}


def test_a_message_that_is_none_is_told(standin: Path) -> None:
    with Target(standin) as target:
        target.obey(*_SETUP, f"load {target.helper}")
        with target.control() as control:
            os.write(control.pipe, b"x" * 32)
            os.write(control.pipe, b"short")
            target.read_until(lambda told: len(told.errors) == 2)
            control.start()
            target.read_until(lambda told: told.tier == HelperTier.TIMES)
    assert {error for error, _ in target.told.failed} == {HelperError.CONTROL}


def test_without_a_driver_it_waits_for_one(standin: Path, tmp_path: Path) -> None:
    # GIVEN a program that has no CUDA
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); input()"
    command = [sys.executable, "-c", code, standin / "libaiflame-nvidia.so"]
    (tmp_path / "run").write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in command))
    (tmp_path / "run").chmod(0o755)
    with Target(standin, program=tmp_path / "run") as target:
        target.find_memory()
        with target.control() as control:
            control.start()
            told = target.read_until(lambda told: len(told.hellos) == 2)
            assert "no CUDA driver" in told.hellos[-1].why
    assert told.errors == []


def test_before_the_program_uses_cuda_nothing_of_it_is_touched(standin: Path) -> None:
    # GIVEN a program that has mapped the driver, as who imports PyTorch, and may fork yet
    with Target(standin) as target:
        target.obey(f"load {target.helper}")
        with target.control() as control:
            # WHEN it is recorded
            control.start()
            told = target.read_until(lambda told: len(told.hellos) == 2)
            # THEN CUPTI is left alone, which might initialise the driver
            assert told.hellos[-1].why == "the process does not use CUDA yet"
            # AND once it uses CUDA it is told of
            target.obey(*_SETUP)
            target.read_until(lambda told: target.obey("launch 0 10 1 0") or _samples(told))
            told = target.read_until(_has_times(1))
    assert _is_sound(told)


# What goes wrong


def test_without_rights_there_are_times(standin: Path) -> None:
    with Target(standin, "no-rights", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(lambda told: told.errors)
            target.obey("launch 0 100 3 0", "sync")
            told = target.read_until(_has_times(3))
    assert told.failed == [(HelperError.RIGHTS, "cuptiPCSamplingEnable")]
    assert (told.errors[0].code, told.errors[0].text) == (35, "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    assert told.tier == HelperTier.TIMES
    assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in told.hellos[-1].why


def test_another_profiler_is_named_and_left_alone(standin: Path) -> None:
    with Target(standin, "taken", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.obey("launch 0 100 3 0", "sync")
            told = target.read_until(lambda told: told.errors)
    assert told.failed == [(HelperError.TAKEN, "cuptiSubscribe")]
    assert told.errors[0].text == "nsys"
    assert told.hellos[-1].why == "another profiler uses CUPTI: nsys"
    assert told.tier == HelperTier.LAUNCHES


@pytest.mark.slow
def test_it_comes_back_when_another_profiler_has_gone(standin: Path) -> None:
    with Target(standin, "taken=2", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(lambda told: told.tier == HelperTier.TIMES)
            target.obey("launch 0 100 3 0", "sync")
            told = target.read_until(_has_times(3))
    assert told.failed == [(HelperError.TAKEN, "cuptiSubscribe")]


def test_times_that_another_profiler_took_are_asked_for_anew(tmp_path: Path) -> None:
    standin = build_alone(tmp_path, "-DQUIET_NS=500000000ull")
    with Target(standin, gpu="tier=1,read-out=20") as target:
        target.obey(*_SETUP)
        with target.control():
            target.obey("launch 0 1 5 0", "sync")
            target.read_until(_has_times(5))
            # GIVEN a profiler that takes kernel times without having subscribed, and ends them
            target.obey("profile", "launch 0 1 3 0", "sync")
            assert target.obey("unprofile") > 0
            # WHEN kernels go on
            target.read_until(lambda told: target.obey("launch 0 1 1 0") or told.errors)
            target.obey("launch 0 1 10 0", "sync")
            told = target.read_until(_has_times(15))
    # THEN it is told once that times are missing, and they come again
    assert told.failed == [(HelperError.QUIET, "CUPTI")]
    assert told.durations_ns()["scale"] == len(told.kernel_times) * BLOCK_NS


def test_buffers_that_another_profiler_was_given_are_not_lost_for_good(tmp_path: Path) -> None:
    # GIVEN a helper with four buffers, and a CUPTI that always has one
    folder = build_alone(tmp_path, "-DQUIET_NS=50000000ull", "-DBUFFERS=4")
    with Target(folder, "holds", gpu="tier=1,read-out=10") as target:
        target.obey(*_SETUP)
        with target.control():
            target.obey("launch 0 1 5 0", "sync")
            target.read_until(_has_times(5))
            # WHEN another one takes all that it has again and again, as a trainer's profiler does
            # THEN kernel times come again, each time
            for _ in range(8):
                known = len(target.read().kernel_times)
                target.obey("profile", "launch 0 1 3 0", "sync", "unprofile")
                target.read_until(_goes_on(target, known))


def test_a_program_that_launches_nothing_is_not_asked_anew(tmp_path: Path) -> None:
    standin = build_alone(tmp_path, "-DQUIET_NS=500000000ull")
    with Target(standin, gpu="tier=1,read-out=10") as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.obey("launch 0 1 5 0", "sync")
            target.read_until(_has_times(5))
            slept = target.switches_of_helper()
            wait_until(lambda: target.switches_of_helper() > slept + 80)
            control.stop()
            told = target.read_until(lambda told: told.tier == HelperTier.LAUNCHES)
    assert not told.errors


def test_it_subscribes_beside_another_one_of_v2(standin: Path) -> None:
    with Target(standin, "v2", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            target.obey("launch 0 100 3 0", "sync")
            told = target.read_until(_has_times(3))
            target.read_until(_has_stalls(300))
    assert told.durations_ns() == {"scale": 300 * BLOCK_NS}
    assert _is_sound(told)


def test_a_full_buffer_is_told_and_sampling_begun_anew(standin: Path) -> None:
    # GIVEN a device whose first sessions never come to an end with their buffer
    with Target(standin, "full=2", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(lambda told: told.losses[HelperLoss.BUFFER_FULL] == 2)
            target.obey("launch 0 100 4 0", "sync")
            target.read_until(_has_times(4))
            # THEN the third one samples, less often
            told = target.read_until(lambda told: told.samples())
    assert told.contexts[1].period_cycles == 1 << 21
    assert told.tier == HelperTier.STALLS
    assert told.failed == []


def test_a_buffer_that_stays_full_costs_the_stalls_only(standin: Path) -> None:
    with Target(standin, "full=100", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            told = target.read_until(lambda told: told.errors)
            target.obey("launch 0 100 4 0", "sync")
            target.read_until(_has_times(4))
    assert told.failed == [(HelperError.MEMORY, "cuptiPCSamplingGetData")]
    assert told.losses == {HelperLoss.BUFFER_FULL: 7}
    assert told.tier == HelperTier.TIMES


@pytest.mark.parametrize(("standin_word", "comes"), [("mute=1", True), ("mute=9", False)])
def test_kernels_without_samples_are_looked_into(
    standin: Path, standin_word: str, comes: bool
) -> None:
    # GIVEN kernels that run for seconds, side by side, and sessions that sample nothing
    streams = [f"launch 0 300000 1 {stream}" for stream in range(1, 9)]
    with Target(standin, standin_word, gpu=_ALL) as target:
        target.obey(*_SETUP, *["stream"] * 7)
        with target.control():
            target.read_until(_samples)
            target.obey(*streams, "sync")
            target.read_until(_has_times(8))

            def is_seen(told: Told) -> object:
                # What was launched before sampling began is not sampled.
                target.obey(*streams, "sync")
                return told.samples() if comes else told.errors

            # THEN it is begun anew; and given up, if that was of no use
            told = target.read_until(is_seen, timeout_s=30)
    assert [error for error, _ in told.failed] == ([] if comes else [HelperError.NO_SAMPLES])
    assert told.tier == (HelperTier.STALLS if comes else HelperTier.TIMES)


def test_a_period_at_which_nothing_is_sampled_is_given_up(standin: Path) -> None:
    # GIVEN a chip that samples only at its own period, and another one that was asked for
    streams = [f"launch 0 300000 1 {stream}" for stream in range(1, 9)]
    with Target(standin, "mute-period", gpu="tier=2,read-out=20,period=18") as target:
        target.obey(*_SETUP, *["stream"] * 7)
        with target.control():
            target.read_until(_samples)
            target.obey(*streams, "sync")

            def is_seen(told: Told) -> object:
                target.obey(*streams, "sync")
                return told.samples()

            told = target.read_until(is_seen, timeout_s=30)
    # THEN it is sampled at its own, and the samples say so
    assert (told.failed, told.tier) == ([], HelperTier.STALLS)
    assert told.contexts[1].period_cycles == 1 << 20
    assert {batch.period_cycles for batch in told.stalls} == {1 << 20}


def test_drops_are_told(standin: Path) -> None:
    with Target(standin, "drop=7 foreign=5", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            told = target.read_until(lambda told: told.losses[HelperLoss.SAMPLES_DROPPED] >= 70)
    assert told.losses[HelperLoss.SAMPLES_DROPPED] % 7 == 0
    assert told.losses[HelperLoss.SAMPLES_FOREIGN] % 5 == 0
    assert set(told.losses) == {HelperLoss.SAMPLES_DROPPED, HelperLoss.SAMPLES_FOREIGN}


def test_what_is_read_out_piece_by_piece_is_read_out(standin: Path) -> None:
    with Target(standin, "few", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            target.obey("launch 0 100 3 0", "launch 1 100 3 0", "sync")
            told = target.read_until(_has_stalls(600))
    assert told.samples() == _samples_of("scale", 300) + _samples_of("fill", 300)


def test_a_name_at_the_place_of_another_one_is_told(standin: Path) -> None:
    # GIVEN a kernel whose name lies where that of another one was, which is gone
    with Target(standin, "reloads", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            target.obey("launch 0 100 1 0", "sync")
            target.read_until(_has_stalls(100))
            target.read_until(_has_times(1))
            target.obey("launch 1 100 1 0", "sync")
            target.read_until(_has_stalls(200))
            told = target.read_until(_has_times(2))
    # THEN its samples and its time have its name
    assert told.samples() == _samples_of("scale", 100) + _samples_of("fill", 100)
    assert told.durations_ns() == {"scale": 100 * BLOCK_NS, "fill": 100 * BLOCK_NS}


@pytest.mark.breadth
def test_names_that_are_copied_each_time_end_sampling(tmp_path: Path) -> None:
    folder = build_alone(tmp_path, "-DPOINTER_SLOTS=64")
    with Target(folder, "copies", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            while not target.read().errors:
                target.obey("launch 0 100 1 0", "sync")
            told = target.told
    assert [error for error, _ in told.failed] == [HelperError.NAMES]
    assert told.tier == HelperTier.TIMES


@pytest.mark.breadth
def test_names_of_kernels_that_are_compiled_for_weeks_do_not_end_it(tmp_path: Path) -> None:
    # GIVEN a process that has so many names only after long
    folder = build_alone(tmp_path, "-DPOINTER_SLOTS=64", "-DCOPIES_NS=0")
    with Target(folder, "copies", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            for turn in range(40):
                target.obey("launch 0 100 1 0", "sync")
                told = target.read_until(_has_stalls(100 * (turn + 1)))
    assert (told.failed, told.tier) == ([], HelperTier.STALLS)
    assert told.samples() == _samples_of("scale", 40 * 100)


def test_nothing_is_enabled_while_a_stream_is_captured(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            # GIVEN a capture, in which another context is made
            target.obey("capture 1", "context 1", "use 0", "launch 0 1 1 0", "sync")
            target.obey("launch 0 100 2 0")
            target.read_until(_has_times(3))
            assert 2 not in target.told.reasons
            # WHEN it has ended, which nobody else did
            assert target.obey("end 1") in (0, 901)
            # THEN that one is sampled, too
            told = target.read_until(lambda told: 2 in told.reasons)
    assert _is_sound(told)


def test_sampling_begins_anew_when_no_stream_is_captured(standin: Path) -> None:
    # GIVEN sampling that has to begin anew twice, and a capture
    with Target(standin, "full=2", gpu="tier=2,read-out=500") as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.read_until(_samples)
            target.obey("capture 1")
            control.start(read_out_ms=20)
            target.read_until(lambda told: told.losses[HelperLoss.BUFFER_FULL])
            # WHEN some read-outs come in it
            for turn in range(5):
                target.obey("launch 0 1 1 0")
                target.read_until(_has_times(turn + 1))
            # THEN nothing has begun
            assert target.told.losses[HelperLoss.BUFFER_FULL] == 1
            # BEFORE it has ended
            assert target.obey("end 1") == 0
            told = target.read_until(lambda told: told.losses[HelperLoss.BUFFER_FULL] == 2)
    assert told.failed == []


@pytest.mark.breadth
def test_a_capture_without_end_is_waited_for_in_vain_for_a_while_only(tmp_path: Path) -> None:
    folder = build_alone(tmp_path, "-DCAPTURE_NS=1000000000ull")
    with Target(folder, gpu=_ALL) as target:
        # GIVEN a stream that is captured, and never ends that
        target.obey("init", "stream", "capture 1", "context 0", "module 100", "function 0 scale")
        with target.control():
            target.obey("launch 0 1 1 0")
            told = target.read_until(lambda told: "captured" in told.hellos[-1].why)
            assert told.tier == HelperTier.TIMES
            # THEN sampling begins
            target.read_until(_samples)
    assert _is_sound(target.told)


@pytest.mark.breadth
def test_captures_that_overlap_are_waited_for_from_the_latest_on(tmp_path: Path) -> None:
    folder = build_alone(tmp_path, "-DCAPTURE_NS=1000000000ull")
    with Target(folder, gpu=_ALL) as target:
        # GIVEN a capture, and another one that begins before that ends, and has no end
        target.obey("init", "stream", "stream", "capture 1")
        first_s = time.monotonic()
        wait_until(lambda: time.monotonic() - first_s > 0.6)
        second_s = time.monotonic()
        target.obey("capture 2", "end 1", "context 0", "module 100", "function 0 scale")
        with target.control():
            target.obey("launch 0 1 1 0")
            target.read_until(_samples)
    # THEN sampling has waited for the second one as long as captures last
    assert time.monotonic() - second_s >= 1.0


def test_a_capture_that_was_there_before_survives(standin: Path) -> None:
    with Target(standin) as target:
        target.obey(*_SETUP, f"load {target.helper}", "capture 1", "launch 0 1 1 1")
        with target.control() as control:
            control.start()
            target.read_until(lambda told: told.tier == HelperTier.TIMES)
            target.obey("launch 1 1 1 1")
            target.read_until(_samples)
            assert target.obey("end 1") == 0


def test_a_context_that_goes_is_read_out_and_not_touched_any_more(standin: Path) -> None:
    with Target(standin, "slow=5", gpu="tier=2,read-out=10") as target:
        target.obey(*_SETUP)
        with target.control():
            for turn in range(20):
                target.obey(f"context {turn % 2}", "launch 0 100 1 0", "sync")
                target.obey("launch 0 100 1 0", "sync", f"destroy {turn + 1}", "use 0")
            told = target.read_until(_has_times(40))
            assert target.obey("launch 0 100 1 0") == 0
            target.read_until(_has_times(41))
    assert told.durations_ns() == {"scale": 4100 * BLOCK_NS}
    assert _is_sound(told)


def test_modules_go_after_their_context_was_told_of(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            for turn in range(20):
                # WHEN contexts are destroyed, and their modules with them
                target.obey("context 0", f"module {2000 + turn}", f"destroy {turn + 1}", "use 0")
            # THEN CUPTI is not asked about them any more, which the stand-in would not survive
            told = target.read_until(lambda told: len(told.unloaded) == 20)
    assert [code.context for code in told.codes] == [*range(1, 22)]
    assert [one.context for one in told.unloaded] == [*range(2, 22)]
    assert _is_sound(told)


@pytest.mark.slow
def test_a_context_that_goes_while_it_is_read_out_for_long_is_let_go(standin: Path) -> None:
    # GIVEN a read-out that takes longer than anybody waits for it
    with Target(standin, "slow=4000", gpu="tier=2,read-out=10000") as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.read_until(_samples)
            slept = target.switches_of_helper()
            target.obey("unload 0")
            wait_until(lambda: target.switches_of_helper() > slept)
            # WHEN its context is destroyed meanwhile
            begin = time.monotonic()
            target.obey("destroy 0")
            assert 1.5 < time.monotonic() - begin < 3
            # THEN it is not touched any more, which the stand-in would not survive
            target.read_until(lambda told: told.errors)
            control.stop()
            told = target.read_until(lambda told: told.tier == HelperTier.LAUNCHES)
            # AND another one may come in its place
            control.start()
            target.read_until(lambda told: told.tier == HelperTier.TIMES)
            target.obey("context 1", "launch 1 10 1 0")
            target.read_until(lambda told: 2 in told.reasons)
            target.send("exit 0")
            assert target.process.wait(20) == 0
    assert [error for error, _ in told.failed] == [HelperError.CALL]


def test_a_context_that_is_lost_is_left_alone(standin: Path) -> None:
    with Target(standin, "lost=3", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(lambda told: told.errors)
            target.obey("launch 0 100 3 0", "sync")
            told = target.read_until(_has_times(3))
    assert told.failed == [(HelperError.CALL, "cuptiPCSamplingGetData")]
    assert told.tier == HelperTier.TIMES


def test_cupti_that_ends_itself_is_not_called_any_more(standin: Path) -> None:
    # GIVEN a CUPTI that aborts the process if it is called after its end
    with Target(standin, "fatal=5", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.obey("launch 0 1 10 0", "sync")
            target.read_until(lambda told: told.errors)
            control.stop()
            target.read_until(lambda told: "nobody" in told.hellos[-1].why)
            target.obey("launch 0 1 10 0", "sync")
            # WHEN a recorder asks for it once more, THEN that is told again
            control.start()
            told = target.read_until(lambda told: "ended itself" in told.hellos[-1].why)
            target.obey("launch 0 1 10 0", "sync")
            target.send("exit 0")
            assert target.process.wait(10) == 0
    assert [error for error, _ in told.failed] == [HelperError.DRIVER]
    assert told.tier == HelperTier.LAUNCHES


# One interrupted reading of five; and more than one read-out tries.
@pytest.mark.parametrize("readings", [1, 8])
def test_clocks_are_compared_where_nothing_comes_between(standin: Path, readings: int) -> None:
    with Target(standin, f"interrupted={readings}", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            for turn in range(5):
                begin_ns = time.monotonic_ns()
                target.obey("launch 0 1 300 0", "sync")
                end_ns = time.monotonic_ns()
                told = target.read_until(_has_times(300 * (turn + 1)))
                times = told.kernel_times[-300:]
                assert begin_ns - 100_000 < times["begin_ns"].min()
                assert times["end_ns"].max() < end_ns + 100_000
    assert told.durations_ns() == {"scale": 1500 * BLOCK_NS}
    assert _is_sound(told)


def test_kernels_by_two_clocks_are_counted_and_not_told(standin: Path) -> None:
    # GIVEN kernels that ended before somebody set the clock by half a second
    with Target(standin, gpu="tier=2,read-out=2000") as target:
        target.obey(*_SETUP)
        with target.control():
            target.obey("launch 1 1 1 0")
            target.read_until(_has_times(1))
            target.obey("launch 0 1 600 0", "sync", f"step {500_000_000}")
            # THEN none of them has a time
            told = target.read_until(lambda told: told.losses)
            assert told.losses == {HelperLoss.TIMES_REFUSED: 600}
            assert told.durations_ns() == {"fill": BLOCK_NS}
            # AND those after it have theirs
            begin_ns = time.monotonic_ns()
            target.obey("launch 0 1 600 0", "sync")
            told = target.read_until(_has_times(601))
    assert begin_ns < told.kernel_times["begin_ns"][1:].min()
    assert told.kernel_times["end_ns"].max() < time.monotonic_ns()


def test_two_numbers_of_one_launch_are_told(standin: Path) -> None:
    with Target(standin, "two-ids", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.obey("runtime 0 1 10", "launch 0 1 5 0", "sync")
            told = target.read_until(_has_times(15))
            target.read_until(lambda told: told.losses)
    assert told.losses == {HelperLoss.LAUNCH_IDS: 10}


@pytest.mark.parametrize(
    ("standin_words", "tier", "why"),
    [
        ("cupti=25", HelperTier.TIMES, "CUPTI of CUDA 12.8"),
        ("driver=12040", HelperTier.TIMES, "a driver of CUDA 12.8"),
        ("cupti=17", HelperTier.LAUNCHES, "CUPTI is too old"),
    ],
)
def test_versions_that_are_too_old(
    standin: Path, standin_words: str, tier: HelperTier, why: str
) -> None:
    with Target(standin, standin_words, gpu=_ALL) as target:
        target.obey(*_SETUP, "launch 0 100 1 0", "sync")
        with target.control():
            told = target.read_until(lambda told: why in told.hellos[-1].why)
            if tier == HelperTier.TIMES:
                target.read_until(_has_times(1))
    assert [error for error, _ in told.failed] == [HelperError.TOO_OLD]
    assert told.tier == tier


@cases(
    "symbol,tier",
    [
        ("cuptiPCSamplingGetData", HelperTier.TIMES),
        ("cuptiGetCubinCrc", HelperTier.TIMES),
        ("cuptiActivityFlushAll", HelperTier.LAUNCHES),
        ("cuptiUnsubscribe", HelperTier.LAUNCHES),
        ("cuptiGetGraphNodeId", HelperTier.STALLS),
        ("cuptiActivityGetNumDroppedRecords", HelperTier.STALLS),
        ("cuptiSubscribe_v2", HelperTier.STALLS),
    ],
)
def test_functions_that_are_missing(tmp_path: Path, symbol: str, tier: HelperTier) -> None:
    folder = build_alone(tmp_path, without=symbol)
    with Target(folder, gpu=_ALL) as target:
        target.obey(*_SETUP, "launch 0 100 1 0", "sync")
        with target.control():
            told = target.read_until(lambda told: told.tier == tier)
            if tier == HelperTier.STALLS:
                assert told.errors == []
            else:
                target.read_until(lambda told: told.errors)
                assert told.failed == [(HelperError.SYMBOL, symbol)]
                assert symbol in told.hellos[-1].why


# What the process does


def test_a_child_is_silent_and_harms_nothing(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            for _ in range(20):
                assert target.obey("launch 0 1 5 0", "fork 50") == 0
            target.obey("sync")
            told = target.read_until(_has_times(100))
    assert told.durations_ns() == {"scale": 100 * BLOCK_NS}
    assert _is_sound(told)


def _copy(standin: Path, folder: Path) -> Path:
    return Path(shutil.copy(standin / "libaiflame-nvidia.so", folder / "libaiflame-nvidia.so"))


def _memories(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(MEMFD)


@pytest.mark.parametrize("way", ["preloaded", "by the driver", "loaded late"])
def test_of_two_copies_in_a_process_the_first_tells(
    standin: Path, tmp_path: Path, way: str
) -> None:
    # GIVEN a process into which two recorders have loaded a copy each
    first, second = standin / "libaiflame-nvidia.so", _copy(standin, tmp_path)
    preloaded = [first, second] if way == "preloaded" else [second]
    variables = {"LD_PRELOAD": ":".join(map(str, preloaded))}
    gpu = _ALL if way == "by the driver" else None
    with Target(standin, gpu=gpu, environment=variables) as target:
        target.obey(*_SETUP)
        if way == "loaded late":
            assert target.obey(f"load {first}") == 1
        # THEN there is one memory, one thread and one pipe
        told = target.read_until(lambda told: told.hellos)
        maps = Path(f"/proc/{target.pid}/maps").read_text()
        assert str(first) in maps and str(second) in maps
        assert _memories(target.pid) == 1
        assert len([*Path(f"/proc/{target.pid}/task").iterdir()]) == 2
        assert len([*Path(f"/proc/{target.pid}/fd").iterdir()]) == 3 + 3
        # AND what is launched is told once, and no other profiler is seen
        with target.control() as control:
            control.start()
            target.read_until(lambda told: told.tier >= HelperTier.TIMES)
            target.obey("launch 0 100 10 0", "sync")
            target.read_until(_has_times(10))
    assert told.durations_ns() == {"scale": 1000 * BLOCK_NS}
    assert _is_sound(told)


_FORKING = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1])
if not (child := os.fork()):
    ctypes.CDLL(sys.argv[2])
print(child, flush=True)
sys.stdin.read()
"""


def test_in_a_child_another_copy_is_the_first(standin: Path, tmp_path: Path) -> None:
    # GIVEN a child that was forked, whose helper is its parent's and tells nothing
    paths = standin / "libaiflame-nvidia.so", _copy(standin, tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", _FORKING, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        numbers = [int(parent.stdout.readline()), int(parent.stdout.readline())]
        # WHEN another copy is loaded there, THEN it tells
        child = Helped(max(numbers))
        try:
            child.read_until(lambda told: told.hellos)
            assert [_memories(pid) for pid in (parent.pid, child.pid)] == [1, 1]
        finally:
            child.close()
            parent.stdin.close()


def test_two_hundred_threads_that_launch(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            target.obey("threads 200 100", "sync")
            told = target.read_until(_has_times(20000))
            target.read_until(_has_stalls(20000))
    assert told.durations_ns() == {"scale": 20000 * BLOCK_NS}
    assert len(set(told.kernel_times["launch"].tolist())) == 20000
    assert told.samples() == _samples_of("scale", 20000)
    assert _is_sound(told)


def test_a_crash_leaves_whole_records(standin: Path) -> None:
    with Target(standin, gpu="tier=2,read-out=10") as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            target.send("threads 20 100000")
            target.read_until(_has_times(5000))
            target.process.kill()
            target.process.wait()
            told = target.read()
            for _ in range(20):
                target.read()
    assert told.damaged.keys() <= {LossKind.DEVICE_RECORDS_OVERWRITTEN}
    assert set(told.durations_ns()) == {"scale"}


def test_a_ring_that_nobody_reads_goes_round(standin: Path) -> None:
    # GIVEN five times as many kernels as the ring has room for
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.obey("launch 0 1 1 0")
            target.read_until(_has_times(1))
            for _ in range(8):
                target.obey("launch 0 1 50000 0", "sync")
            # THEN what is read is right, and what is not is counted
            target.obey("launch 1 1 1 0", "sync")
            told = target.read_until(lambda told: "fill" in told.durations_ns())
    assert told.damaged[LossKind.DEVICE_RECORDS_OVERWRITTEN] > 0
    assert LossKind.DEVICE_MEMORY_DAMAGED not in told.damaged
    times = told.kernel_times
    assert np.all(times["end_ns"] - times["begin_ns"] == BLOCK_NS)


def test_a_limit_on_files_is_respected(standin: Path) -> None:
    # GIVEN a process that a file of 64 MB would end, by SIGXFSZ
    with Target(standin) as target:
        resource.prlimit(target.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        assert target.obey(f"load {target.helper}", *_SETUP, "launch 0 1 10 0", "sync") == 0
        assert target.threads() == {"program"}


def test_without_descriptors_it_stays_off_and_takes_none(standin: Path) -> None:
    # GIVEN a process that may have three more descriptors: one less than the helper needs
    with Target(standin, gpu=_ALL) as target:
        resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (6, 6))
        # WHEN the driver loads the helper
        target.obey(*_SETUP, "launch 0 1 10 0", "sync")
        told = target.read()
        # THEN nothing is on that nobody could turn off
        assert target.threads() == {"program"}
        assert told.tier == HelperTier.LAUNCHES and not told.states
        assert "no more descriptors" in told.hellos[-1].why
        # AND the program may open as many as before, and waits for nobody when it ends
        assert len(list(Path(f"/proc/{target.pid}/fd").iterdir())) == 3
        begin = time.monotonic()
        target.send("exit 0")
        assert target.process.wait(10) == 0
        assert time.monotonic() - begin < 1.5


# So many pages that the header and the ring have, and some for facts.
_RING_PAGES = 1 + 1024


def _out_of_memory(folder: Path) -> Path:
    """A library to preload: the kernel finds PAGES pages, and then no more."""
    source = folder / "memory.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <errno.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/resource.h>

        int prlimit(int pid, enum __rlimit_resource which, const struct rlimit *to,
                    struct rlimit *from)
        {
            static long pages;

            (void)pid, (void)to;
            if (pages++ < atol(getenv("PAGES")))
                return getrlimit(which, from);
            errno = EFAULT;
            return -1;
        }
        """
    )
    library = folder / "memory.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_where_memory_ends_the_rest_goes_on(standin: Path, tmp_path: Path) -> None:
    # GIVEN a machine that has three pages for facts
    limits = {"LD_PRELOAD": str(_out_of_memory(tmp_path)), "PAGES": str(_RING_PAGES + 3)}
    with Target(standin, gpu=_ALL, environment=limits) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            # WHEN a module comes that needs more
            target.obey("module 100000", "function 1 big", "launch 2 100 3 0", "sync")
            told = target.read_until(_has_times(3))
            target.read_until(lambda told: told.losses)
            # THEN its bytes are not told, and all else is
            assert told.losses == {HelperLoss.CODE_BYTES: 1}
            assert [len(target.code(code)) for code in told.codes] == [1000, 0]
    assert told.durations_ns() == {"big": 300 * BLOCK_NS}
    assert not told.damaged


def test_without_memory_for_the_ring_there_is_no_helper(standin: Path, tmp_path: Path) -> None:
    limits = {"LD_PRELOAD": str(_out_of_memory(tmp_path)), "PAGES": "500"}
    with Target(standin, gpu=_ALL, environment=limits) as target:
        target.obey(*_SETUP, "launch 0 1 10 0", "sync")
        assert target.threads() == {"program"}
        assert f"{MEMFD}alone (deleted)" not in Path(f"/proc/{target.pid}/maps").read_text()
        target.send("exit 0")
        assert target.process.wait(10) == 0


def _without_cupti(standin: Path, folder: Path) -> Path:
    for name in ("libcuda.so.1", "libaiflame-nvidia.so", "program"):
        shutil.copy(standin / name, folder)
    return folder


def test_where_it_cannot_be_used_it_sleeps_until_its_lease_ends(standin: Path) -> None:
    # GIVEN a CUPTI that is too old, and no recorder
    with Target(standin, "cupti=17", gpu=_ALL) as target:
        target.obey(*_SETUP)
        target.read_until(lambda told: told.errors)
        slept = target.switches_of_helper()
        # WHEN the time passes after which others are tried again
        time.sleep(3)
        # THEN it has not looked
        assert target.switches_of_helper() - slept < 5


def test_without_libcupti_it_says_so(standin: Path, tmp_path: Path) -> None:
    if any(Path("/usr/local/cuda/lib64").glob("libcupti.so.*")):
        pytest.skip("no CUDA runtime may be installed for this")
    with Target(_without_cupti(standin, tmp_path), gpu=_ALL) as target:
        target.obey(*_SETUP, "launch 0 1 1 0")
        with target.control():
            told = target.read_until(lambda told: told.errors)
    assert told.failed == [(HelperError.NO_LIBRARY, "libcupti")]
    assert told.tier == HelperTier.LAUNCHES


@cases(
    "older,newer,driver,chosen",
    [
        (20, 28, 12090, 28),  # the first one samples no stalls
        (26, 28, 12090, 26),  # it does
        (20, 130000, 13000, 130000),
        (20, 130000, 12090, 20),  # the second one is newer than the driver
        (20, 21, 12090, 20),
    ],
)
def test_the_oldest_sufficient_one_of_those_installed_is_chosen(
    standin: Path, tmp_path: Path, older: int, newer: int, driver: int, chosen: int
) -> None:
    if chosen < 26 and any(Path("/usr/local/cuda/lib64").glob("libcupti.so.*")):
        pytest.skip("no CUDA runtime may be installed for this")
    folder = _without_cupti(standin, tmp_path)
    for name, version in (("libcupti.so.12", older), ("libcupti.so.13", newer)):
        flag = f"-DCUPTI_VERSION={version}"
        made = build_alone(tmp_path / f"of-{version}", cupti=flag) / "libcupti.so.12"
        shutil.copy(made, folder / name)
    with Target(folder, f"driver={driver}", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            told = target.read_until(lambda told: told.hellos and told.hellos[-1].library)
    assert told.hellos[-1].library.startswith(f"CUPTI {chosen} ")


def test_a_real_cupti_that_refuses_is_told(standin: Path, tmp_path: Path) -> None:
    # GIVEN NVIDIA's own CUPTI, and a driver that is none of NVIDIA's
    real = sorted(Path("/usr/local").glob("cuda*/lib64/libcupti.so.1?"))
    if not real:
        pytest.skip("no CUDA runtime with a libcupti")
    paths = f"{tmp_path}:{real[0].parent}"
    with Target(
        _without_cupti(standin, tmp_path), gpu=_ALL, environment={"LD_LIBRARY_PATH": paths}
    ) as target:
        target.obey(*_SETUP, "launch 0 1 1 0")
        with target.control():
            told = target.read_until(lambda told: told.errors)
            target.obey("launch 0 1 10 0", "sync")
            target.send("exit 0")
            assert target.process.wait(20) == 0
    ((error, _),) = told.failed
    assert error == HelperError.CALL
    assert str(real[0].parent) in told.hellos[-1].library
    assert told.tier == HelperTier.LAUNCHES


# How it is built


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "options"),
    [
        ("thread", {"TSAN_OPTIONS": "exitcode=66"}),
        ("address,undefined", {"ASAN_OPTIONS": "detect_leaks=0:exitcode=66"}),
    ],
)
@pytest.mark.breadth
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str, options: dict[str, str]) -> None:
    folder = build_all(tmp_path, ALONE, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    with Target(folder, gpu=_ALL, environment=options) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.obey("threads 16 500", "capture 1", "launch 0 1 5 1", "end 1", "instantiate")
            target.obey("graph 1", "context 1", "launch 1 10 20 0", "module 100", "unload 1")
            target.obey("sync", "destroy 1", "use 0", "fork 3", "launch 0 10 10 0", "sync")
            target.read_until(_has_times(8035), timeout_s=60)
            control.stop()
            target.read_until(lambda told: told.tier == HelperTier.LAUNCHES)
            control.start()
            target.read_until(lambda told: told.tier == HelperTier.TIMES)
            target.obey("threads 16 100", "sync")
            target.read_until(_has_times(9635), timeout_s=60)
            target.send("exit 0")
            assert target.process.wait(60) == 0
    assert _is_sound(target.told)


def test_it_loads_where_the_c_library_is_old(standin: Path) -> None:
    # GIVEN the library, WHEN its needs are read, THEN glibc 2.17 has them (CentOS 7, manylinux2014)
    library = standin / "libaiflame-nvidia.so"
    listing = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True)
    versions = {
        tuple(int(part) for part in version.split("."))
        for version in re.findall(r"GLIBC_([0-9.]+)", listing.stdout)
    }
    assert max(versions) <= (2, 17)
    # AND what can be seen of it is what is probed, and what the driver calls
    defined = re.findall(r"g\s+DF \.text\s+\S+\s+(?:Base\s+)?(\S+)", listing.stdout)
    probed = {"aiflame_gpu_launch", "aiflame_gpu_bell", "aiflame_gpu_gone"}
    assert set(defined) == {*probed, "InitializeInjection"}


def test_signals_are_for_the_programs_own_threads(standin: Path) -> None:
    with Target(standin) as target:
        target.obey(f"load {target.helper}")

        def blocking() -> dict[str, bool]:
            found = {}
            for task in Path(f"/proc/{target.pid}/task").iterdir():
                text = (task / "status").read_text()
                blocked = int(re.findall(r"SigBlk:\s+(\S+)", text)[0], 16)
                name = (task / "comm").read_text().strip()
                found[name] = bool(blocked >> (signal.SIGPROF - 1) & 1)
            return found

        # A thread has its name a moment after it began.
        wait_until(lambda: "aiflame-nvidia" in blocking())
        assert blocking() == {"program": False, "aiflame-nvidia": True}


# A program that nvcc built


def test_a_program_of_nvcc_is_told_to_the_nanosecond(
    standin: Path, cuda_workload: Callable[..., Path]
) -> None:
    # GIVEN a program, whose launches pass handles, as those of CUDA 13 do
    flags = ("-cudart", "shared", "-arch=sm_90", "--no-compress")
    program = cuda_workload("cudatruth", *flags)
    with Target(standin, gpu=_ALL, program=program, arguments=[100]) as target:
        target.find_memory()
        with target.control():
            target.read_until(_samples)
            target.send("go")
            truth = target.truth()
            told = target.read_until(_has_times(500))
            target.read_until(_has_stalls(36000))
            (code,) = told.codes
            assert target.code(code).startswith(b"\x7fELF")
    # THEN each kernel has its time
    scale, fill, reduce = "_Z5scalePf", "_Z4fillPf", "_Z6reducePf"
    unit_ns = truth["seldom.ns"]
    assert told.durations_ns() == {scale: 6 * unit_ns, fill: truth["once.ns"], reduce: unit_ns}
    assert sum(told.durations_ns().values()) == sum(truth.values())
    # AND each launch: three of a round have one kernel, and one a graph of two
    launches = Counter(told.kernel_times["launch"].tolist())
    assert Counter(launches.values()) == {1: 300, 2: 100}
    assert _is_sound(told)
