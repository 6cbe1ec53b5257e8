# SPDX-License-Identifier: Apache-2.0
"""What runs inside a guest: recordings of known programs. Nothing is judged here.

Everything goes into the output folder: `doctor.json`, captures, what the programs measured of
themselves, and what BPF objects the kernel had before, during and after. `checks` reads it outside.

Arguments: the folder of the compiled programs, the output folder, and `--with-bcc` to leave BCC
where it is; without it there is none, and the programs come from the bytecode in the checkout.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Also when started as a program, the tests' modules are there.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recordings import Ended, Recording, Workload, children_of
from support import AIFLAME, wait_until

_HERE = Path(__file__).parent
_BCC = "/usr/lib/python3/dist-packages/bcc"
_CGROUP = Path("/sys/fs/cgroup/load")
# Enough samples of two seconds for a share within five points; emulated, each takes 0.2 ms.
_HZ = 499
# Emulation is ten to thirty times as slow as the machine that it runs on, which may be busy.
_PATIENCE_S = 300.0
# A recorder that does nothing but drain its maps takes 0.2 to 0.4 s of a second for it, emulated,
# and under -a up to one: what it reads of new programs is read in its first four to ten.
_QUIET_CPU_S, _LEAST_QUIET_S, _MOST_SETTLING_S = 0.5, 3, 30
_CUDA_ROUNDS = 200
_OPENCL_MS = 1500

# include/uapi/linux/bpf.h: commands, and two fields of struct bpf_prog_info.
_NEXT_IDS = {"programs": 11, "maps": 12, "links": 31}
_PROG_GET_FD_BY_ID, _OBJ_GET_INFO_BY_FD = 13, 15
_INFO_BYTES, _NAME_AT, _VERIFIED_AT = 232, 64, 216
_SYS_BPF = 321


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Calls bpf(); returns what it returned, and the attributes as the kernel left them."""
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_SYS_BPF, command, buffer, len(attributes))), buffer.raw


def _ids(command: int) -> list[int]:
    found: list[int] = []
    while True:
        code, attributes = _bpf(command, struct.pack("<III", found[-1] if found else 0, 0, 0))
        if code != 0:
            return found
        found.append(struct.unpack_from("<I", attributes, 4)[0])


def kernel_objects() -> dict[str, Any]:
    """Returns the ids of all BPF objects, and all probes that go by tracefs."""
    probes = Path("/sys/kernel/tracing/uprobe_events").read_text().splitlines()
    return {**{name: _ids(command) for name, command in _NEXT_IDS.items()}, "uprobes": probes}


def verified_instructions() -> dict[str, int]:
    """Returns how many instructions the verifier went through, by program; 0 before v5.16."""
    found = {}
    for program in _ids(_NEXT_IDS["programs"]):
        fd, _ = _bpf(_PROG_GET_FD_BY_ID, struct.pack("<III", program, 0, 0))
        if fd < 0:
            continue  # unloaded since it was listed
        info = ctypes.create_string_buffer(_INFO_BYTES)
        _bpf(_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
        os.close(fd)
        name = info.raw[_NAME_AT : _NAME_AT + 16].split(b"\0")[0].decode()
        found[name] = struct.unpack_from("<I", info.raw, _VERIFIED_AT)[0]
    return found


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process (Documentation/filesystems/proc.rst, stat)."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _reading_s(recorder: int) -> float:
    """Returns the CPU seconds of a recorder, and of those who open and read files for it."""
    total_s = _cpu_s(recorder)
    children = children_of(recorder)
    forks = [fork for child in children for fork in children_of(child)]
    for child in (*children, *forks):
        with contextlib.suppress(OSError):  # it has ended
            if b".inspector." in Path(f"/proc/{child}/cmdline").read_bytes():
                total_s += _cpu_s(child)
    return total_s


def _settle(recorder: int) -> None:
    """Waits until a recorder has read what it wants to know of processes that it has just seen."""
    quiet_s = 0
    for _ in range(_MOST_SETTLING_S):
        before_s = _reading_s(recorder)
        time.sleep(1)
        # Whoever reads may have waited for a slow disk.
        quiet_s = quiet_s + 1 if _reading_s(recorder) - before_s < _QUIET_CPU_S else 0
        if quiet_s == _LEAST_QUIET_S:
            return


def _of_pids(loads: Iterable[Workload]) -> tuple[str, str, str]:
    """The arguments to record programs by."""
    return "-p", ",".join(str(load.pid) for load in loads), "-s"


class Guest:
    """The steps, each of which leaves its files in the output folder."""

    def __init__(self, programs: Path, output: Path) -> None:
        self._programs, self._output = programs, output
        self._before = kernel_objects()
        self._facts: dict[str, Any] = {
            "before": self._before,
            "seconds": {},
            "truth": {},
            "failures": [],
        }

    def save(self) -> None:
        """Writes the facts; after each step, so that a guest that dies leaves the others."""
        (self._output / "facts.json").write_text(json.dumps(self._facts, indent=1))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Says what goes on, and how long it took. A failure is noted, and the next step comes."""
        started_s = time.monotonic()
        print(f"  {name} ...", end="", flush=True)
        try:
            yield
        except Exception as error:
            self._facts["failures"].append(f"{name}: {type(error).__name__}: {error}")
        seconds = time.monotonic() - started_s
        self._facts["seconds"][name] = seconds
        print(f" {seconds:.0f} s", flush=True)
        self.save()

    def doctor(self) -> None:
        """`aiflame doctor`, with all that it has to say."""
        done = subprocess.run([*AIFLAME, "doctor", "--json"], stdout=subprocess.PIPE, check=False)
        (self._output / "doctor.json").write_bytes(done.stdout)

    def loads(self, inside: Callable[[], object] | None = None) -> dict[str, Workload]:
        """Starts the programs that are recorded; they wait until they are told to go."""
        load, script = self._programs / "load", _HERE / "load.py"
        return {
            "c": Workload([load, "work"], preexec_fn=inside),
            "python": Workload([sys.executable, script], preexec_fn=inside),
            "children": Workload([load, "children"], preexec_fn=inside),
        }

    def record(self, name: str, loads: dict[str, Workload], *arguments: object) -> None:
        """Records programs from before they begin until all are done."""
        with contextlib.ExitStack() as stack:
            for load in loads.values():
                stack.enter_context(load)
            recording = stack.enter_context(self._recording(name, *arguments))
            self._facts.setdefault("instructions", verified_instructions())
            for load in loads.values():
                load.go()
            _settle(recording.pid)
            # One after the other, so that the recorder of an emulated machine gets a processor too.
            truth = {}
            for which, load in loads.items():
                load.go()
                truth[which] = {"pid": load.pid, **load.truth()}
            self._keep(name, recording.stop(), truth)

    def _recording(self, name: str, *arguments: object) -> Recording:
        # Without a page, which is no kernel's concern.
        output = ("-o", f"{name}.aiflame", "-f", "aiflame", "-F", _HZ)
        return Recording(self._output, *output, *arguments, patience_s=_PATIENCE_S)

    def _keep(self, name: str, ended: Ended, truth: dict[str, Any]) -> None:
        self._facts["truth"][name] = truth
        (self._output / f"{name}.txt").write_text(ended.stderr)
        if ended.returncode != 0:
            raise RuntimeError(f"record ended with {ended.returncode}: {ended.stderr}")

    def warm(self) -> None:
        """Has tables made, without which stacks are cut until they are there."""
        with contextlib.ExitStack() as stack:
            loads = [stack.enter_context(load) for load in self.loads().values()]
            recording = stack.enter_context(self._recording("warm", *_of_pids(loads)))
            for load in loads:
                load.go()
            _settle(recording.pid)
            recording.stop()
            for load in loads:
                load.process.kill()

    def record_pids(self, name: str) -> None:
        """Under -p, with the children of each."""
        loads = self.loads()
        self.record(name, loads, *_of_pids(loads.values()))

    def record_cgroup(self, name: str) -> None:
        """Under --cgroup, with launches through the OpenCL loader; PoCL runs them on the CPU."""
        _CGROUP.mkdir()
        procs = _CGROUP / "cgroup.procs"

        def inside() -> None:
            procs.write_text(str(os.getpid()))

        opencl = Workload([self._programs / "opencl", _OPENCL_MS], preexec_fn=inside)
        loads = {**self.loads(inside), "opencl": opencl}
        self.record(name, loads, "--cgroup", _CGROUP)

    def record_all(self, name: str) -> None:
        """Under -a."""
        self.record(name, self.loads(), "-a")

    def record_cuda(self, name: str) -> None:
        """Launches through the CUDA runtime, which all fail for want of a driver."""
        command = (self._programs / "cuda", _CUDA_ROUNDS)
        with self._recording(name, "--", *command) as recording:
            self._keep(name, recording.wait(), {"rounds": _CUDA_ROUNDS})

    def leave(self) -> None:
        """Waits until the kernel has put everything away, and notes what it has not."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: kernel_objects() == self._before, 30.0)
        self._facts["after"] = kernel_objects()


def main() -> None:
    """Runs the steps in order."""
    programs, output = map(Path, sys.argv[1:3])
    if "--with-bcc" not in sys.argv[3:]:
        shutil.rmtree(_BCC)
    guest = Guest(programs, output)
    with guest.step("doctor"):
        guest.doctor()
    with guest.step("warm"):
        guest.warm()
    with guest.step("pid"):
        guest.record_pids("pid")
    with guest.step("cgroup"):
        guest.record_cgroup("cgroup")
    with guest.step("all"):
        guest.record_all("all")
    if (programs / "cuda").exists():
        with guest.step("cuda"):
            guest.record_cuda("cuda")
    with guest.step("leave"):
        guest.leave()


if __name__ == "__main__":
    main()
