# SPDX-License-Identifier: Apache-2.0
"""What an NVIDIA device does with aiflame: one table, and one JSON file.

Started by nvidia.sh, on a machine with the device, or with --standin FOLDER on one without, which
shows that this program works and nothing of a device. Each answer is one question of
NVIDIA's that no documentation answers (how it behaves when we come late, what it costs, ...), and
is given within a bounded time; what fails is an answer, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
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

_HERE = Path(__file__).parent
_LIBRARY = NvidiaFamily.helper.path if NvidiaFamily.helper is not None else Path()
# gpu/PROTOCOL.md
_MEMORY = "/memfd:aiflame-nvidia"
_CONTROL_FD, _CONTROL_FD_AT = struct.Struct("<i"), 48
_CONTROL = struct.Struct("<8I")
_MAGIC, _START, _STOP = 0x63666961, 1, 2

# Of one program: until its first step, which compiles and allocates.
_BEGINNING_S = 90.0
_RECORD_S = 6
# Of steps with and without: pairs, and how long each half of a pair is.
_PAIRS, _HALF_S = 4, 3.0
_SWITCHES = 1000


@dataclass(frozen=True)
class Answer:
    """What came of one question.

    Attributes:
        name: Of the question.
        what: It.
        words: The answer.
        values: Its figures.
        took_s: How long it took.
    """

    name: str
    what: str
    words: str
    values: dict[str, float | int | str]
    took_s: float


Values = dict[str, float | int | str]
Question = Callable[["Bench"], tuple[str, Values]]


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
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
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
            RuntimeError: It has ended, or does not get on.
        """
        had = len(self.steps())
        until_s = time.monotonic() + timeout_s
        while len(self.steps()) < had + count:
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


class StandinProgram(Program):
    """The stand-in's program, which is driven from here."""

    _BEGIN = ("init", "context 0", "module 4096", "function 0 _Z4gemmPf", "function 0 _Z4gelufi")
    _LAUNCHES = 40

    def __init__(self, folder: Path, steps: Path) -> None:
        super().__init__([str(folder / "program")], steps, {"LD_LIBRARY_PATH": str(folder)})
        self._answers = steps.with_suffix(".said")
        threading.Thread(target=self._drive, daemon=True).start()

    def _drive(self) -> None:
        count = steps = 0
        asked = [*self._BEGIN]
        with contextlib.suppress(OSError, ValueError), self._steps.open("a", buffering=1) as file:
            while True:
                begun_ns = time.monotonic_ns()
                asked += [f"launch 0 64 {self._LAUNCHES} 0", "sync"]
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


class Bench:
    """What questions are asked with.

    Args:
        out: Where captures, pages and answers go.
        standin: The stand-in's folder; None for a real device.
    """

    def __init__(self, out: Path, standin: Path | None) -> None:
        self.out = out
        self._standin = standin
        self._number = 0

    @contextlib.contextmanager
    def program(self, mode: str) -> Iterator[Program]:
        """Runs a workload (workload.py), from its first steps on."""
        self._number += 1
        steps = self.out / f"steps-{self._number}-{mode}"
        if self._standin is not None:
            program: Program = StandinProgram(self._standin, steps)
        else:
            command = [sys.executable, str(_HERE / "workload.py"), mode, str(steps)]
            program = Program(command, steps, {})
        try:
            program.wait_for_steps(5)
            yield program
        finally:
            program.end()

    def record(self, name: str, *words: object) -> Recorded:
        """Records; the capture and its page are kept.

        Raises:
            RuntimeError: It failed.
        """
        capture = self.out / f"{name}.aiflame"
        arguments = [*map(str, words), "--force", "-o", str(capture)]
        done = subprocess.run(
            [*self.recorder, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=self.recorder_environment,
        )
        if done.returncode:
            raise RuntimeError(f"record: {done.stderr.strip()[-600:]}")
        return Recorded(read_capture(capture), done.stderr, capture)

    @property
    def recorder_environment(self) -> dict[str, str]:
        """In which NVML is found, that of the stand-in where there is one."""
        if self._standin is None:
            return {**os.environ}
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self._standin),
            "NVML_STANDIN": "curve=40",
        }

    @property
    def recorder(self) -> list[str]:
        """The command of `record`."""
        if self._standin is not None:
            return [sys.executable, str(_HERE.parent / "nvidia_family.py")]
        return [sys.executable, "-m", "aiflame.agent.cli", "record"]


@contextlib.contextmanager
def _control(pid: int) -> Iterator[int]:
    """Opens the control pipe of the helper in a process, which must have one."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    area = next(line.split()[0] for line in maps if _MEMORY in line)
    memory = os.open(f"/proc/{pid}/map_files/{area}", os.O_RDONLY)
    try:
        (number,) = _CONTROL_FD.unpack(os.pread(memory, _CONTROL_FD.size, _CONTROL_FD_AT))
    finally:
        os.close(memory)
    pipe = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        yield pipe
    finally:
        os.close(pipe)


def _tell(pipe: int, verb: int, tier: int = 2, duty_permille: int = 1000) -> None:
    message = _CONTROL.pack(_MAGIC, 1, verb, tier, duty_permille, 0, 500, 0)
    os.set_blocking(pipe, True)  # it may be behind
    os.write(pipe, message)


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


def machine(bench: Bench) -> tuple[str, Values]:
    """What is here?"""
    here = look()
    words = f"Linux {platform.release()}, driver {here.driver or 'none'}"
    devices = ", ".join(gpu.model for gpu in here.gpus) or "no device"
    limits = "; ".join(limit.why for limit in here.limits)
    return f"{words}; {devices}; {limits or 'no limits'}", {"driver": here.driver}


def late(bench: Bench) -> tuple[str, Values]:
    """Are samples and times had of a process that is under way? (5.4, 1 and 4)"""
    with bench.program("train") as program:
        found = bench.record("late", "-p", program.pid, "--gpu", "nvidia", "-d", 2 * _RECORD_S)
        program.wait_for_steps(5)
    gpu = found.profile.gpu
    samples = int(gpu.samples["count"].sum())
    values: Values = {
        "times": int(gpu.times["count"].sum()),
        "kernels": len({int(row) for row in gpu.times["kernel"]}),
        "exact": round(_exact(found.profile), 4),
        "samples": samples,
        "unattributed": int((gpu.times["stack"] == NONE).sum()),
    }
    device = "; ".join(f"{one.name}: tier {int(one.tier)} {one.limit}" for one in gpu.devices)
    loaded = found.line("loaded ") or found.line("helper")
    return f"{loaded}; {device}; the program goes on", values


def command(bench: Bench) -> tuple[str, Values]:
    """And of one that record starts?"""
    if bench.recorder[-1] != "record":
        return "not with the stand-in: tests/bpf/test_nvidia_loading.py does that", {}
    steps = bench.out / "steps-command"
    words = [sys.executable, _HERE / "workload.py", "graphs", steps]
    found = bench.record("command", "--gpu", "nvidia", "-d", 30, "--", *words)
    gpu = found.profile.gpu
    values: Values = {
        "times": int(gpu.times["count"].sum()),
        "exact": round(_exact(found.profile), 4),
        "samples": int(gpu.samples["count"].sum()),
    }
    return "; ".join(one.limit or "no limit" for one in gpu.devices), values


def _slowdown(
    program: Program, switch: Callable[[bool], None], pairs: int = _PAIRS
) -> tuple[float, float]:
    """Returns by what part steps take longer with something on, and how far pairs differ."""
    ratios = []
    for _ in range(pairs):
        medians = []
        for is_on in (False, True):
            switch(is_on)
            time.sleep(0.5)
            begun_ns = time.monotonic_ns()
            time.sleep(_HALF_S)
            medians.append(program.median_ns(begun_ns, time.monotonic_ns()))
        switch(False)
        ratios.append(medians[1] / medians[0] - 1)
    return statistics.median(ratios), max(ratios) - min(ratios)


def overhead(bench: Bench) -> tuple[str, Values]:
    """What does the helper cost a step? (5.4, 2)"""
    values: Values = {}
    for mode in ("train", "graphs", "launches"):
        with bench.program(mode) as program:
            _load(program.pid)
            for name, tier, duty in (("times", 1, 1000), ("stalls", 2, 1000), ("tenth", 2, 100)):
                with contextlib.ExitStack() as opened:

                    def switch(
                        is_on: bool,
                        pid: int = program.pid,
                        tier: int = tier,
                        duty: int = duty,
                        opened: contextlib.ExitStack = opened,
                    ) -> None:
                        opened.close()  # whoever has the pipe open keeps it on
                        if is_on:
                            _tell(opened.enter_context(_control(pid)), _START, tier, duty)

                    more, spread = _slowdown(program, switch, 2)
                values[f"{mode}_{name}"] = round(100 * more, 2)
                values[f"{mode}_{name}_spread"] = round(100 * spread, 2)
    return "per cent of a step's time", values


def recording(bench: Bench) -> tuple[str, Values]:
    """What does a whole recording cost launches? (5.4, 10)"""
    values: Values = {}
    with bench.program("launches") as program:
        target = ["--force", "-p", str(program.pid), "--gpu", "nvidia"]
        for name, words in (("launches", ["--no-inject"]), ("stalls", [])):
            begun_ns = time.monotonic_ns()
            time.sleep(_HALF_S)
            before = program.median_ns(begun_ns, time.monotonic_ns())
            process = subprocess.Popen(
                [*bench.recorder, *target, *words, "-o", str(bench.out / f"cost-{name}.aiflame")],
                stderr=subprocess.DEVNULL,
            )
            time.sleep(5)  # it is attached, and the helper loaded
            begun_ns = time.monotonic_ns()
            time.sleep(_HALF_S)
            during = program.median_ns(begun_ns, time.monotonic_ns())
            process.send_signal(signal.SIGINT)
            process.wait()
            values[f"{name}_percent"] = round(100 * (during / before - 1), 2)
    return "per cent of the time of steps that do nothing but launch", values


def both_apis(bench: Bench) -> tuple[str, Values]:
    """Is a launch through the runtime seen as one of the driver? (5.4, 3)"""
    with bench.program("launches") as program:
        words = ("-p", program.pid, "--gpu", "nvidia", "--no-inject", "-d", _RECORD_S)
        found = bench.record("launches", *words)
        steps = program.steps()
    gpu = found.profile.gpu
    by_function: Values = {}
    for row in gpu.calls:
        name = gpu.functions[row["function"]].name
        by_function[name] = int(by_function.get(name, 0)) + int(row["count"])
    rate = (steps[-1][2] - steps[0][2]) / ((steps[-1][0] - steps[0][0]) / 1e9)
    return f"{rate:,.0f} launches a second by the program's own count", by_function


def capturing(bench: Bench) -> tuple[str, Values]:
    """Do captures of graphs survive that sampling begins and ends? (5.4, 6)"""
    with bench.program("captures") as program:
        _load(program.pid)
        for _ in range(20):
            with _control(program.pid) as pipe:
                _tell(pipe, _START)
                time.sleep(0.2)
        program.wait_for_steps(5)
        return "they do", {"steps": len(program.steps())}


def load(bench: Bench) -> tuple[str, Values]:
    """Does NVML tell how busy the device is, as kernel times do, and what does asking take?"""
    with bench.program("train") as program:
        found = bench.record("load", "-p", program.pid, "--gpu", "nvidia", "-d", 2 * _RECORD_S)
    gpu = found.profile.gpu
    rows = gpu.readings[gpu.readings["busy_permille"] != BUSY_UNKNOWN]
    # The helper comes late; kernels of a training step do not overlap.
    rows = rows[rows["begin_ns"] >= _RECORD_S * 1_000_000_000]
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


def second(bench: Bench) -> tuple[str, Values]:
    """What if PyTorch's profiler has CUPTI? (5.4, 7)"""
    with bench.program("profiled") as program:
        found = bench.record("second", "-p", program.pid, "--gpu", "nvidia", "-d", _RECORD_S)
        program.wait_for_steps(5)
    gpu = found.profile.gpu
    limit = "; ".join(one.limit for one in gpu.devices)
    return f"{limit or 'nothing is in the way'}; the program goes on", {
        "times": int(gpu.times["count"].sum()),
        "samples": int(gpu.samples["count"].sum()),
    }


def switching(bench: Bench) -> tuple[str, Values]:
    """On and off a thousand times? (5.4, 8)"""
    with bench.program("train") as program:
        _load(program.pid)
        begun_ns = time.monotonic_ns()
        time.sleep(_HALF_S)
        before = program.median_ns(begun_ns, time.monotonic_ns())
        rss_before = _rss_kb(program.pid)
        for _ in range(_SWITCHES):
            with _control(program.pid) as pipe:
                _tell(pipe, _START)
            time.sleep(0.02)
        program.wait_for_steps(5)
        begun_ns = time.monotonic_ns()
        time.sleep(_HALF_S)
        after = program.median_ns(begun_ns, time.monotonic_ns())
        grown = _rss_kb(program.pid) - rss_before
    return "it goes on", {"slower": round(100 * (after / before - 1), 2), "grown_kb": grown}


def _rss_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) if found is not None else 0


_QUESTIONS: tuple[Question, ...] = (
    *(machine, late, command, both_apis, overhead, recording, load, capturing, second, switching),
)
# What there is no answer for yet.
_OPEN = (
    "split: the error of sharing samples (5.4, 5): record --gpu-calibrate tells it; not asked here",
    "instances: MIG, MPS, Blackwell (5.4, 9): not on this machine",
)


def _answer(question: Question, bench: Bench) -> Answer:
    begun_s = time.monotonic()
    try:
        words, values = question(bench)
    except Exception as error:
        words, values = f"FAILED: {type(error).__name__}: {error}", {}
    what = (question.__doc__ or "").strip()
    name = getattr(question, "__name__", "")
    return Answer(name, what, words, values, round(time.monotonic() - begun_s, 1))


def _table(answers: Sequence[Answer]) -> Iterator[str]:
    for one in answers:
        yield f"{one.name} ({one.took_s} s): {one.what}"
        yield f"    {one.words}"
        for name, value in one.values.items():
            yield f"    {name:32} {value}"


def main() -> None:
    """Asks all, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--standin", type=Path)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    bench = Bench(args.out.absolute(), args.standin and args.standin.absolute())
    answers: list[Answer] = []
    for question in _QUESTIONS:
        if args.names and getattr(question, "__name__", "") not in args.names:
            continue
        answers.append(_answer(question, bench))
        # After each: a machine may be gone before the last.
        (args.out / "answers.json").write_text(json.dumps([asdict(one) for one in answers]))
        (args.out / "answers.txt").write_text("\n".join([*_table(answers), *_OPEN]) + "\n")
        sys.stdout.write("\n".join(_table(answers[-1:])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
