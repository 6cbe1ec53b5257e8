# SPDX-License-Identifier: Apache-2.0
"""What the kernel lets this process do: which capabilities are of use, and how they are given up.

A recording works without root. `REQUIRED` are those without which there is none; without one of
the others a part is missing (agent/doctor/rights.py says which). Root has all that there are, and
keeps those in `USED`: what breaks into the recorder by way of a target's file or memory can load no
module, mount nothing and reach no hardware.

Capabilities belong to threads (capabilities(7)): a thread that is started later has those that the
starting one has at that moment.
"""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Callable, Collection

from aiflame.agent import priority
from aiflame.agent.errors import EnvironmentUnfit

# linux/capability.h: effective, permitted and inheritable, 32 bits each, the lower halves first.
_VERSION_3 = 0x2008_0522
_SETS = struct.Struct("<6I")
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


class Capability(enum.IntEnum):
    """Those that some part of aiflame uses; the numbers are the kernel's (linux/capability.h)."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    KILL = 5
    SETGID = 6
    SETUID = 7
    SETPCAP = 8
    NET_ADMIN = 12
    SYS_PTRACE = 19
    SYS_ADMIN = 21
    SYS_NICE = 23
    SYS_RESOURCE = 24
    SYSLOG = 34
    PERFMON = 38
    BPF = 39
    CHECKPOINT_RESTORE = 40

    def __str__(self) -> str:
        return f"CAP_{self.name}"


# Nothing is recorded without these.
REQUIRED = {
    Capability.BPF: "to load programs into the kernel",
    Capability.PERFMON: "to sample CPUs and context switches",
    Capability.SYS_PTRACE: "to read what targets have mapped",
}

# Whoever has CAP_SYS_ADMIN needs none of these (include/linux/capability.h, v5.10).
_WITHIN_ADMIN = frozenset({Capability.BPF, Capability.PERFMON, Capability.CHECKPOINT_RESTORE})

# What a recording uses once its limits are raised, CAP_SYS_ADMIN aside: `kernel/least.py`.
USED = frozenset(
    {
        *REQUIRED,
        Capability.DAC_READ_SEARCH,  # files and memory of other users' processes
        Capability.CHECKPOINT_RESTORE,  # mapped files that have no name any more
        Capability.SYSLOG,  # kernel addresses
        Capability.SYS_NICE,  # each second of a recording has its own budget of real time
        Capability.KILL,  # children that run as another user
        *(Capability.SETUID, Capability.SETGID),  # starting those
        Capability.SETPCAP,  # children that give up even what programs of root's would get
        # Outputs, which are given to the user who typed sudo, in folders of that user.
        *(Capability.CHOWN, Capability.DAC_OVERRIDE, Capability.FOWNER),
    }
)


def missing(wanted: Collection[Capability]) -> list[Capability]:
    """Returns those that the calling thread has not, and CAP_SYS_ADMIN does not stand for."""
    effective, _, _ = _sets()
    is_admin = bool(effective >> Capability.SYS_ADMIN & 1)
    return [
        capability
        for capability in wanted
        if not effective >> capability & 1 and not (is_admin and capability in _WITHIN_ADMIN)
    ]


def require() -> None:
    """Refuses to go on without the rights to load programs and to read targets.

    Raises:
        EnvironmentUnfit: Names what is missing.
    """
    lacking = missing(REQUIRED)
    if lacking:
        raise EnvironmentUnfit(
            "not permitted: needs " + ", ".join(f"{one} {REQUIRED[one]}" for one in lacking),
            'sudo env "PATH=$PATH" aiflame ...',
        )


def keep_only(kept: Collection[Capability]) -> None:
    """Gives up all other capabilities, for good.

    It is for the calling thread, and for threads and children that it starts from now on.

    Args:
        kept: Of these, what is there. CAP_SYS_ADMIN stays as well where it stands for one of them.
    """
    bits = _bits(kept)
    _, permitted, _ = _sets()
    if _bits(_WITHIN_ADMIN) & bits & ~permitted:
        bits |= _bits({Capability.SYS_ADMIN})
    # Else each program that root executes would have all of them again (capabilities(7)).
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "prctl")
    _set_all(bits)


def works_without(capability: Capability, attempt: Callable[[], object]) -> bool:
    """Whether something is permitted to a thread without a capability; this one keeps it.

    Args:
        capability: The one in question.
        attempt: Raises PermissionError where it is not permitted. Any other OSError is no matter
            of rights.
    """

    def is_permitted() -> bool:
        _set_all(~_bits({capability}))
        try:
            attempt()
        except PermissionError:
            return False
        except OSError:
            pass
        return True

    try:
        with priority.urgent_pool(1) as pool:
            return pool.submit(is_permitted).result()
    except BlockingIOError:  # no thread can be started to try it in
        return False


def _bits(capabilities: Collection[Capability]) -> int:
    return sum(1 << capability for capability in frozenset(capabilities))


def _sets() -> tuple[int, int, int]:
    """Returns the effective, permitted and inheritable set of the calling thread, as bits."""
    data = ctypes.create_string_buffer(_SETS.size)
    if _libc.capget(_header(), data):
        raise OSError(ctypes.get_errno(), "capget")
    low = _SETS.unpack(data.raw)
    effective, permitted, inheritable = (low[at] | low[at + 3] << 32 for at in range(3))
    return effective, permitted, inheritable


def _set_all(bits: int) -> None:
    """Takes what is not among the bits from each set; the ambient one follows (capabilities(7))."""
    left = [own & bits for own in _sets()]
    words = [own >> shift & 0xFFFF_FFFF for shift in (0, 32) for own in left]
    if _libc.capset(_header(), _SETS.pack(*words)):
        raise OSError(ctypes.get_errno(), "capset")


def _header() -> bytes:
    return struct.pack("<Ii", _VERSION_3, 0)
