# SPDX-License-Identifier: Apache-2.0
"""What a machine must have before anything is started; `doctor` runs the same."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

from aiflame.agent import kernelfs, rights
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import abi, descriptors, sysbpf
from aiflame.agent.kernel.arch import this_architecture
from aiflame.agent.kernel.btf import VMLINUX
from aiflame.agent.kernel.loader import BCC_HINT, explain_failure, locked_down
from aiflame.agent.kernel.probes import CLOCK_CURE, online_cpus

# PROC_PID_INIT_INO (include/linux/proc_ns.h): the initial pid namespace has this inode.
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC

# From this value on addresses are hidden from root, too (Documentation/admin-guide/sysctl/kernel).
_HIDDEN_FROM_ALL = 2

# On securityfs, which containers mostly do not mount: there loading says so (loader.py).
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
# Value of the Seccomp line of /proc/PID/status (include/uapi/linux/seccomp.h).
_SECCOMP_FILTER = "2"
# What filters answer for a system call that they refuse.
_REFUSALS = frozenset({errno.EPERM, errno.ENOSYS})
# -1 as the u32 of union bpf_attr: never open.
_NO_FD = 0xFFFF_FFFF

# A recording of two CPUs maps 830 to 950 MB: each of ten threads has 8 MB of stack and 64 MB of
# glibc's malloc; libraries; maps of the kernel half. On a busy host 1,000 MB did not do. Where less
# is allowed, CPython may wait for ever for a thread that finds no room to begin (v3.11.2,
# Lib/threading.py, Thread.start: two of 160 recordings within 200 MB did).
_ADDRESS_SPACE_BYTES = 1_200_000_000

# bcc is imported in a child, as a recording does. It takes 0.2 s; a loaded host may crawl.
_IMPORT_TIMEOUT_S = 60
_IMPORT_BCC = """\
from aiflame.agent.kernel.compile import import_bcc
bcc = import_bcc()
print(getattr(bcc, "__version__", "of unknown version"), "in", bcc.__path__[0])
"""


def _own_status(field: str) -> str:
    text = kernelfs.read_text("/proc/self/status")
    found = re.search(rf"^{field}:\s*(\S+)", text, re.M)
    return found[1] if found else ""


def require_linux() -> None:
    """Refuses to go on elsewhere.

    Raises:
        EnvironmentUnfit: This is another system.
    """
    if platform.system() != "Linux":
        raise EnvironmentUnfit(f"recording needs Linux, and this is {platform.system()}")


def is_host_pid_namespace() -> bool:
    """Whether pids here are those that the kernel half speaks of."""
    return Path("/proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE


def require_host_pid_namespace() -> None:
    """Refuses to record from inside a pid namespace: the kernel half speaks of the host's pids.

    Raises:
        EnvironmentUnfit: This process runs in a pid namespace of its own.
    """
    if not is_host_pid_namespace():
        raise EnvironmentUnfit(
            "this is a pid namespace of its own: pids here are not those the kernel reports",
            "run with --pid=host / hostPID: true",
        )


def kernel_names_cure() -> str:
    """Returns what makes the kernel show its addresses, where it hides them from this process.

    kallsyms_show_value of kernel/kallsyms.c (v6.1): up to 1 it asks for CAP_SYSLOG.
    """
    level = kernelfs.read_text("/proc/sys/kernel/kptr_restrict").strip()
    if level.isdecimal() and int(level) >= _HIDDEN_FROM_ALL:
        return "sudo sysctl kernel.kptr_restrict=1"
    return "run as root, or with CAP_SYSLOG"


def lockdown_mode(path: Path = _LOCKDOWN) -> str | None:
    """Returns none, integrity or confidentiality; None where the kernel does not say.

    The file lists all modes with the present one in brackets (security/lockdown/lockdown.c, v5.4).
    """
    found = re.search(r"\[(\w+)\]", kernelfs.read_text(path))
    return found[1] if found else None


def require_no_lockdown(path: Path = _LOCKDOWN) -> None:
    """Refuses to go on where programs may not read kernel memory.

    Integrity mode forbids writing to user memory, which no program of ours does; confidentiality
    mode forbids bpf_probe_read_kernel and perf events as well, also to root.

    Raises:
        EnvironmentUnfit: The kernel is locked down for confidentiality.
    """
    if lockdown_mode(path) == "confidentiality":
        raise locked_down()


def has_seccomp_filter() -> bool:
    """Whether system calls of this process go through a filter, as in most containers."""
    return _own_status("Seccomp") == _SECCOMP_FILTER


def require_system_calls() -> None:
    """Refuses to go on where a seccomp filter keeps bpf or perf_event_open from the kernel.

    Each is asked for something that does no harm. With the capabilities the kernel itself never
    answers as filters do.

    Raises:
        EnvironmentUnfit: Names the system call.
    """
    if not has_seccomp_filter():
        return
    for name, works in (("bpf", _bpf_arrives), ("perf_event_open", _perf_event_open_arrives)):
        if not works():
            raise EnvironmentUnfit(
                f"a seccomp filter refuses {name}()",
                "run with --security-opt seccomp=unconfined / seccompProfile: Unconfined",
            )


def _bpf_arrives() -> bool:
    try:
        sysbpf.Map(_NO_FD, abi.PID_DTYPE, abi.PID_DTYPE, 1).lookup(bytes(4))
    except OSError as error:
        return error.errno not in _REFUSALS  # the kernel answers EBADF
    return True


def _perf_event_open_arrives() -> bool:
    try:
        os.close(sysbpf.open_cpu_clock(online_cpus()[0], 1_000_000_000))
    except OSError as error:
        return error.errno not in _REFUSALS  # perf_event_paranoid answers EACCES
    return True


def require_clocks() -> int:
    """Opens what samples are taken by, on every online CPU, and returns on how many.

    Raises:
        EnvironmentUnfit: perf_event_open is denied.
    """
    opened = 0
    for cpu in online_cpus():
        try:
            os.close(sysbpf.open_cpu_clock(cpu, 1_000_000_000))
        except OSError as error:
            if error.errno == errno.ENODEV:  # went offline since the list was read
                continue
            raise EnvironmentUnfit(
                f"cannot open a cpu-clock event on CPU {cpu}: {error.strerror}",
                CLOCK_CURE,
            ) from error
        opened += 1
    return opened


def require_btf() -> None:
    """Refuses to go on without the kernel's type information.

    Raises:
        EnvironmentUnfit: There is none, or it cannot be read.
    """
    if not os.access(VMLINUX, os.R_OK):
        raise EnvironmentUnfit(
            f"this kernel has no type information ({VMLINUX})",
            "use a kernel built with CONFIG_DEBUG_INFO_BTF=y",
        )


def require_compiler() -> str:
    """Imports bcc as a recording does, in a child; returns its version and path.

    Raises:
        EnvironmentUnfit: It is missing, broken, or PyPI's unrelated package of the same name.
    """
    command = [sys.executable, "-c", _IMPORT_BCC]
    try:
        # From / as in loader.py: -c would import from the working directory first.
        done = subprocess.run(  # noqa: S603 - our own interpreter and text
            command, cwd="/", capture_output=True, timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnfit(f"bcc was not imported within {_IMPORT_TIMEOUT_S} s") from error
    complaint = done.stderr.decode(errors="replace")
    if "bcc-missing" in complaint or "bcc-foreign" in complaint:
        raise explain_failure(complaint)
    if done.returncode != 0:
        last_line = (complaint.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise EnvironmentUnfit(f"the BPF compiler does not import: {last_line}", BCC_HINT)
    return done.stdout.decode(errors="replace").strip()


def require_address_space() -> None:
    """Refuses to go on where too little may be mapped for a recording (RLIMIT_AS).

    Raises:
        EnvironmentUnfit: Says how many it takes.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < _ADDRESS_SPACE_BYTES:
        raise EnvironmentUnfit(
            f"this process may map {soft / 1e6:,.0f} MB, and a recording maps up to"
            f" {_ADDRESS_SPACE_BYTES / 1e6:,.0f}, most of which never becomes memory",
            "ulimit -v unlimited  (systemd: LimitAS=infinity)",
        )


def require_all() -> None:
    """Runs the checks that cost nothing; loading and attaching are checks of their own.

    Raises:
        EnvironmentUnfit: The first that fails.
    """
    require_linux()
    this_architecture()
    rights.require()
    require_host_pid_namespace()
    require_no_lockdown()
    require_system_calls()
    require_btf()
    descriptors.require_enough()
    require_address_space()
