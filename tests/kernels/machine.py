# SPDX-License-Identifier: Apache-2.0
"""A virtual machine that runs one command and is gone."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.disks import CHECKOUT, Bootable, make_disk, read_disk

_CPUS = 2
_MEMORY_MB = 3072

# What QEMU 7.2 (Debian 12) emulates wrongly. Its cmpxchg16b spoils the flags: Linux 6.12 and newer
# crash in their allocator. With its AVX the symbol reader ends with SIGSEGV on Debian's python3.11.
_CPU_MODEL = "max,cx16=off,avx=off,avx2=off"


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
        try:
            # Its standard output is the guest's second serial line.
            subprocess.run(arguments, stdin=subprocess.DEVNULL, check=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise GuestDied(f"not done after {timeout_s:.0f} s{_last(console)}") from None
        read_disk(disk, "/", Path(name))
        status = Path(name) / "status"
        if not status.exists():
            raise GuestDied(f"it switched itself off{_last(console)}")
        (Path(name) / "out").rename(output)
        return Ended(int(status.read_text()), output)


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
