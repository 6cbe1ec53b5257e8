# SPDX-License-Identifier: Apache-2.0
"""A profile from a store, for the reports that captures have.

What a store does not keep is not there: threads, addresses, single waits, instructions of kernels,
and when within a window something was. All of a process's threads are one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from aiflame.agent import __version__
from aiflame.agent.losses import KINDS_BY_NAME
from aiflame.agent.model.gpu import (
    DEVICE_SAMPLE_DTYPE,
    KERNEL_TIME_DTYPE,
    NONE,
    Device,
    GpuProfile,
    Kernel,
    KernelCode,
    SharingError,
    StallReason,
    Tier,
)
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    NS_PER_S,
    SAMPLE_DTYPE,
    WAIT_DTYPE,
    Binary,
    FrameKind,
    Function,
    GilState,
    Loss,
    Process,
    Profile,
    Recording,
    SampleClass,
    Stacks,
    StopReason,
    Thread,
)
from aiflame.agent.store.engine import Engine
from aiflame.agent.store.rows import NO_STACK
from aiflame.agent.store.selector import AGENT_LABELS, NothingThere, Selector
from aiflame.gpu.attribution import ATTRIBUTED_DTYPE, Certainty
from aiflame.gpu.attribution.kernel_times import ATTRIBUTED_TIME_DTYPE

# The widest that a flame graph may be asked for; what is left out is named. More do not fit a page.
MOST_STACKS = 200_000
DEFAULT_STACKS = 20_000

# The name of a stack whose frames have not arrived.
UNKNOWN_STACK = "[frames not in the store]"

_Member = TypeVar("_Member", bound=enum.IntEnum)


class By(enum.Enum):
    """What the outermost frames of a flame graph are."""

    SERVICE = "service"
    NODE = "node"
    NAMESPACE = "namespace"
    POD = "pod"
    CONTAINER = "container"
    VERSION = "version"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Found:
    """A profile of a part of a store.

    Attributes:
        profile: It.
        left_out: Stacks that it has not, since there were too many.
        left_out_ns: Their time.
    """

    profile: Profile
    left_out: int
    left_out_ns: int


def profile_of(engine: Engine, selector: Selector, by: By, most_stacks: int) -> Found:
    """Returns the profile of a part of a store.

    Args:
        engine: The store.
        selector: Which part.
        by: What processes are told apart by.
        most_stacks: The heaviest so many (stack, process, class) are in it.

    Raises:
        NothingThere: The store has nothing of it.
    """
    rows, left_out, left_out_ns = _samples(engine, selector, by, most_stacks)
    device_rows = _device_rows(engine, selector, by, most_stacks)
    if not rows and not device_rows:
        raise NothingThere(
            f"the store has nothing of {selector.words}", "ask for another time, or for less"
        )
    build = _Builder()
    wanted = {int(row[3]) for row in rows} | {int(row[7]) for row in device_rows}
    build.add_stacks(_frames(engine, wanted - {NO_STACK}))
    samples = [
        (
            *(build.stack(int(row[3])), build.thread(str(row[0]), int(row[1]))),
            *(_member(SampleClass, row[2]), int(row[5]), int(row[4])),
        )
        for row in rows
    ]
    gpu = build.gpu(device_rows)
    profile = build.profile(samples, gpu, selector)
    return Found(replace(profile, losses=_losses(engine, selector)), left_out, left_out_ns)


def _losses(engine: Engine, selector: Selector) -> tuple[Loss, ...]:
    """Returns what agents lost meanwhile: of whole hosts, whatever else is asked for."""
    hosts = {name: values for name, values in selector.labels.items() if name in AGENT_LABELS}
    where, values = Selector(selector.begin_s, selector.end_s, hosts).where()
    rows = engine.query(
        f"SELECT loss, sum(lost) FROM agents WHERE {where} AND loss != ''"
        " GROUP BY loss ORDER BY loss",
        values,
    ).rows
    meanings = {name: kind.meaning for name, kind in KINDS_BY_NAME.items()}
    return tuple(Loss(name, int(lost), meanings.get(name, "")) for name, lost in rows)


def _process_columns(by: By) -> str:
    # A pid of one host says nothing of another's, and nothing of a service.
    return "comm, pid" if by is By.PROCESS else f"{by.value}, 0"


def _samples(
    engine: Engine, selector: Selector, by: By, most: int
) -> tuple[list[list[Any]], int, int]:
    where, values = selector.where()
    grouped = (
        "SELECT "
        f"{_process_columns(by).replace(', ', ' AS process, ')} AS number, class, stack_id,"
        " sum(value) AS v, sum(events) AS n FROM samples"
        f" WHERE {where} GROUP BY process, number, class, stack_id"
    )
    rows = engine.query(
        f"SELECT process, number, class, stack_id, v, n FROM ({grouped}) AS g"
        " ORDER BY v DESC, n DESC, stack_id, process, number, class LIMIT {most:UInt64}",
        {**values, "most": most},
    ).rows
    if len(rows) < most:
        return rows, 0, 0
    ((count, whole),) = engine.query(
        f"SELECT count(), sum(v) FROM ({grouped}) AS g",
        values,
    ).rows
    return rows, int(count) - len(rows), int(whole) - sum(int(row[4]) for row in rows)


def _device_rows(engine: Engine, selector: Selector, by: By, most: int) -> list[list[Any]]:
    where, values = Selector(selector.begin_s, selector.end_s, selector.labels).where()
    return engine.query(
        "SELECT "
        f"{_process_columns(by).replace(', ', ' AS process, ')} AS number,"
        " family, model, kernel, reason, period_ns, launch_stack, sum(samples) AS n,"
        f" sum(busy_ns) AS ns, sum(runs) AS r FROM gpu WHERE {where}"
        " GROUP BY process, number, family, model, kernel, reason, period_ns, launch_stack"
        " HAVING n > 0 OR ns > 0"
        " ORDER BY n DESC, ns DESC, process, number, family, model, kernel, reason, launch_stack"
        " LIMIT {most:UInt64}",
        {**values, "most": most},
    ).rows


# Of one question for frames. They are a parameter, which stands in the URL: with 23 bytes each it
# stays below the 64 KiB that servers in between take at most.
_IDS_AT_ONCE = 2_000


def _frames(engine: Engine, ids: set[int]) -> Iterable[list[Any]]:
    ordered = sorted(ids)
    for first in range(0, len(ordered), _IDS_AT_ONCE):
        yield from engine.query(
            "SELECT stack_id, any(frames), any(kinds), any(modules), any(files), any(lines),"
            " any(ending), any(gil) FROM stacks WHERE stack_id IN {ids:Array(UInt64)}"
            " GROUP BY stack_id ORDER BY stack_id",
            {"ids": ordered[first : first + _IDS_AT_ONCE]},
        ).rows


def _member(kind: type[_Member], name: object) -> _Member:
    """Returns the member of a name; one that a later version knows is the last that this knows."""
    found = kind.__members__.get(str(name).upper())
    return found if found is not None else [*kind][-1]


class _Builder:
    """Numbers what a profile has, each once."""

    def __init__(self) -> None:
        self._binaries: dict[Binary, int] = {}
        self._functions: dict[Function, int] = {}
        self._frames: dict[tuple[int, int], int] = {}
        self._processes: dict[tuple[str, int], int] = {}
        self._paths: list[list[int]] = []
        self._ends: list[int] = []
        self._gil: list[int] = []
        self._stacks: dict[int, int] = {}

    def add_stacks(self, rows: Iterable[Sequence[Any]]) -> None:
        for stack_id, names, kinds, modules, files, lines, ending, gil in rows:
            # Of rows that are not of one length, what all have.
            columns = zip(names, kinds, modules, files, lines, strict=False)
            frames = [self._frame(*column) for column in columns]
            self._add(
                int(stack_id), frames[::-1], _member(StopReason, ending), _member(GilState, gil)
            )

    def stack(self, stack_id: int) -> int:
        if stack_id not in self._stacks:
            frame = self._frame(UNKNOWN_STACK, "marker", "", "", 0)
            self._add(stack_id, [frame], StopReason.ROOTED, GilState.NO_PYTHON)
        return self._stacks[stack_id]

    def _add(self, stack_id: int, frames: list[int], end: StopReason, gil: GilState) -> None:
        self._stacks[stack_id] = len(self._paths)
        self._paths.append(frames)
        self._ends.append(end)
        self._gil.append(gil)

    def _frame(self, name: str, kind: str, module: str, file: str, line: int) -> int:
        binary = None
        if module:
            binary = self._binaries.setdefault(Binary(module, ""), len(self._binaries))
        function = Function(
            FrameKind.__members__.get(kind.upper(), FrameKind.NATIVE), name, binary, file
        )
        number = self._functions.setdefault(function, len(self._functions))
        return self._frames.setdefault((number, int(line)), len(self._frames))

    def thread(self, process: str, number: int) -> int:
        """Returns the number of a process, and of its only thread."""
        return self._processes.setdefault((process, number), len(self._processes))

    def gpu(self, rows: Sequence[Sequence[Any]]) -> GpuProfile:
        devices: dict[tuple[str, str, int], int] = {}
        kernels: dict[tuple[int, str, str], int] = {}
        reasons: dict[StallReason, int] = {}
        samples: list[tuple[int, ...]] = []
        times: list[tuple[int, ...]] = []
        attributed, attributed_times = [], []
        for process, number, *what, period_ns, stack_id, n, ns, runs in rows:
            family, model, kernel, reason = map(str, what)
            device = devices.setdefault((family, model, int(period_ns)), len(devices))
            of = self.thread(str(process), int(number))
            named = kernels.setdefault((of, family, kernel), len(kernels))
            stack = NONE if int(stack_id) == NO_STACK else self.stack(int(stack_id))
            # Who shared what is not kept.
            certainty = Certainty.UNATTRIBUTED if stack == NONE else Certainty.SHARED
            if reason and n:
                number_of = reasons.setdefault(StallReason(family, reason), len(reasons))
                attributed.append((len(samples), stack, certainty, n))
                samples.append((0, device, named, 0, number_of, NONE, 0, 0, n))
            elif ns:
                attributed_times.append((len(times), stack, certainty, ns))
                times.append((device, named, 0, NONE, 0, 0, runs, ns, NONE))
        sampled = {sample[1] for sample in samples}
        return GpuProfile(
            devices=tuple(
                Device(
                    family, model, Tier.STALLS if i in sampled else Tier.TIMES, "", int(period_ns)
                )
                for (family, model, period_ns), i in devices.items()
            ),
            kernels=tuple(Kernel(process, family, name, "") for process, family, name in kernels),
            codes=tuple(KernelCode(i, None, 0) for i in range(len(kernels))),
            reasons=tuple(reasons),
            samples=np.array(samples, DEVICE_SAMPLE_DTYPE),
            times=np.array(times, KERNEL_TIME_DTYPE),
            attributed=np.array(attributed, ATTRIBUTED_DTYPE),
            error=SharingError(0.0, 0.0),
            attributed_times=np.array(attributed_times, ATTRIBUTED_TIME_DTYPE),
        )

    def profile(
        self, samples: Sequence[tuple[int, ...]], gpu: GpuProfile, selector: Selector
    ) -> Profile:
        processes = tuple(
            Process(number, 0, name or "[not known]", "", "", "", "", 0, None)
            for name, number in self._processes
        )
        table = np.array(samples, SAMPLE_DTYPE)
        on_cpu = table[table["klass"] == SampleClass.ON_CPU]
        count = int(on_cpu["count"].sum())
        return Profile(
            recording=Recording(
                aiflame_version=__version__,
                started_unix_ns=selector.begin_s * NS_PER_S,
                duration_ns=(selector.end_s - selector.begin_s) * NS_PER_S,
                period_ns=int(on_cpu["ns"].sum()) // count if count else 0,
                command="",
                target=selector.words,
                recorder_cpu_ns=0,
                recorder_peak_rss_bytes=0,
                facts=(("from", "a fleet store: all threads of a process are one"),),
            ),
            processes=processes,
            threads=tuple(
                Thread(i, process.pid, process.name, 0, 0) for i, process in enumerate(processes)
            ),
            binaries=tuple(self._binaries),
            functions=tuple(self._functions),
            frames=np.array(
                [(function, line, 0, False) for function, line in self._frames], FRAME_DTYPE
            ),
            stacks=Stacks(
                np.cumsum([0, *map(len, self._paths)], dtype=np.uint64),
                np.array([frame for path in self._paths for frame in path], np.uint32),
                np.array(self._ends, np.uint8),
                np.array(self._gil, np.uint8),
            ),
            samples=table,
            waits=np.zeros(0, WAIT_DTYPE),
            gpu=gpu,
        )
