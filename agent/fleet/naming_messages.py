# SPDX-License-Identifier: Apache-2.0
"""What an agent's collector and the process that names and sends for it say to each other.

Each message goes as one packet of a Unix socket (SOCK_SEQPACKET): it comes whole or not at all, in
order, and with it a descriptor of a file that only the collector may open. Files and processes are
those of `sinks.naming_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.fleet.config import AgentConfig
from aiflame.agent.sinks.naming_messages import OF_FILES, End, FilesMissing, OfFiles, Windows
from aiflame.agent.typed_messages import Messages

# From the collector.


@dataclass(frozen=True, slots=True)
class Configure:
    """The configuration, with its secrets; it comes first, and again where it was read again."""

    config: AgentConfig


@dataclass(frozen=True, slots=True)
class StretchBegun:
    """A stretch has begun; windows that come from here on are of it.

    Attributes:
        folder: Of its segments.
    """

    folder: Path


@dataclass(frozen=True, slots=True)
class StretchEnded:
    """The stretch that began last has ended: it is to be sent."""


@dataclass(frozen=True, slots=True)
class StretchLeft:
    """A stretch that has ended, and that another process has left.

    Attributes:
        folder: Of its segments.
    """

    folder: Path


@dataclass(frozen=True, slots=True)
class LookAtCgroups:
    """It is time to look for cgroups that rules leave out."""


@dataclass(frozen=True, slots=True)
class DoLess:
    """How much less is to be done, as `recording.chance.Chances` has it."""

    thrift: int
    delay_factor: int


@dataclass(frozen=True, slots=True)
class Lost:
    """What the collector has lost since it told last: the next stretch tells of it.

    Attributes:
        counts: By `LossKind.stored_name`.
    """

    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """All processes together have too much."""


@dataclass(frozen=True, slots=True)
class EndBy:
    """What can be sent is to be sent: `End` follows.

    Attributes:
        until_s: When there is an end, by `time.monotonic`, which is of the whole host.
    """

    until_s: float


ToNaming = (
    OfFiles
    | Windows
    | End
    | Configure
    | StretchBegun
    | StretchEnded
    | StretchLeft
    | LookAtCgroups
    | DoLess
    | Lost
    | ReleaseMemory
    | EndBy
)
TO_NAMING: Messages[ToNaming] = Messages(
    *OF_FILES,
    Windows,
    End,
    Configure,
    StretchBegun,
    StretchEnded,
    StretchLeft,
    LookAtCgroups,
    DoLess,
    Lost,
    ReleaseMemory,
    EndBy,
)

# From the process that names.


@dataclass(frozen=True, slots=True)
class SinkState:
    """How a sink does that sends requests.

    Attributes:
        sent_requests, sent_samples, sent_bytes: Since the process was started.
        retries: How often something was sent again.
        waiting_requests, waiting_bytes: What is on disk; None where that is not known.
        dropped_samples: By reason.
        last_sent_unix_s: 0 for never.
        why_away: Why the last try failed, "" where it did not.
    """

    sent_requests: int
    sent_samples: int
    sent_bytes: int
    retries: int
    waiting_requests: int | None
    waiting_bytes: int | None
    dropped_samples: dict[str, int]
    last_sent_unix_s: float
    why_away: str


@dataclass(frozen=True, slots=True)
class NamingReport:
    """How sinks do; what else is said comes with it.

    Attributes:
        sinks: Those that send requests, by name.
    """

    sinks: dict[str, SinkState]


@dataclass(frozen=True, slots=True)
class StretchDone(NamingReport):
    """A stretch is in the queues of all sinks.

    Attributes:
        stretch: Name of its folder.
        samples: Of CPU time.
        duration_ns: How long it was.
        losses: What it tells of, its own and what was lost before, by `LossKind.stored_name`.
        told: What of that the collector had told (`Lost`): it need not tell it again.
        containers: Whose processes are in it.
        unresolved_containers: Those of them whose name is not known.
    """

    stretch: str
    samples: int
    duration_ns: int
    losses: dict[str, int]
    told: dict[str, int]
    containers: int
    unresolved_containers: int


@dataclass(frozen=True, slots=True)
class StretchLost(NamingReport):
    """A stretch could not be named, and never will be.

    Attributes:
        stretch: Name of its folder.
    """

    stretch: str


@dataclass(frozen=True, slots=True)
class NoRoom(NamingReport):
    """There is no room to name a stretch or to queue it.

    Attributes:
        is_disk_full: An error said so, and not one that may have another reason.
    """

    is_disk_full: bool


@dataclass(frozen=True, slots=True)
class CgroupsLeftOut(NamingReport):
    """Which cgroups rules leave out, where the kernel groups processes by v2.

    Attributes:
        ids: All of them.
    """

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CgroupPathsLeftOut(NamingReport):
    """How that has changed where v1 groups processes; it comes in parts.

    Attributes:
        more: Paths of those that are left out from here on.
        less: Paths of those that are not any more.
    """

    more: tuple[str, ...]
    less: tuple[str, ...]


FromNaming = FilesMissing | NamingReport
FROM_NAMING: Messages[FromNaming] = Messages(
    FilesMissing,
    NamingReport,
    StretchDone,
    StretchLost,
    NoRoom,
    CgroupsLeftOut,
    CgroupPathsLeftOut,
)
