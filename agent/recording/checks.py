# SPDX-License-Identifier: Apache-2.0
"""What a machine must have before anything is started; `doctor` runs the same."""

from __future__ import annotations

import os

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording.arch import this_architecture
from aiflame.agent.recording.btf import VMLINUX
from aiflame.agent.recording.targets import require_host_pid_namespace

# Capability numbers (include/uapi/linux/capability.h).
_CAPABILITIES = {"CAP_BPF": 39, "CAP_PERFMON": 38, "CAP_SYS_PTRACE": 19}
_CAP_SYS_ADMIN = 21


def missing_capabilities() -> list[str]:
    """Returns those that are needed and not held; CAP_SYS_ADMIN stands for the first two."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:  # noqa: PTH123
        effective = next(
            (int(line.split()[1], 16) for line in status if line.startswith("CapEff:")), 0
        )
    is_admin = bool(effective >> _CAP_SYS_ADMIN & 1)
    return [
        name
        for name, bit in _CAPABILITIES.items()
        if not effective >> bit & 1 and not (is_admin and name != "CAP_SYS_PTRACE")
    ]


def require_capabilities() -> None:
    """Refuses to go on without the privilege to load programs and read targets.

    Raises:
        EnvironmentUnfit: Names what is missing.
    """
    missing = missing_capabilities()
    if missing:
        raise EnvironmentUnfit(
            f"not permitted: needs {', '.join(missing)}", 'sudo env "PATH=$PATH" aiflame ...'
        )


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


def require_all() -> None:
    """Runs the checks that cost nothing; loading and attaching are checks of their own.

    Raises:
        EnvironmentUnfit: The first that fails.
    """
    this_architecture()
    require_capabilities()
    require_host_pid_namespace()
    require_btf()
