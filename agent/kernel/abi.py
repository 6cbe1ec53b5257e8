# SPDX-License-Identifier: Apache-2.0
"""The host half's view of bpf/aiflame.h. A test compares the two; change both together.

What the kernel half loses stands once, in the list of losses: its enumerators are made of that.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.unwind import walk

MAX_FRAMES = walk.MAX_FRAMES
FRAME_SLOTS = 256
MAX_KERNEL_FRAMES = 127


class EventType(enum.IntEnum):
    """First word of every record in the ring buffer."""

    PROCESS_SEEN = 1
    PROCESS_EXIT = 2
    THREAD_EXIT = 3
    WAIT = 4
    DRAIN = 5
    CALL = 6
    KERNEL_NAMED = 7
    SAMPLE = 8
    EXEC = 9
    BELL = 10
    LEFT_OUT_EXEC = 11


class ProcessFlag(enum.IntFlag):
    """Bits of process_state.flags."""

    TARGET = 1
    EXCLUDED = 2
    SEEN = 4
    AT_EXEC = 8
    SETTLED = 16
    GONE = 32
    LEFT_OUT = 64
    ARGUMENTS_DUE = 128


THREAD_SEEDED = 1  # bit of thread_state.flags


class Setting(enum.IntEnum):
    """Slots of the `settings` array."""

    BOUNDARY_NS = 0
    END_NS = 1
    STACKS_DRAIN = 2
    SUMS_DRAIN = 3
    CALLS_DRAIN = 4
    PERIOD_NS = 5
    FOLLOW_CHILDREN = 6
    WAIT_EVENT_NS = 7
    CALL_EVENTS = 8
    BOUNDARY_BEFORE_NS = 9
    TIMED_SAMPLES = 10
    LAUNCH_RUNS = 11
    STACK_COPIES = 12
    ONE_IN = 13
    CHANCES_NUMBER = 14
    SPACING_NS = 15
    SAMPLES_ONE_IN = 16
    DETAILS_AFTER_NS = 17
    WAIT_LISTED_NS = 18


class HostConstant(enum.IntEnum):
    """Constants that the loader puts into the programs; offsets and sizes in bytes."""

    FILTER = 0
    WITH_OFF_CPU = 1
    WITH_USER_STACKS = 2
    WITH_KERNEL_STACKS = 3
    WITH_CALLS = 4
    WITH_EXCLUDED = 5
    BY_CHANCE = 6
    KERNEL_FRAMES_MAX = 7
    HAS_TASK_PT_REGS = 8
    HAS_ATTACH_COOKIE = 9
    HAS_CGROUP_ID = 10
    SWITCH_HAS_STATE = 11
    THREAD_SIZE = 12
    HAS_LAST_ARRIVAL = 13
    TASK_PID = 14
    TASK_TGID = 15
    TASK_COMM = 16
    TASK_GROUP_LEADER = 17
    TASK_FLAGS = 18
    TASK_STATE = 19
    TASK_STACK = 20
    TASK_SIGNAL = 21
    TASK_REAL_PARENT = 22
    TASK_START_TIME = 23
    TASK_RAN = 24
    TASK_RAN_BEFORE = 25
    TASK_NVCSW = 26
    TASK_NIVCSW = 27
    TASK_LAST_ARRIVAL = 28
    TASK_POLICY = 29
    TASK_ON_CPU = 30
    TASK_THREAD_POINTER = 31
    SIGNAL_LIVE = 32
    TASK_MM = 33
    MM_ARG_START = 34
    MM_ARG_END = 35


# Stands for the stack of a thread that has not run yet.
NOT_RUN_STACK = 1
# And for that of an interval that was not chosen to have one.
NOT_SAMPLED_STACK = 2

# Weights of intervals off the CPU: one without chance, and one that was not chosen.
WEIGHT_EXACT, WEIGHT_NOT_CHOSEN = 0, 0xFFFF_FFFF
WEIGHT_MAX = 1 << 16
# From this length on a wait is exact.
LONG_WAIT_NS = 1_000_000_000
# And from this on when a window closes.
OPEN_WAIT_NS = 100_000_000
SWEPT_FRAMES = 32

# END_NS of a recording whose end is not known yet.
NEVER_NS = 2**64 - 1


class Filter(enum.IntEnum):
    """Which processes are recorded: HostConstant.FILTER."""

    PIDS = 0
    CGROUP = 1
    ALL = 2


# Unwind tables at a time.
TABLES_MAX = 4096
# As the table of a mapping: generated code has none; of other code the host half may have one.
TABLE_IS_NONE = 0xFFFF_FFFE
TABLE_IS_MISSING = 0xFFFF_FFFF


class Counter(enum.IntEnum):
    """Slots of the per-CPU `counters` array that tell of no loss."""

    SAMPLES = 0
    SWITCHES = 1
    STACKS_STORED = 2
    SUMS_STORED = 3
    WITHOUT_TABLES = 4
    CALLS = 5
    CALLS_STORED = 6
    WAITS_CHOSEN = 7


# The slots after them: what the kernel half loses, in the order of the entries.
LOSS_SLOTS = {
    kind: slot
    for slot, kind in enumerate((kind for kind in LossKind if kind.in_kernel), len(Counter))
}
COUNTERS_MAX = len(Counter) + len(LOSS_SLOTS)


def losses_header() -> str:
    """Returns the text of losses.h: enumerators of `enum counter`, made of the list of losses."""
    names = ", ".join(f"LOST_{kind.name}" for kind in LOSS_SLOTS)
    return f"#define KERNEL_HALF_LOSSES {names}\n"


# Device API functions that can be told apart.
API_CALLS_MAX = 1024
API_PROBES_MAX = 8192
APIS_MAX = 8
CALL_SIZE_MAX = 1 << 46
ALL_QUEUES = 2**64 - 1
DEFAULT_QUEUE = 1
# Calls listed one by one each second, over all CPUs.
CALL_EVENTS_PER_S = 100_000
# What the kernel half reads of a kernel's name.
KERNEL_NAME_BYTES = 1024
CALL_KERNEL_IS_NAMED = 0x8000_0000  # bit of call_key.kind

SETTINGS_DTYPE = np.dtype("<u8")
COUNTERS_DTYPE = np.dtype("<u8")
RUNNING_DTYPE = np.dtype("<u8")
PID_DTYPE = np.dtype("<u4")
STACK_ID_DTYPE = np.dtype("<u8")
CGROUP_ID_DTYPE = np.dtype("<u8")
EVENT_BUDGET_DTYPE = np.dtype([("second_ns", "<u8"), ("sent", "<u8")])
PROCESS_STATE_DTYPE = np.dtype(
    [
        ("image", "<u8"),
        ("flags", "<u4"),
        ("asked", "<u4"),
        ("asked_ns", "<u8"),
        ("copies", EVENT_BUDGET_DTYPE),
        ("bells", EVENT_BUDGET_DTYPE),
        ("one_in", "<u4"),
        ("chances_number", "<u4"),
        ("mappings_tgid", "<u4"),
        ("unused", "<u4"),
        ("mappings_image", "<u8"),
    ]
)
BELL_EVENT_DTYPE = np.dtype(
    [("type", "<u4"), ("tgid", "<u4"), ("image", "<u8"), ("kernel_times", "<u8")]
)
CROSSING_DTYPE = np.dtype(
    [
        ("boundary_ns", "<u8"),
        ("on_cpu_ns", "<u8"),
        ("stack", "<u8"),
        ("switched_ns", "<u8"),
        ("waking_ns", "<u8"),
        ("off_class", "<u4"),
        ("weight", "<u4"),
    ]
)
# By SampleClass; in place of on-CPU, waits to run for the first time.
CHANCE_TOTAL_DTYPE = np.dtype([("ns", "<u8", (4,)), ("count", "<u4", (4,))])
TOTAL_NOT_RUN = 0
SHORT_LIVED_KEY_DTYPE = np.dtype(
    [("cgroup_id", "<u8"), ("parent_tgid", "<u4"), ("unused", "<u4"), ("comm", "S16")]
)
SHORT_LIVED_TOTAL_DTYPE = np.dtype(
    [
        ("images", "<u8"),
        ("on_cpu_ns", "<u8"),
        ("observed_ns", "<u8"),
        ("by_chance", CHANCE_TOTAL_DTYPE),
    ]
)
THREAD_STATE_DTYPE = np.dtype(
    [
        ("started_ns", "<u8"),
        ("first_seen_ns", "<u8"),
        ("switched_ns", "<u8"),
        ("waking_ns", "<u8"),
        ("stack", "<u8"),
        ("on_cpu_ns", "<u8"),
        ("ran_ns", "<u8"),
        ("image", "<u8"),
        ("tgid", "<u4"),
        ("off_class", "<u4"),
        ("flags", "<u4"),
        ("weight", "<u4"),
        ("out_ns", "<u8"),
        ("gap_ns", "<u8"),
        ("crossing", CROSSING_DTYPE),
        ("by_chance", CHANCE_TOTAL_DTYPE, (2,)),
    ]
)
STACK_DTYPE = np.dtype(
    [
        ("image", "<u8"),
        ("python", "<u8"),
        ("tgid", "<u4"),
        ("kernel_depth", "<u2"),
        ("user_depth", "<u2"),
        ("end", "<u2"),
        ("kernel_cut", "<u2"),
        ("gil", "<u4"),
        ("call_return", "<u8"),
        ("call", "<u4"),
        ("unused", "<u4"),
        ("frames", "<u8", (FRAME_SLOTS,)),
    ]
)


def kernel_frames(record: np.void) -> npt.NDArray[np.uint64]:
    """Returns the kernel's frames of a STACK_DTYPE, leaf first; a view."""
    frames: npt.NDArray[np.uint64] = record["frames"][: int(record["kernel_depth"])]
    return frames


def user_frames(record: np.void) -> npt.NDArray[np.uint64]:
    """Returns the user frames of a STACK_DTYPE, leaf first; a view."""
    first, depth = int(record["kernel_depth"]), int(record["user_depth"])
    frames: npt.NDArray[np.uint64] = record["frames"][first : first + depth]
    return frames


STACK_COPY_PAGES = 16
STACK_PAGE_BYTES = 4096
STACK_COPY_DTYPE = np.dtype(
    [
        ("stack", "<u8"),
        ("depth", "<u8"),
        ("instruction_pointer", "<u8"),
        ("stack_pointer", "<u8"),
        ("frame_pointer", "<u8"),
        ("base_pointer", "<u8"),
        ("is_exact", "<u4"),
        ("has_frame_pointer", "<u4"),
        ("pages", "<u8"),
        ("record", STACK_DTYPE),
        ("memory", f"V{STACK_COPY_PAGES * STACK_PAGE_BYTES}"),
    ]
)


class PythonGil(enum.IntEnum):
    """What a thread had to do with the GIL when its stack was taken."""

    NONE = 0
    HELD = 1
    NOT_HELD = 2
    UNKNOWN = 3


class PythonEnd(enum.IntEnum):
    """How a walk of Python frames ended."""

    COMPLETE = 0
    TOO_DEEP = 1
    UNREADABLE = 2
    BAD_POINTER = 3
    LOOP = 4


PYTHON_EVAL_RANGES = 4
PYTHON_PROCESS_DTYPE = np.dtype(
    [
        ("image", "<u8"),
        ("eval_start", "<u8", (PYTHON_EVAL_RANGES,)),
        ("eval_bytes", "<u8", (PYTHON_EVAL_RANGES,)),
        ("gil", "<u8"),
        ("state_slot", "<u8"),
        *(
            (name, "<u4")
            for name in (
                *("thread_frame", "thread_status", "cframe_frame", "frame_code"),
                *("frame_previous", "frame_position", "frame_mark", "frame_bytes"),
                *("code_instructions", "code_tags", "code_copies", "frame_copy"),
            )
        ),
        ("position_kind", "u1"),
        ("run_end", "u1"),
        ("gil_kind", "u1"),
        ("has_cframe", "u1"),
        ("unused", "<u4"),
    ]
)
PYTHON_ENDS_RUN = 1
PYTHON_CHAIN_DTYPE = np.dtype(
    [
        ("image", "<u8"),
        ("tgid", "<u4"),
        ("depth", "<u2"),
        ("end", "<u2"),
        ("codes", "<u8", (FRAME_SLOTS,)),
        ("positions", "<i4", (FRAME_SLOTS,)),
    ]
)
SUM_KEY_DTYPE = np.dtype(
    [
        ("stack", "<u8"),
        ("image", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("sample_class", "<u4"),
        ("weight", "<u4"),
    ]
)
SUM_VALUE_DTYPE = np.dtype([("count", "<u8"), ("ns", "<u8")])
PROCESS_EVENT_DTYPE = np.dtype(
    [
        ("type", "<u4"),
        ("tgid", "<u4"),
        ("parent_tgid", "<u4"),
        ("unused", "<u4"),
        ("image", "<u8"),
        ("ns", "<u8"),
        ("cgroup_id", "<u8"),
        ("comm", "S16"),
    ]
)
ARGUMENTS_BYTES = 256
EXEC_EVENT_DTYPE = np.dtype(
    [
        ("type", "<u4"),
        ("tgid", "<u4"),
        ("image", "<u8"),
        ("size", "<u4"),
        ("unused", "<u4"),
        ("arguments", "u1", (ARGUMENTS_BYTES,)),
    ]
)
THREAD_EVENT_DTYPE = np.dtype(
    [
        ("type", "<u4"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("parent_tgid", "<u4"),
        ("image", "<u8"),
        ("ns", "<u8"),
        ("first_seen_ns", "<u8"),
        ("on_cpu_ns", "<u8"),
        ("crossing", CROSSING_DTYPE),
        ("by_chance", CHANCE_TOTAL_DTYPE, (2,)),
        ("cgroup_id", "<u8"),
        ("comm", "S16"),
    ]
)
WAIT_EVENT_DTYPE = np.dtype(
    [
        ("type", "<u4"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("unused", "<u4"),
        ("stack", "<u8"),
        ("image", "<u8"),
        ("start_ns", "<u8"),
        ("blocked_ns", "<u8"),
        ("runnable_ns", "<u8"),
    ]
)
API_ARGUMENT_DTYPE = np.dtype(
    [
        ("is_used", "u1"),
        ("number", "u1"),
        ("is_pointer", "u1"),
        ("size_bytes", "u1"),
        ("offset", "<u4"),
    ]
)
API_CALL_DTYPE = np.dtype(
    [
        ("kernel", API_ARGUMENT_DTYPE),
        ("queue", API_ARGUMENT_DTYPE),
        ("bytes", API_ARGUMENT_DTYPE),
        ("kind", API_ARGUMENT_DTYPE),
        ("name", API_ARGUMENT_DTYPE),
        ("alias", API_ARGUMENT_DTYPE),
        ("event", API_ARGUMENT_DTYPE),
        ("blocking", API_ARGUMENT_DTYPE),
        ("launch_id", API_ARGUMENT_DTYPE),
        ("grid", "<u4"),
        ("handle_from", "<u4"),
        ("api", "<u4"),
        ("operation", "<u4"),
        ("waits_for", "<u4"),
        ("unused", "<u4"),
    ]
)
API_PROBE_DTYPE = np.dtype(
    [("before_bytes", "<u8"), ("after_bytes", "<u8"), ("call", "<u4"), ("stack_bytes", "<u4")]
)
CALL_KEY_DTYPE = np.dtype(
    [
        ("stack", "<u8"),
        ("image", "<u8"),
        ("kernel", "<u8"),
        ("queue", "<u8"),
        ("run", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("call", "<u4"),
        ("kind", "<u4"),
    ]
)
CALL_VALUE_DTYPE = np.dtype(
    [
        ("count", "<u8"),
        ("work", "<u8"),
        ("bytes", "<u8"),
        ("first_ns", "<u8"),
        ("last_ns", "<u8"),
        ("waited_from_ns", "<u8"),
        ("waited_until_ns", "<u8"),
        ("launch_id", "<u8"),
    ]
)
QUEUE_KEY_DTYPE = np.dtype([("image", "<u8"), ("queue", "<u8"), ("tgid", "<u8")])
QUEUE_STATE_DTYPE = np.dtype(
    [
        ("run", "<u8"),
        ("run_hash", "<u8"),
        ("waited_from_ns", "<u8"),
        ("waited_until_ns", "<u8"),
    ]
)
SAMPLE_EVENT_DTYPE = np.dtype([("type", "<u4"), ("tid", "<u4"), ("stack", "<u8"), ("ns", "<u8")])
CALL_EVENT_DTYPE = np.dtype(
    [
        ("type", "<u4"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("call", "<u4"),
        ("stack", "<u8"),
        ("image", "<u8"),
        ("ns", "<u8"),
        ("kernel", "<u8"),
        ("queue", "<u8"),
        ("bytes", "<u8"),
        ("kind", "<u4"),
        ("grid", "<u4", (3,)),
        ("block", "<u4", (3,)),
        ("unused", "<u4"),
    ]
)
# Of the name, only name_bytes are sent.
KERNEL_NAMED_DTYPE = np.dtype(
    [
        ("type", "<u4"),
        ("tgid", "<u4"),
        ("image", "<u8"),
        ("handle", "<u8"),
        ("alias", "<u8"),
        ("name_address", "<u8"),
        ("name_id", "<u8"),
        ("call", "<u4"),
        ("name_bytes", "<u4"),
        ("name", f"V{KERNEL_NAME_BYTES}"),
    ]
)
MAPPING_SLOT_DTYPE = np.dtype(
    [
        ("start", "<u8"),
        ("end", "<u8"),
        ("bias", "<u8"),
        ("table", "<u4"),
        ("pages", "<u4"),
    ]
)
THREAD_REGISTERS_DTYPE = np.dtype(
    [
        ("started_ns", "<u8"),
        ("ran_ns", "<u8"),
        ("voluntary_switches", "<u8"),
        ("involuntary_switches", "<u8"),
        ("instruction_pointer", "<u8"),
        ("stack_pointer", "<u8"),
        ("frame_pointer", "<u8"),
        ("base_pointer", "<u8"),
        ("thread_pointer", "<u8"),
        ("stopped_ns", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("state", "<u4"),
        ("is_on_cpu", "<u4"),
        ("comm", "S16"),
    ]
)
SWEPT_STACK_DTYPE = np.dtype([("switched_ns", "<u8"), ("stack", "<u8")])
SWEPT_THREAD_DTYPE = np.dtype(
    [
        ("switched_ns", "<u8"),
        ("ran_ns", "<u8"),
        ("image", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("kernel_bytes", "<i8"),
        ("kernel", "<u8", (SWEPT_FRAMES,)),
    ]
)
