# SPDX-License-Identifier: Apache-2.0
"""Boots stock kernels in virtual machines and records in each: `make kernels`.

For each kernel of `catalogue` (or those that are named) it fetches the distribution's package,
boots it under QEMU's emulation with this checkout, lets `guest` record known programs, and has
`checks` compare the captures with what these measured. Packages and disks stay in build/kernels.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Also when started as a program, the parts are `kernels.NAME`, as for the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.archive import ArchiveError
from kernels.catalogue import GUEST_SUITE, KERNELS
from kernels.checks import Verdict, judge
from kernels.disks import CHECKOUT, make_checkout_disk, prepare_base, prepare_kernel
from kernels.machine import GuestDied, boot

_CACHE = CHECKOUT / "build/kernels"
_HERE = Path(__file__).parent
_WORKLOADS = _HERE.parent / "workloads"

# Its kernel.perf_event_paranoid has a level more than Linux has.
_OF_ENVIRONMENTS = "6.8"

# That of the guests' own distribution, for systemd as its users have it.
_OF_SYSTEMD = "6.1"

# Four times what a kernel takes on two free cores.
_TIMEOUT_S = 16 * 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table of results."""

    release: str
    label: str
    verdict: Verdict
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """Its cells, under `_COLUMNS`."""
        v = self.verdict
        loads = f"{v.programs} programs" if v.programs else "**no**"
        complete = f"{100 * v.complete:.2f} %" if v.programs else "-"
        instructions = f"{v.instructions:,}" if v.instructions else "-"
        launches = f"{v.launches:,}" if v.launches else "not recorded" if v.programs else "-"
        lost = ", ".join(f"{name} {count:,}" for name, count in sorted(v.losses.items()))
        return (
            f"{self.release} ({self.label})",
            v.bcc or "none",
            loads,
            complete,
            launches,
            lost or "0",
            instructions,
            f"{self.seconds:.0f}",
        )


_COLUMNS = (
    "kernel",
    "BCC",
    "loads",
    "complete",
    "launches",
    "lost",
    "verifier instructions",
    "seconds",
)


def markdown(rows: list[Row]) -> str:
    """Returns the table of results."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def build_programs(folder: Path) -> dict[str, Path]:
    """Compiles what guests record: they have no compiler. Returns the programs by name."""
    folder.mkdir(exist_ok=True)
    flags = ["-O2", "-g", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread"]
    sources = {"load": _HERE / "load.c", "opencl": _WORKLOADS / "opencl.c"}
    for name, source in sources.items():
        libraries = ["-lOpenCL"] if name == "opencl" else []
        command = ["gcc", *flags, "-o", folder / name, source, *libraries]
        subprocess.run(command, check=True)
    programs = {name: folder / name for name in sources}
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if Path(nvcc).exists():
        programs["cuda"] = folder / "cuda"
        source = _WORKLOADS / "cudalaunches.cu"
        command = [nvcc, "-O2", "-g", "-cudart", "static", "-o", programs["cuda"], source]
        subprocess.run(command, check=True)
    else:
        print("no nvcc here: launches of the CUDA runtime are left out")
    return programs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kernels", nargs="*", metavar="KERNEL", help=f"of {', '.join(KERNELS)} (default: all)"
    )
    parser.add_argument(
        "--with-bcc", action="store_true", help="compile the kernel programs in the guests"
    )
    parser.add_argument(
        "--environments",
        action="store_true",
        help="record in one kernel, but on machines on which something is missing",
    )
    parser.add_argument(
        "--systemd",
        action="store_true",
        help="have systemd run the agent as a service, in one kernel",
    )
    parser.add_argument(
        "--tries",
        type=int,
        default=1,
        metavar="N",
        help="boot a kernel again that is not as it should be: other work on the host spoils a run",
    )
    args = parser.parse_args()
    if args.systemd and (args.environments or args.kernels):
        parser.error(f"--systemd boots {_OF_SYSTEMD}, and nothing else")
    unknown = set(args.kernels) - set(KERNELS)
    if unknown:
        parser.error(
            f"no such kernel: {', '.join(sorted(unknown))}; there are {', '.join(KERNELS)}"
        )
    return args


def _is_release(suite: str) -> bool:
    return f"VERSION_CODENAME={suite}\n" in Path("/etc/os-release").read_text()


def main() -> int:
    """Runs the kernels in turn; returns 1 if one is not as it should be."""
    args = _arguments()
    if not _is_release(GUEST_SUITE):
        sys.exit(f"kernels: guests use this host's .venv, so it has to be Debian's {GUEST_SUITE}")
    _CACHE.mkdir(parents=True, exist_ok=True)
    try:
        base = prepare_base(_CACHE)
        programs = build_programs(_CACHE / "programs")
        with tempfile.TemporaryDirectory(dir=_CACHE) as name:
            checkout = Path(name) / "checkout.ext4"
            make_checkout_disk(checkout, not args.with_bcc)
            if args.environments:
                return _run_environments([base, checkout])
            if args.systemd:
                return _run_service([base, checkout])
            chosen = args.kernels or KERNELS
            rows = [
                _tried(args.tries, kernel, [base, checkout], programs, args.with_bcc)
                for kernel in chosen
            ]
    except GuestDied as error:
        sys.exit(f"kernels: the guest died: {error}")
    except ArchiveError as error:
        sys.exit(f"kernels: an archive was not reached, and nothing is kept of it here: {error}")
    table = markdown(rows)
    (_CACHE / "table.md").write_text(table)
    print(f"\n{table}")
    failed = [row for row in rows if row.verdict.failures]
    for row in failed:
        for failure in row.verdict.failures:
            print(f"{row.release}: {failure}", file=sys.stderr)
    return 1 if failed else 0


def _run_environments(disks: list[Path]) -> int:
    """Boots the kernel whose distribution has a level of its own, as it is and locked down."""
    bootable = prepare_kernel(_OF_ENVIRONMENTS, KERNELS[_OF_ENVIRONMENTS], _CACHE)
    status = 0
    for arguments in ("", "lockdown=confidentiality"):
        print(f"{bootable.release} {arguments}", flush=True)
        command = [str(CHECKOUT / ".venv/bin/python"), str(_HERE / "environments.py")]
        folder = _CACHE / "runs/environments"
        ended = boot(
            bootable,
            disks,
            command,
            {},
            folder,
            timeout_s=_TIMEOUT_S,
            kernel_arguments=arguments,
        )
        status = status or ended.status
    return status


def _run_service(disks: list[Path]) -> int:
    """Boots a kernel with systemd as PID 1, and the agent as a service."""
    bootable = prepare_kernel(_OF_SYSTEMD, KERNELS[_OF_SYSTEMD], _CACHE)
    print(f"{bootable.release}, systemd", flush=True)
    ended = boot(
        bootable,
        disks,
        [str(CHECKOUT / ".venv/bin/python"), str(_HERE / "service.py")],
        {},
        _CACHE / "runs/systemd",
        timeout_s=_TIMEOUT_S,
        kernel_arguments='systemd.run="/guest-init job"',
    )
    return ended.status


def _tried(
    tries: int, name: str, disks: list[Path], programs: dict[str, Path], with_bcc: bool
) -> Row:
    """Runs a kernel until it is as it should be, or for so many times."""
    for left in reversed(range(tries)):
        row = _run(name, disks, programs, with_bcc)
        for failure in row.verdict.failures:
            print(f"  {failure}", flush=True)
        if not row.verdict.failures or not left:
            break
        print("  again:", flush=True)
    return row


def _run(name: str, disks: list[Path], programs: dict[str, Path], with_bcc: bool) -> Row:
    kernel = KERNELS[name]
    bootable = prepare_kernel(name, kernel, _CACHE)
    print(f"{bootable.release} ({kernel.label})", flush=True)
    folder = _CACHE / "runs" / name
    started_s = time.monotonic()
    command = [str(CHECKOUT / ".venv/bin/python"), str(_HERE / "guest.py"), "/job", "/job/out"]
    command += ["--with-bcc"] if with_bcc else []
    try:
        ended = boot(bootable, disks, command, programs, folder, timeout_s=_TIMEOUT_S)
        verdict = judge(ended.output, "cuda" in programs)
        verdict.expect(ended.status == 0, f"the guest's script ended with {ended.status}")
    except GuestDied as error:
        verdict = Verdict([f"the guest died: {error}"])
    return Row(bootable.release, kernel.label, verdict, time.monotonic() - started_s)


if __name__ == "__main__":
    sys.exit(main())
