# SPDX-License-Identifier: Apache-2.0
"""What an NVIDIA device does with aiflame: one table, and one JSON file.

Started by nvidia.sh, on a machine with the device, or with --standin FOLDER on one without, which
shows that this program works and nothing of a device. Each answer is one question of
NVIDIA's that no documentation answers (how it behaves when we come late, what it costs, ...). Each
is asked in a process of its own, which is ended with all that it started when its time is over;
what fails, what was ended and what was not reached are answers, too.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.gpu import BUSY_UNKNOWN, NONE
from aiflame.agent.model.profile import Profile
from aiflame.agent.processes import procfs
from aiflame.agent.reports.device_times import device_times
from aiflame.gpu.attribution import Certainty
from aiflame.gpu.nvidia.family import NvidiaFamily
from aiflame.gpu.nvidia.machine import look
from nvidia_helper import Helped, Told
from recordings import frames_of
from steps import adopt_orphans, run_step
from support import AIFLAME
from workload import ABSENT, NEEDS

_HERE = Path(__file__).parent
_CARRIED = _HERE.parents[1] / "build/device"
_LIBRARY = NvidiaFamily.helper.path if NvidiaFamily.helper is not None else Path()
# gpu/PROTOCOL.md
_MEMORY = "/memfd:aiflame-nvidia"

# Of a machine that is lent for ten minutes, less what unpacking and its own beginning take.
_BUDGET_S = 450.0
# Of one program: until its first steps, for which it compiles and allocates.
_BEGINNING_S = 90.0
# Until a recorder has loaded the helper, or uses one that is there.
_LOADING_S = 20.0
# A question that has less than that left is not begun.
_LEAST_S = 5.0


@dataclass(frozen=True)
class Pace:
    """How long things are looked at.

    Attributes:
        record_s: A recording, once the helper is there.
        part_s: Steps with something on, or off.
        rounds: How often each is had.
        switches: How often sampling goes on and off.
    """

    record_s: float
    part_s: float
    rounds: int
    switches: int


_FULL = Pace(record_s=6, part_s=1.5, rounds=2, switches=1000)
# With the stand-in, of which nothing is measured.
_BRIEF = Pace(record_s=2, part_s=0.2, rounds=1, switches=50)


class Outcome(enum.Enum):
    """What became of a question."""

    ANSWERED = "answered"
    ABSENT = "not here"
    FAILED = "FAILED"
    ENDED = "ENDED"
    NOT_REACHED = "not reached"


Values = dict[str, float | int | str]


@dataclass(frozen=True)
class Answer:
    """What came of one question.

    Attributes:
        name: Of the question.
        what: It.
        outcome: Whether there is an answer.
        words: It, or why there is none.
        values: Its figures.
        took_s: How long it took.
    """

    name: str
    what: str
    outcome: str
    words: str
    values: Values
    took_s: float


class AbsentError(Exception):
    """What a question needs is not on this machine."""


class Program:
    """A workload under way.

    Args:
        command: What runs.
        steps: Where it writes its steps.
        environment: Besides.
    """

    def __init__(self, command: Sequence[str], steps: Path, environment: dict[str, str]) -> None:
        self._steps = steps
        self._said = steps.with_suffix(".said").open("w")
        # Not what was unpacked here for the recorder: it has its own packages.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            command,
            env={**own, **environment},
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )
        self.pid = self.process.pid

    def steps(self, from_ns: int = 0, until_ns: int = 1 << 63) -> list[tuple[int, int, int]]:
        """Returns (end, duration, launches so far) of the steps that ended in a time, ns."""
        lines = self._steps.read_text().splitlines() if self._steps.exists() else []
        rows = (line.split() for line in lines)
        found = [(int(row[0]), int(row[1]), int(row[2])) for row in rows if len(row) == 3]
        return [row for row in found if from_ns <= row[0] < until_ns]

    def median_ns(self, from_ns: int, until_ns: int) -> float:
        """Returns how long steps took."""
        return statistics.median(took for _, took, _ in self.steps(from_ns, until_ns))

    def wait_for_steps(self, count: int, timeout_s: float = _BEGINNING_S) -> None:
        """Waits until it has done so many more steps.

        Raises:
            AbsentError: It needs what is not installed.
            RuntimeError: It has ended, or does not get on.
        """
        had = len(self.steps())
        until_s = time.monotonic() + timeout_s
        while len(self.steps()) < had + count:
            if self.process.poll() == ABSENT:
                raise AbsentError(self.last_words)
            if self.process.poll() is not None:
                raise RuntimeError(f"the program ended: {self.last_words}")
            if time.monotonic() > until_s:
                raise RuntimeError(f"no {count} steps in {timeout_s:.0f} s")
            time.sleep(0.05)

    @property
    def last_words(self) -> str:
        """What it printed last."""
        return self._steps.with_suffix(".said").read_text()[-500:].strip()

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()
        self._said.close()


# What of PyTorch the stand-in has a word for.
_STANDS_FOR = {"profiled": "taken", "subscribed": "taken", "subscribed_v2": "v2"}


class StandinProgram(Program):
    """The stand-in's program, which is driven from here."""

    _BEGIN = ("init", "context 0", "module 4096", "function 0 _Z4gemmPf", "function 0 _Z4gelufi")
    _LAUNCHES = 40

    def __init__(self, folder: Path, mode: str, steps: Path) -> None:
        environment = {"LD_LIBRARY_PATH": str(folder), "STANDIN": _STANDS_FOR.get(mode, "")}
        super().__init__([str(folder / "program")], steps, environment)
        self._often = ("fork 1",) if mode == "forks" else ()
        self._answers = steps.with_suffix(".said")
        threading.Thread(target=self._drive, daemon=True).start()

    def _drive(self) -> None:
        count = steps = 0
        asked = [*self._BEGIN]
        with contextlib.suppress(OSError, ValueError), self._steps.open("a", buffering=1) as file:
            while True:
                begun_ns = time.monotonic_ns()
                asked += [f"launch 0 64 {self._LAUNCHES} 0", *self._often, "sync"]
                if self.process.stdin is None:
                    return
                self.process.stdin.write("".join(f"{line}\n" for line in asked).encode())
                self.process.stdin.flush()
                steps += len(asked)
                while self._answers.read_text().count("ok") < steps:
                    time.sleep(0.001)
                asked = []
                count += self._LAUNCHES
                file.write(f"{time.monotonic_ns()} {time.monotonic_ns() - begun_ns} {count}\n")
                time.sleep(0.01)


@dataclass(frozen=True)
class Recorded:
    """A recording that is over."""

    profile: Profile
    said: str
    capture: Path

    def line(self, words: str) -> str:
        """Returns the first line of what was said that has some words."""
        return next((line for line in self.said.splitlines() if words in line), "")


# A program of nvcc's: tests/workloads/cudatruth.cu.
PLAIN = "plain"


class Bench:
    """What questions are asked with.

    Args:
        out: Where captures, pages and answers go.
        standin: The stand-in's folder; None for a real device.
    """

    def __init__(self, out: Path, standin: Path | None) -> None:
        self.out = out
        self.standin = standin
        self.pace = _FULL if standin is None else _BRIEF
        self._number = 0

    @contextlib.contextmanager
    def program(self, mode: str) -> Iterator[Program]:
        """Runs a workload (workload.py), from its first steps on."""
        self._number += 1
        steps = self.out / f"steps-{os.getpid()}-{self._number}-{mode}"
        if mode == PLAIN:
            program = self._plain(steps)
        elif self.standin is not None:
            program = StandinProgram(self.standin, mode, steps)
        else:
            program = Program(self.workload(mode, steps), steps, {})
        try:
            program.wait_for_steps(5)
            yield program
        finally:
            program.end()

    def workload(self, mode: str, steps: Path) -> list[str]:
        """Returns the command of a workload."""
        return [sys.executable, str(_HERE / "workload.py"), mode, str(steps)]

    def _plain(self, steps: Path) -> Program:
        folder = self.standin or _CARRIED
        if not (folder / PLAIN).exists():
            raise AbsentError("no nvcc was there when this was packed")
        environment = {} if self.standin is None else {"LD_LIBRARY_PATH": str(folder)}
        return Program([str(folder / PLAIN), "steps", str(steps)], steps, environment)

    def record(self, name: str, *words: object) -> Recorded:
        """Records for as long as the words say; the capture and its page are kept.

        Raises:
            RuntimeError: It failed.
        """
        recorder = Recorder(self, name, words)
        return recorder.ended()

    def record_program(
        self, program: Program, name: str, more_s: float, *words: object
    ) -> Recorded:
        """Records a program for some seconds more, once the helper is in it.

        Raises:
            RuntimeError: It failed.
        """
        recorder = Recorder(self, name, ("-p", program.pid, "--gpu", "nvidia", *words))
        recorder.wait_for_helper(program)
        time.sleep(more_s)
        recorder.process.send_signal(signal.SIGINT)
        return recorder.ended()

    @property
    def recorder_environment(self) -> dict[str, str]:
        """In which NVML is found, that of the stand-in where there is one."""
        if self.standin is None:
            return {**os.environ}
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.standin),
            "NVML_STANDIN": "curve=40",
        }

    @property
    def recorder(self) -> list[str]:
        """The command of `record`."""
        if self.standin is not None:
            return [sys.executable, str(_HERE.parent / "nvidia_family.py")]
        return [*AIFLAME, "record"]


class Recorder:
    """A `record` under way, from when it is attached.

    Args:
        bench: Where.
        name: Of its capture.
        words: Its arguments.

    Raises:
        RuntimeError: It did not begin.
    """

    def __init__(self, bench: Bench, name: str, words: Sequence[object]) -> None:
        self.capture = bench.out / f"{name}.aiflame"
        self._log = bench.out / f"{name}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*bench.recorder, *map(str, words), "--force", "-o", str(self.capture)],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=bench.recorder_environment,
            )
        self._wait(lambda: "\nattached" in f"\n{self.said}", _BEGINNING_S)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for_helper(self, program: Program) -> None:
        """Waits until the helper is on in a program, or has said why not, where it can be."""
        maps = Path(f"/proc/{program.pid}/maps")
        self._wait(lambda: _MEMORY in maps.read_text(), _LOADING_S)
        if _MEMORY not in maps.read_text():
            return
        helped = Helped(program.pid)
        try:
            self._wait(lambda: _has_begun(helped.read()), _LOADING_S)
        finally:
            helped.close()

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while not holds() and time.monotonic() < until_s and self.process.poll() is None:
            time.sleep(0.05)

    def ended(self) -> Recorded:
        """Waits for its end.

        Raises:
            AbsentError: The command that it started needs what is not installed.
            RuntimeError: It failed.
        """
        status = self.process.wait()
        if status == ABSENT:
            raise AbsentError(next(line for line in self.said.splitlines() if NEEDS in line))
        if status:
            raise RuntimeError(f"record: {self.said.strip()[-600:]}")
        return Recorded(read_capture(self.capture), self.said, self.capture)


def _has_begun(told: Told) -> bool:
    return bool(told.errors) or any(state.tier for state in told.states)


@contextlib.contextmanager
def _helped(program: Program) -> Iterator[Helped]:
    """Loads the helper into a program; gives what it tells and its control pipe."""
    said = _load(program.pid)
    helped = Helped(program.pid)
    try:
        helped.find_memory()
    except AssertionError:
        raise RuntimeError(f"no helper is in the program: {said}") from None
    try:
        yield helped
    finally:
        helped.close()


def _load(pid: int) -> str:
    """Loads the helper into a process; returns what is said of it."""
    command = [sys.executable, "-m", "aiflame.agent.injection.load_worker"]
    process = f"{pid}:{procfs.start_ticks(pid)}"
    done = subprocess.run(
        [*command, str(_LIBRARY), "", "", process], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip()[-300:]


def _exact(profile: Profile) -> float:
    """Returns the share of GPU time that is under the stack that launched it, exactly."""
    times = device_times(profile)
    whole = int(times.ns.sum())
    return float(times.ns[times.certainty == Certainty.EXACT].sum()) / whole if whole else 0.0


def _recorded(bench: Bench, mode: str) -> tuple[str, Recorded, Values]:
    """Records a workload that is under way; returns what is said, and what was seen."""
    with bench.program(mode) as program:
        found = bench.record_program(program, mode, bench.pace.record_s)
        program.wait_for_steps(5)
    gpu = found.profile.gpu
    ran_ns: Counter[str] = Counter()
    for row in gpu.times:
        ran_ns[gpu.kernels[row["kernel"]].name] += int(row["duration_ns"])
    values: Values = {
        "times": int(gpu.times["count"].sum()),
        "kernels": len(ran_ns),
        "unnamed": sum(not name for name in ran_ns),
        "exact": round(_exact(found.profile), 4),
        "samples": int(gpu.samples["count"].sum()),
        "unattributed": int((gpu.times["stack"] == NONE).sum()),
        "code_objects": len(gpu.objects),
        "codes": len(gpu.codes),
        "codes_found_by_name": sum(code.binary is not None for code in gpu.codes),
    }
    for loss in found.profile.losses:
        if loss.name.startswith("device_code"):
            values[loss.name] = loss.count
    for name, ns in ran_ns.most_common(2):
        values[f"ms of {name[:60]}"] = round(ns / 1e6, 3)
    device = "; ".join(f"{one.name}: tier {int(one.tier)} {one.limit}" for one in gpu.devices)
    loaded = found.line("loaded ") or found.line("helper")
    return f"{loaded}; {device}; the program goes on", found, values


def machine(bench: Bench) -> tuple[str, Values]:
    """What is here, as MIG, MPS, the chip? (5.4, 9)"""
    here = look()
    words = f"Linux {platform.release()}, driver {here.driver or 'none'}"
    devices = ", ".join(gpu.model for gpu in here.gpus) or "no device"
    limits = "; ".join(limit.why for limit in here.limits) or "no limits"
    notes = "; ".join(here.notes) or "neither MIG nor MPS is in use"
    return f"{words}; {devices}; {limits}; {notes}", {"driver": here.driver}


def late(bench: Bench) -> tuple[str, Values]:
    """Are samples and times had of training that is under way; in which period? (5.4, 1 and 4)"""
    words, found, values = _recorded(bench, "train")
    gpu = found.profile.gpu
    device = gpu.devices[0]
    ran_ns = int(gpu.times["duration_ns"].sum())
    if device.period_ns and ran_ns:
        # As many as the device has multiprocessors, or four times as many, if all are at work.
        samplers = int(gpu.samples["count"].sum()) * device.period_ns / ran_ns
        values["samplers_at_once"] = round(samplers, 1)
    return f"{words}; {device.details}", values


def inference(bench: Bench) -> tuple[str, Values]:
    """Inference of PyTorch, eager?"""
    words, _, values = _recorded(bench, "infer")
    return words, values


def compiled(bench: Bench) -> tuple[str, Values]:
    """Inference by torch.compile?"""
    words, _, values = _recorded(bench, "compiled")
    return words, values


def graphs(bench: Bench) -> tuple[str, Values]:
    """Inference by replays of a CUDA graph?"""
    words, _, values = _recorded(bench, "graphs")
    return words, values


def triton(bench: Bench) -> tuple[str, Values]:
    """A kernel in Triton's language?"""
    words, _, values = _recorded(bench, "triton")
    return words, values


def plain(bench: Bench) -> tuple[str, Values]:
    """A program of nvcc's, one kernel of which has three sites: has each its runs?"""
    words, found, values = _recorded(bench, PLAIN)
    runs: Counter[str] = Counter()
    for row in found.profile.gpu.times:
        names = (
            "" if row["stack"] == NONE else " ".join(frames_of(found.profile, int(row["stack"])))
        )
        sites = [site for site in ("often", "seldom", "once", "replay") if site in names]
        runs[sites[0] if sites else "unknown"] += int(row["count"])
    # One of each in a round, and of a replay two.
    return words, {**values, **{f"runs of {site}": count for site, count in runs.items()}}


def command(bench: Bench) -> tuple[str, Values]:
    """Replays of a program that record starts?"""
    if bench.standin is not None:
        raise AbsentError("the stand-in's program has to be driven: test_nvidia_loading.py does it")
    here = look()
    if not here.gpus:
        raise AbsentError(here.why)
    steps = bench.out / "steps-command"
    words = bench.workload("graphs", steps)
    found = bench.record("command", "--gpu", "nvidia", "-d", 20, "--", *words)
    gpu = found.profile.gpu
    values: Values = {
        "times": int(gpu.times["count"].sum()),
        "exact": round(_exact(found.profile), 4),
        "samples": int(gpu.samples["count"].sum()),
    }
    return "; ".join(one.limit or "no limit" for one in gpu.devices), values


@dataclass(frozen=True)
class Setting:
    """How sampling is asked for; see gpu/PROTOCOL.md."""

    tier: int = 2
    duty: int = 1000
    period: int = 0
    read_out_ms: int = 500


_SETTINGS = {
    "times": Setting(tier=1),
    "stalls": Setting(),
    "tenth": Setting(duty=100),
    "each_100_ms": Setting(read_out_ms=100),
    "each_1000_ms": Setting(read_out_ms=1000),
    "period_2^16": Setting(period=16),
    "period_2^18": Setting(period=18),
    "period_2^20": Setting(period=20),
    "period_2^22": Setting(period=22),
}


def _overhead(bench: Bench, mode: str) -> tuple[str, Values]:
    """Steps with each setting, in turns with steps without any."""
    pace = bench.pace
    off_ns: list[float] = []
    on_ns: dict[str, list[float]] = {name: [] for name in _SETTINGS}
    samples: Counter[str] = Counter()
    with bench.program(mode) as program, _helped(program) as helped:
        before_mib = _used_mib(bench)
        most_mib = before_mib
        for _ in range(pace.rounds):
            for name, setting in _SETTINGS.items():
                off_ns.append(_step_ns(program, pace))
                had = sum(_counted(helped))
                with helped.control() as control:  # whoever has the pipe open keeps it on
                    control.start(setting.tier, setting.duty, setting.period, setting.read_out_ms)
                    on_ns[name].append(_step_ns(program, pace))
                    most_mib = max(most_mib, _used_mib(bench))
                samples[name] += sum(_counted(helped)) - had
    off = statistics.median(off_ns)
    values: Values = {}
    for name, found in on_ns.items():
        values[f"{name}_percent"] = round(100 * (statistics.median(found) / off - 1), 2)
        values[f"{name}_samples"] = samples[name]
    values["spread_percent"] = round(100 * (max(off_ns) - min(off_ns)) / off, 2)
    values["step_us"] = round(off / 1000, 1)
    values["memory_mib"] = most_mib - before_mib
    return "per cent of a step's time; spread: of steps without", values


def _counted(helped: Helped) -> Iterator[int]:
    """Yields the samples of all batches so far."""
    for batch in helped.read().stalls:
        yield int(batch.stalls["count"].sum())


def _step_ns(program: Program, pace: Pace) -> float:
    """Waits until it has settled; returns how long its steps take then."""
    time.sleep(pace.part_s / 3)
    begun_ns = time.monotonic_ns()
    time.sleep(pace.part_s)
    if not program.steps(begun_ns):
        program.wait_for_steps(1)
    return program.median_ns(begun_ns, time.monotonic_ns())


def _used_mib(bench: Bench) -> int:
    """Returns how much of the first device's memory is in use."""
    words = "import pynvml as n; n.nvmlInit(); d = n.nvmlDeviceGetHandleByIndex(0);"
    words += "print(n.nvmlDeviceGetMemoryInfo(d, n.nvmlMemory_v2).used >> 20)"
    command = [sys.executable, "-c", words]
    environment = bench.recorder_environment
    return int(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)


def overhead_of_training(bench: Bench) -> tuple[str, Values]:
    """What does the helper cost a step of training, and memory of the device? (5.4, 2 and 9)"""
    return _overhead(bench, "train")


def overhead_of_graphs(bench: Bench) -> tuple[str, Values]:
    """What, steps that replay a graph? (5.4, 2)"""
    return _overhead(bench, "graphs")


def overhead_of_launches(bench: Bench) -> tuple[str, Values]:
    """What, steps that do nothing but launch? (5.4, 2)"""
    return _overhead(bench, "launches")


def recording(bench: Bench) -> tuple[str, Values]:
    """What does a whole recording cost launches? (5.4, 10)"""
    values: Values = {}
    with bench.program("launches") as program:
        target = ("-p", program.pid, "--gpu", "nvidia")
        for name, words in (("launches", ("--no-inject",)), ("stalls", ())):
            before = _step_ns(program, bench.pace)
            recorder = Recorder(bench, f"cost-{name}", [*target, *words])
            if not words:
                recorder.wait_for_helper(program)
            begun, begun_ns = len(program.steps()), time.monotonic_ns()
            during = _step_ns(program, bench.pace)
            last = program.steps()
            recorder.process.send_signal(signal.SIGINT)
            recorder.ended()
            values[f"{name}_percent"] = round(100 * (during / before - 1), 2)
            launched = last[-1][2] - last[begun - 1][2]
            values[f"{name}_per_s"] = round(launched / ((last[-1][0] - begun_ns) / 1e9))
    return "per cent of the time of steps that do nothing but launch; launches a second", values


def both_apis(bench: Bench) -> tuple[str, Values]:
    """Is a launch through the runtime seen as one of the driver? (5.4, 3)"""
    with bench.program("launches") as program:
        words = ("-p", program.pid, "--gpu", "nvidia", "--no-inject", "-d", bench.pace.record_s)
        found = bench.record("launches", *words)
        steps = program.steps()
    gpu = found.profile.gpu
    by_function: Values = {}
    for row in gpu.calls:
        name = gpu.functions[row["function"]].name
        by_function[name] = int(by_function.get(name, 0)) + int(row["count"])
    rate = (steps[-1][2] - steps[0][2]) / ((steps[-1][0] - steps[0][0]) / 1e9)
    return f"{rate:,.0f} launches a second by the program's own count", by_function


def split(bench: Bench) -> tuple[str, Values]:
    """How much of what several stacks share is with another than its own? (5.4, 5)"""
    with bench.program("train") as program:
        # A window is 0.25 s of each 10.
        more_s = 22 if bench.standin is None else bench.pace.record_s
        found = bench.record_program(program, "split", more_s, "--gpu-calibrate")
        program.wait_for_steps(5)
    command = [*AIFLAME, "stats", str(found.capture)]
    stats = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    notes = [line for line in stats.splitlines() if "Shared is an estimate" in line]
    samples = int(found.profile.gpu.samples["count"].sum())
    return notes[0] if notes else "nothing is shared", {"samples": samples}


def capturing(bench: Bench) -> tuple[str, Values]:
    """Do captures of graphs survive that sampling begins and ends? (5.4, 6)"""
    with bench.program("captures") as program, _helped(program) as helped:
        for _ in range(20):
            with helped.control() as control:
                control.start()
                time.sleep(0.2)
        program.wait_for_steps(5)
        return "they do", {"steps": len(program.steps())}


def load(bench: Bench) -> tuple[str, Values]:
    """Does NVML tell how busy the device is, as kernel times do, and what does asking take?"""
    with bench.program("train") as program:
        found = bench.record_program(program, "load", 2 * bench.pace.record_s)
    gpu = found.profile.gpu
    rows = gpu.readings[gpu.readings["busy_permille"] != BUSY_UNKNOWN]
    # The helper comes late; kernels of a training step do not overlap.
    rows = rows[rows["begin_ns"] >= int(gpu.times["end_ns"].min())]
    lasted_ns = (rows["end_ns"] - rows["begin_ns"]).astype(float)
    first_ns, last_ns = int(rows["begin_ns"].min()), int(rows["end_ns"].max())
    times = gpu.times[(gpu.times["end_ns"] >= first_ns) & (gpu.times["end_ns"] <= last_ns)]
    ran_percent = 100 * int(times["duration_ns"].sum()) / (last_ns - first_ns)
    values: Values = {
        "readings": len(gpu.readings),
        "busy_percent": round(
            float((lasted_ns * rows["busy_permille"]).sum() / lasted_ns.sum() / 10), 1
        ),
        "kernels_percent": round(ran_percent, 1),
        "memory_mib": int(rows["used_bytes"].max()) >> 20,
        "memory_all_mib": int(rows["total_bytes"].max()) >> 20,
        **_took_us(bench.recorder_environment),
    }
    details = "; ".join(device.details for device in gpu.devices)
    return f"100 %: all the time that was read; {details}", values


# Of a process of its own, as the recorder asks: the first device.
_ASK = """
import json, time, pynvml as nvml
def took_us(ask):
    times = []
    for _ in range(50):
        begun_ns = time.perf_counter_ns()
        ask()
        times.append(time.perf_counter_ns() - begun_ns)
    return sorted(times)[25] // 1000
begun_ns = time.perf_counter_ns()
nvml.nvmlInit()
found = {"init_us": (time.perf_counter_ns() - begun_ns) // 1000}
device = nvml.nvmlDeviceGetHandleByIndex(0)
found["samples_us"] = took_us(lambda: nvml.nvmlDeviceGetSamples(device, 1, 0))
found["rates_us"] = took_us(lambda: nvml.nvmlDeviceGetUtilizationRates(device))
found["memory_us"] = took_us(lambda: nvml.nvmlDeviceGetMemoryInfo(device, nvml.nvmlMemory_v2))
kind, samples = nvml.nvmlDeviceGetSamples(device, 1, 0)
found |= {"samples_kind": kind, "samples_kept": len(samples)}
apart = [b.timeStamp - a.timeStamp for a, b in zip(samples, samples[1:])]
found["samples_apart_us"] = sorted(apart)[len(apart) // 2] if apart else 0
print(json.dumps(found))
"""


def _took_us(environment: dict[str, str]) -> Values:
    """Returns what calls of NVML take, and what its samples are like."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, check=True, env=environment
    )
    values: Values = json.loads(done.stdout)
    return values


def _beside(bench: Bench, mode: str) -> tuple[str, Values]:
    with bench.program(mode) as program:
        found = bench.record_program(program, mode, bench.pace.record_s)
        program.wait_for_steps(5)
    gpu = found.profile.gpu
    limit = "; ".join(one.limit for one in gpu.devices)
    return f"{limit or 'nothing is in the way'}; the program goes on", {
        "times": int(gpu.times["count"].sum()),
        "samples": int(gpu.samples["count"].sum()),
    }


def beside_profiler(bench: Bench) -> tuple[str, Values]:
    """What if PyTorch's profiler has CUPTI? (5.4, 7)"""
    return _beside(bench, "profiled")


def beside_first(bench: Bench) -> tuple[str, Values]:
    """What if somebody has subscribed by CUPTI's first interface? (5.4, 7)"""
    return _beside(bench, "subscribed")


def beside_second(bench: Bench) -> tuple[str, Values]:
    """What, by its second, which can be shared? (5.4, 7)"""
    return _beside(bench, "subscribed_v2")


def switching(bench: Bench) -> tuple[str, Values]:
    """On and off a thousand times? It is left loaded: cuptiFinalize is never called. (5.4, 8)"""
    with bench.program("train") as program, _helped(program) as helped:
        before = _step_ns(program, bench.pace)
        rss_before = _rss_kb(program.pid)
        for _ in range(bench.pace.switches):
            with helped.control() as control:
                control.start()
            time.sleep(0.02)
        program.wait_for_steps(5)
        after = _step_ns(program, bench.pace)
        grown = _rss_kb(program.pid) - rss_before
    return "it goes on", {"slower": round(100 * (after / before - 1), 2), "grown_kb": grown}


def forking(bench: Bench) -> tuple[str, Values]:
    """What if it forks while it is sampled? (5.4, 8)"""
    words, _, values = _recorded(bench, "forks")
    return words, values


def ending(bench: Bench) -> tuple[str, Values]:
    """What if it ends in mid-sample? (5.4, 8)"""
    with bench.program("train") as program:
        recorder = Recorder(bench, "ending", ("-p", program.pid, "--gpu", "nvidia"))
        recorder.wait_for_helper(program)
        time.sleep(bench.pace.record_s)
        program.process.terminate()
        status = program.process.wait(20)
        found = recorder.ended()
    times = int(found.profile.gpu.times["count"].sum())
    return "both ended", {"status of the program": status, "times": times}


def _rss_kb(pid: int) -> int:
    (_, kilobytes, *_) = ("", *procfs.status_field(pid, "VmRSS"), "0")
    return int(kilobytes)


@dataclass(frozen=True)
class Question:
    """What is asked, and for how long at most."""

    ask: Callable[[Bench], tuple[str, Values]]
    limit_s: float

    @property
    def name(self) -> str:
        return self.ask.__name__

    @property
    def what(self) -> str:
        return (self.ask.__doc__ or "").strip()


# In the order of what is most missed, if time should run out.
_QUESTIONS = (
    Question(machine, 10),
    Question(late, 60),
    Question(overhead_of_training, 75),
    Question(graphs, 45),
    Question(plain, 60),
    Question(compiled, 90),
    Question(split, 60),
    Question(both_apis, 40),
    Question(capturing, 40),
    Question(beside_profiler, 45),
    Question(beside_first, 45),
    Question(beside_second, 45),
    Question(ending, 45),
    Question(recording, 60),
    Question(overhead_of_graphs, 75),
    Question(triton, 45),
    Question(inference, 40),
    Question(command, 50),
    Question(switching, 60),
    Question(forking, 45),
    Question(load, 50),
    Question(overhead_of_launches, 75),
)


def _asked(question: Question, bench: Bench) -> Answer:
    """Asks in this process."""
    begun_s = time.monotonic()
    try:
        words, values = question.ask(bench)
        outcome = Outcome.ANSWERED
    except AbsentError as error:
        words, values, outcome = str(error), {}, Outcome.ABSENT
    except Exception as error:
        words, values, outcome = f"{type(error).__name__}: {error}", {}, Outcome.FAILED
    took_s = round(time.monotonic() - begun_s, 1)
    return Answer(question.name, question.what, outcome.value, words, values, took_s)


def _answer(question: Question, out: Path, words: Sequence[str], limit_s: float) -> Answer:
    """Asks in a process of its own, for so long."""

    def none(outcome: Outcome, why: str) -> Answer:
        took_s = round(time.monotonic() - begun_s, 1)
        return Answer(question.name, question.what, outcome.value, why, {}, took_s)

    begun_s = time.monotonic()
    if limit_s < _LEAST_S:
        return none(Outcome.NOT_REACHED, "no time was left")
    file = out / f"{question.name}.answer"
    file.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--ask", question.name, *words]
    status, left = run_step(command, limit_s)
    more = f"; it cannot be ended: {', '.join(left)}" if left else ""
    if status is None:
        return none(Outcome.ENDED, f"it was not over in {limit_s:.0f} s{more}")
    try:
        return Answer(**json.loads(file.read_text()))
    except (OSError, ValueError):
        return none(Outcome.FAILED, f"it ended with {status}, and without an answer{more}")


_COLUMNS = "{:24} {:12} {:>6}  {}"


def _table(answers: Sequence[Answer]) -> Iterator[str]:
    yield _COLUMNS.format("question", "", "s", "answer")
    for one in answers:
        yield _COLUMNS.format(one.name, one.outcome, one.took_s, one.what)
        found = ", ".join(f"{name} {value}" for name, value in one.values.items())
        for text in (one.words, found):
            yield from textwrap.wrap(text, 100, initial_indent=" " * 45, subsequent_indent=" " * 45)


def _write(answers: Sequence[Answer], out: Path) -> None:
    (out / "answers.json").write_text(json.dumps([asdict(one) for one in answers], indent=1))
    (out / "answers.txt").write_text("\n".join(_table(answers)) + "\n")


def main() -> None:
    """Asks all, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--standin", type=Path)
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S)
    parser.add_argument("--limit-s", type=float, default=_BUDGET_S, help="of one question")
    parser.add_argument("--ask", help="this one, in this process")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.absolute()
    if args.ask:
        bench = Bench(out, args.standin and args.standin.absolute())
        question = next(one for one in _QUESTIONS if one.name == args.ask)
        answer = _asked(question, bench)
        (out / f"{question.name}.answer").write_text(json.dumps(asdict(answer)))
        return
    adopt_orphans()
    until_s = time.monotonic() + args.budget_s
    words = ["--out", str(out), *(["--standin", str(args.standin)] if args.standin else [])]
    answers: list[Answer] = []
    for question in _QUESTIONS:
        if args.names and question.name not in args.names:
            continue
        limit_s = min(question.limit_s, args.limit_s, until_s - time.monotonic())
        answers.append(_answer(question, out, words, limit_s))
        _write(answers, out)  # after each: a machine may be gone before the last
        sys.stderr.write(f"{answers[-1].name}: {answers[-1].outcome} ({answers[-1].took_s} s)\n")
    sys.stdout.write((out / "answers.txt").read_text())


if __name__ == "__main__":
    main()
