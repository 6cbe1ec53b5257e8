# SPDX-License-Identifier: Apache-2.0
"""A virtual machine that runs one command and is gone."""

from __future__ import annotations

import contextlib
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.disks import CHECKOUT, Bootable, make_disk, read_disk

_CPUS = 2
_MEMORY_MB = 3072

# What QEMU 7.2 (Debian 12) emulates wrongly. Its cmpxchg16b spoils the flags: Linux 6.12 and newer
# crash in their allocator. With its AVX the symbol reader ends with SIGSEGV on Debian's python3.11.
_CPU_MODEL = "max,cx16=off,avx=off,avx2=off"

# Each step says when it begins and ends, and takes 40 s at most on two free cores.
_SILENCE_S = 300.0
_MONITOR = "monitor"


class GuestDied(Exception):
    """A guest ended without a status, or not in time. The message ends with its console."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a boot: the command's exit status, and the folder that it filled."""

    status: int
    output: Path


def boot(
    kernel: Bootable,
    disks: Sequence[Path],
    command: Sequence[str],
    files: Mapping[str, Path],
    folder: Path,
    *,
    timeout_s: float,
    kernel_arguments: str = "",
) -> Ended:
    """Boots a kernel and runs a command in the checkout, as root; passes on what it prints.

    Args:
        kernel: What to boot.
        disks: The bare Debian and the checkout. What a guest writes there is forgotten.
        command: Program and arguments.
        files: What the command finds in /job, by name.
        folder: Gets `console.log`, and `out` with what the command left in /job/out.
        timeout_s: How long the guest may take.
        kernel_arguments: More of the kernel's command line.

    Raises:
        GuestDied: There is no exit status.
    """
    folder.mkdir(parents=True, exist_ok=True)
    console, output = folder / "console.log", folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        job, disk = Path(name) / "job", Path(name) / "job.ext4"
        (job / "out").mkdir(parents=True)
        for inside, path in files.items():
            shutil.copy(path, job / inside)
        (job / "command").write_text(shlex.join(command) + "\n")
        (job / "checkout").write_text(str(CHECKOUT))
        make_disk(job, disk)
        arguments = _arguments(kernel, disks, disk, console, kernel_arguments)
        why = _run(arguments + _monitor_arguments(Path(name)), Path(name), timeout_s)
        if why:
            raise GuestDied(f"{why}{_last(console)}")
        read_disk(disk, "/", Path(name))
        status = Path(name) / "status"
        if not status.exists():
            raise GuestDied(f"it switched itself off{_last(console)}")
        (Path(name) / "out").rename(output)
        return Ended(int(status.read_text()), output)


def _run(arguments: Sequence[str], folder: Path, timeout_s: float) -> str:
    """Runs QEMU and passes on what the guest prints; returns why it was stopped, or nothing."""
    deadline_s = time.monotonic() + timeout_s
    # Its standard output is the guest's second serial line.
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
    ) as machine:
        assert machine.stdout is not None
        poll = select.poll()
        poll.register(machine.stdout, select.POLLIN)
        while poll.poll(1000 * min(_SILENCE_S, max(deadline_s - time.monotonic(), 0))):
            said = machine.stdout.read(4096)
            if not said:
                return "" if machine.wait() == 0 else f"QEMU ended with {machine.returncode}"
            sys.stdout.write(said.decode(errors="replace"))
            sys.stdout.flush()
        is_late = time.monotonic() >= deadline_s
        state = _processors(folder)
        machine.kill()
    why = f"not done after {timeout_s:.0f} s" if is_late else f"silent for {_SILENCE_S:.0f} s"
    return f"{why}; its processors, twice:{state}"


def _monitor_arguments(folder: Path) -> list[str]:
    return ["-monitor", f"unix:{folder / _MONITOR},server=on,wait=off"]


def _processors(folder: Path) -> str:
    """Returns where a guest's processors are, twice: whether it is stuck, idle or busy."""
    found = []
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.settimeout(2.0)
        try:
            monitor.connect(str(folder / _MONITOR))
            for _ in range(2):
                monitor.sendall(b"info registers -a\n")
                said = b""
                with contextlib.suppress(TimeoutError):
                    while part := monitor.recv(65536):
                        said += part
                found += re.findall(r"RIP=\S+ RFL=\S+|HLT=\d", said.decode(errors="replace"))
        except OSError as error:
            found.append(f"QEMU does not answer either ({error})")
    return "".join(f"\n  {line}" for line in found)


def _last(console: Path) -> str:
    """Returns the end of a console's log, for a message."""
    lines = console.read_text(errors="replace").splitlines()[-20:] if console.exists() else []
    return "".join(f"\n  {line}" for line in lines)


def _arguments(
    kernel: Bootable, disks: Sequence[Path], job: Path, console: Path, kernel_arguments: str
) -> list[str]:
    drives = [f"file={disk},format=raw,if=virtio,snapshot=on" for disk in disks]
    drives.append(f"file={job},format=raw,if=virtio,cache=unsafe")
    return [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi", "-cpu", _CPU_MODEL),
        *("-smp", str(_CPUS), "-m", str(_MEMORY_MB)),
        *("-nodefaults", "-display", "none", "-nic", "none", "-no-reboot"),
        *("-kernel", str(kernel.image), "-initrd", str(kernel.initramfs)),
        *("-append", f"console=ttyS0 loglevel=4 panic=-1 {kernel_arguments}"),
        *(word for drive in drives for word in ("-drive", drive)),
        *("-serial", f"file:{console}", "-serial", "stdio"),
    ]
