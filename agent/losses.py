# SPDX-License-Identifier: Apache-2.0
"""The one list of everything that a recording can lose: name, meaning and cure.

Both halves count by these entries. After a recording they are printed and stored in the capture,
and every report shows those that are not zero. A new loss is one entry here and the line that
counts it: `LossKind.NAME` in Python, `count(LOST_NAME)` in C, whose enumerators are made of the
entries that say so.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Of a kind of loss: what is to blame for it, by name. A program may make bad files all day.
MAX_CULPRITS = 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    """Attributes as in `LossKind`."""

    meaning: str
    cure: str = ""
    in_kernel: bool = False
    is_of_time: bool = False
    is_of_device: bool = False
    is_asked_for: bool = False


@enum.unique
class LossKind(enum.Enum):
    """Something that can be lost.

    Attributes:
        stored_name: How captures and messages call it, and what scripts look for: the member's
            name in lower case. It never changes.
        meaning: What is missing, and what is there all the same, in a line for a reader.
        cure: What the user can do about it; "" where nothing helps.
        in_kernel: The kernel half counts it, as LOST_ and the member's name.
        is_of_time: Time of threads is missing, and not only what it was spent on.
        is_of_device: Samples of devices are missing.
        is_asked_for: The user has said that it is to be left out: it is told, and nothing is wrong.
    """

    # Counted by the kernel half.
    STACK_STORE_FULL = _Entry(
        "samples whose stack found no room: their time is kept, their frames are not",
        cure="raise --stack-storage-size",
        in_kernel=True,
    )
    SUMS_FULL = _Entry(
        "samples and waits that found no room at all: their time is missing",
        cure="raise --hash-storage-size",
        in_kernel=True,
        is_of_time=True,
    )
    RING_FULL = _Entry(
        "events (process starts, exits, long waits) that came faster than they were read: of"
        " threads that ended then, the time since the last window is missing, and some names",
        in_kernel=True,
        is_of_time=True,
    )
    THREADS_FULL = _Entry(
        "context switches of threads beyond the thread table: their off-CPU time is missing",
        cure="raise --thread-storage-size",
        in_kernel=True,
        is_of_time=True,
    )
    PROCESSES_FULL = _Entry(
        "samples of processes beyond the process table, and processes that were not entered there",
        cure="record fewer processes at once",
        in_kernel=True,
        is_of_time=True,
    )
    NO_KERNEL_STACK = _Entry(
        "samples in kernel code without kernel frames: the kernel could not walk its own stack",
        in_kernel=True,
    )
    KERNEL_FRAMES_CUT = _Entry(
        "samples with more kernel frames than are kept; those nearest to the leaf are there",
        in_kernel=True,
    )
    USER_FRAMES_CUT = _Entry(
        "samples with over 255 kernel and user frames; those nearest to the leaf are there",
        in_kernel=True,
    )
    SAMPLES_LEFT_OUT = _Entry(
        "on-CPU samples that were left out by chance, as an agent's cost was above its budget: each"
        " one that was taken stands for as many as were left out in its place",
        cure="allow the agent more (cost_cpu_percent, cost_host_percent)",
        in_kernel=True,
    )
    WAITS_NOT_LISTED = _Entry(
        "long waits beyond 1,000 a second and CPU, and all but the longest where an agent's cost"
        " was above its budget: their time is counted, but they are not listed one by one",
        cure="raise --min-wait",
        in_kernel=True,
    )
    STACKS_NOT_COPIED = _Entry(
        "stacks of code whose unwind table was not there yet, beyond 1,024 a second of one process"
        " or faster than they were taken: they are as complete as frame pointers make them",
        in_kernel=True,
    )
    PYTHON_STORE_FULL = _Entry(
        "samples whose Python frames found no room: their native frames are there",
        cure="raise --stack-storage-size",
        in_kernel=True,
    )
    CALLS_FULL = _Entry(
        "calls of device APIs that found no room: they are missing",
        cure="raise --hash-storage-size",
        in_kernel=True,
    )
    CALLS_NOT_LISTED = _Entry(
        "calls of device APIs beyond 100,000 a second: they are counted, but not listed one by one",
        in_kernel=True,
    )
    LAUNCHES_NOT_TIMED = _Entry(
        "launches beyond 16,384 a second that differ from the one before on their queue, as those"
        " with a number do: they are counted, without their order, number and time, and samples of"
        " such a second are shared",
        in_kernel=True,
    )
    SAMPLES_NOT_TIMED = _Entry(
        "samples of processes whose CPUs are a device, beyond 10,000 a second and CPU: they are"
        " counted, and of the window alone it is known when they were",
        cure="lower -F",
        in_kernel=True,
    )
    PROCESSES_NOT_TIMED = _Entry(
        "processes beyond 1,024 whose CPUs are a device: of their samples the second alone is known"
        ", and which launch they belong to is an estimate",
        cure="record fewer processes at once",
    )
    CALLERS_FULL = _Entry(
        "calls of device APIs by more than 1,024 threads: those of further ones are missing",
        in_kernel=True,
    )
    CALL_ARGUMENTS_UNREADABLE = _Entry(
        "arguments of device API calls that could not be read: the calls count, without their size",
        in_kernel=True,
    )
    KERNEL_NAMES_LOST = _Entry(
        "names of GPU kernels that came faster than they were taken, or were told by calls inside"
        " of four others",
        in_kernel=True,
    )
    EXCLUDED = _Entry(
        "samples of processes in cgroups that are excluded: their time is nowhere here",
        cure="exclude less",
        in_kernel=True,
        is_asked_for=True,
    )
    NO_SCRATCH = _Entry(
        "samples without room to walk a stack",
        cure="please report this",
        in_kernel=True,
    )

    STACK_COPIES_FULL = _Entry(
        "stacks of code whose unwind table was not there yet, beyond 64 MB of them, or 32 MB"
        " of one process: they are as complete as frame pointers make them"
    )

    # Time and stacks that the recorder misses.
    STACK_LOST = _Entry("stacks that never left the kernel; their time is under [truncated: lost]")
    SAMPLING_SKIPPED = _Entry(
        "clock ticks that hit another BPF program and were skipped by the kernel",
        is_of_time=True,
    )
    WAITS_NOT_SAMPLED = _Entry(
        "waits of threads none of whose waits of a kind was chosen to have a stack, at the time or"
        " in the two minutes before, eight for long ones that there was no time to walk: their time"
        " is under [off CPU: not sampled]",
        cure="allow off-CPU stacks more (record --off-cpu-budget, cost_cpu_percent of an agent)",
    )
    SWITCH_NOT_SEEN = _Entry(
        "threads that left a CPU in a way that the kernel shows to no tracepoint, and had not come"
        " back at the end: their time since then is missing",
        is_of_time=True,
    )
    THREADS_NOT_ENTERED = _Entry(
        "threads that slept or ran before the recording, which was too short to enter them all:"
        " their time is missing",
        cure="record longer",
        is_of_time=True,
    )
    THREAD_TABLE_FULL = _Entry(
        "threads that slept or ran before the recording, beyond the thread table: their off-CPU"
        " time is missing",
        cure="raise --thread-storage-size",
        is_of_time=True,
    )
    SLEEPERS_NOT_WALKED = _Entry(
        "threads asleep since before the recording that show kernel frames only: this kernel does"
        " not tell their registers (BPF task iterators came with v5.8)"
    )
    SLEEPERS_KERNEL_FRAMES_LOST = _Entry(
        "kernel frames of threads asleep since before the recording that the kernel does not tell,"
        " at least so many; the rest of their stacks is there",
        cure="run as root, or with CAP_SYS_ADMIN and CAP_SYSLOG",
    )
    CUT_SLEEPS_LEFT = _Entry(
        "sleeping threads whose stacks were truncated, as their tables came late, and that were too"
        " many to be read at once, at least so many: what they slept before their turn stays"
        " truncated",
        cure="record again: the tables are there now",
    )
    CPUS_CAME_ONLINE = _Entry(
        "CPUs that came online during the recording, or slept with the machine: samples of a moment"
        " on each are missing; waits and times are complete"
    )
    LIFE_EVENTS_LOST = _Entry(
        "forks, execs and mappings of which the kernel told faster than was read, or CPUs of which"
        " it does not tell: processes that ended before they could be read may have no names"
    )
    ENDS_NOT_ACCOUNTED = _Entry(
        "ends of threads, of the whole machine, that came faster than they were read, or beyond"
        " 131,072: what the kernel itself accounts of those that were recorded is missing, and no"
        " time of theirs"
    )
    BOUNDARY_LATE = _Entry(
        "boundaries between two seconds of the recording that were set late, as this machine is"
        " busy: some time near them is counted in the other second"
    )
    STACKS_STUCK = _Entry(
        "processes with memory that could not be read within half a second, as of a file system"
        " that does not answer: they are not read any more, so that Python frames show no names and"
        " threads asleep since before the recording kernel frames only"
    )
    SANDBOX_INCOMPLETE = _Entry(
        "rights that processes which handle files and memory of targets could not give up: nothing"
        " is missing, but a file that takes its parser over could do more harm"
    )
    FILES_STUCK = _Entry(
        "files of targets, or of /proc about them, that did not open or could not be read within a"
        " second, as of a file system that does not answer: they are not tried again, so that names"
        " are missing"
    )
    OPENER_DIED = _Entry("ends of the process that opens files of targets: names may be missing")
    MEMORY_READER_DIED = _Entry(
        "ends of the process that reads memory of targets: names of Python code and stacks of"
        " threads asleep since before the recording may be missing"
    )

    # What a window may hold.
    WINDOW_STACKS_FULL = _Entry(
        "samples and calls whose stack was one too many, of those in which least time was spent and"
        " of containers with more than a fair share: their time is kept, their frames are not"
    )
    WINDOW_EVENTS_FULL = _Entry(
        "waits, launches, kernel times and readings of devices that were one too many to be listed"
    )
    WINDOW_ROWS_FULL = _Entry(
        "samples of devices at too many different instructions", is_of_device=True
    )
    WINDOW_TOO_LARGE = _Entry(
        "mappings and code of the processes that have most of it, in windows that would be too"
        " large to be read again: frames there have no names; or a whole window, where that was"
        " not enough"
    )
    PYTHON_CHAIN_LOST = _Entry("Python frames of stacks that never left the kernel")

    # Unwind tables.
    BAD_UNWIND_INFO = _Entry(
        "binaries whose unwind information is damaged; walked by frame pointer"
    )
    BAD_UNWIND_RECORDS = _Entry(
        "damaged records in unwind information; stacks through their functions may be cut"
    )
    UNWIND_TABLE_NOT_BUILT = _Entry(
        "binaries whose unwind table was not made, as the process that makes them died or could not"
        " be started; walked by frame pointer"
    )
    UNWIND_MEMORY_FULL = _Entry(
        "binaries whose unwind table found no room and that were walked by frame pointer for a"
        " while",
        cure="raise --unwind-memory",
    )
    UNWIND_RULES_CUT = _Entry(
        "unwind rules beyond 65,536 of one binary; stacks end in code of its own that needs them"
    )
    TOO_MANY_MAPPINGS = _Entry(
        "executable mappings beyond 65,535 of a process; walked by frame pointer"
    )
    MAPPINGS_NOT_KEPT = _Entry(
        "processes beyond the process table, or with so many executable mappings that those of all"
        " processes found no room; walked by frame pointer"
    )

    # Files of targets, and the names in them.
    BINARY_NOT_OPENED = _Entry(
        "mapped files that could not be opened, or not be kept open; their frames have no names",
        cure="raise ulimit -n; other users' files take CAP_DAC_READ_SEARCH, deleted ones"
        " CAP_CHECKPOINT_RESTORE",
    )
    BINARY_NOT_READ = _Entry(
        "mapped files that are damaged, or that would take longer to read than any real one: names,"
        " Python frames or calls of theirs are missing"
    )
    UNREADABLE_BINARY = _Entry("a binary could not be opened; its frames have no names")
    BAD_ELF = _Entry("a binary is not valid ELF; its frames have no names")
    BAD_SYMBOL_TABLE = _Entry("a symbol table is damaged; some names are missing")
    TOO_MANY_SYMBOLS = _Entry("a symbol table is larger than any real one; it was not read")
    BAD_DEBUG_FILE = _Entry(
        "a separate debug file does not belong to its binary; it was not used",
        cure="install that of the same build",
    )
    BAD_DEBUG_INFO = _Entry("debug information could not be read; no lines or inlined functions")
    DEBUG_INFO_TOO_LARGE = _Entry(
        "debug information is over the limit; no lines or inlined functions"
    )
    NAMES_NOT_DEMANGLED = _Entry(
        "binaries with names that expand without bound; those names stay mangled"
    )
    SYMBOLIZER_GAVE_UP = _Entry(
        "a binary crashed or stalled the symbol reader; it was read without debug information and"
        " demangling"
    )
    SYMBOLIZER_DIED = _Entry(
        "a binary crashed or stalled the symbol reader; its frames have no names"
    )
    KERNEL_SYMBOLS_HIDDEN = _Entry(
        "kernel addresses without names",
        cure="run as root, or with CAP_SYSLOG",
    )
    PERF_MAP_REFUSED = _Entry(
        "a perf-PID.map was a link, or not a regular file of the target; not used"
    )
    JIT_SYMBOLS_FULL = _Entry(
        "names of generated code that a recording which is killed does not have"
    )
    PERF_MAP_CUT = _Entry("a perf-PID.map was too large or malformed; a part of it was not used")

    # Python frames.
    PYTHON_UNSUPPORTED = _Entry("interpreters of unknown layout; their Python frames are missing")
    PYTHON_THREADS_NOT_FOUND = _Entry(
        "interpreters whose Python frames are missing, as their threads' state is not where glibc"
        " keeps it"
    )
    PYTHON_EXITED = _Entry("Python frames of processes that ended before their names could be read")
    PYTHON_CODE_GONE = _Entry(
        "Python frames of functions that were gone before their names could be read, as the code of"
        " a module is once it is imported: [unreadable Python frame]"
    )
    PYTHON_TOO_DEEP = _Entry(
        "Python stacks with over 255 frames; those nearest to the leaf are there"
    )
    PYTHON_UNREADABLE_STACK = _Entry("Python stacks that could not be read to their root")
    PYTHON_BAD_POINTER = _Entry(
        "Python stacks with a pointer that cannot be one; the rest is missing"
    )
    PYTHON_LOOP = _Entry("Python stacks that go round in circles; the rest is missing")
    PYTHON_MISFIT = _Entry(
        "stacks whose Python frames did not fit the eval loops of the native stack"
    )

    PYTHON_NAMES_NOT_READ = _Entry(
        "threads of a process beyond 4,096 that Python has names for: they are called what the"
        " kernel calls them"
    )

    # Calls of device APIs, and samples of devices.
    CALL_SIZES_CUT = _Entry(
        "amounts of work or bytes of device API calls that are larger than any device; the calls"
        " are counted"
    )
    CALLS_NOT_PROBED = _Entry(
        "functions of device APIs that could not be probed; their calls are missing"
    )
    KERNEL_NAMES_UNREAD = _Entry(
        "names of GPU kernels whose process ended before they could be read"
    )
    KERNEL_NOT_OPENED = _Entry(
        "samples in GPU kernels whose file could not be read", is_of_device=True
    )
    SAMPLE_OUTSIDE_KERNEL = _Entry(
        "samples in a GPU kernel's file beyond its code", is_of_device=True
    )
    KERNEL_TIMES_REFUSED = _Entry(
        "kernel times that a device cannot have taken, or that were incomplete when they were"
        " asked for last, beside kernels that still ran; they are not counted"
    )
    DEVICE_READINGS_MISSED = _Entry(
        "seconds in which a device did not tell how busy it was, and how much of its memory was in"
        " use, although it had begun to, or told what cannot be: the page's strip is empty there"
    )
    HELPERS_NOT_LOADED = _Entry(
        "processes into which no helper could be loaded: of their devices launches alone are known",
        cure="start them with `aiflame record -- CMD`, or see what was said of each",
    )
    HELPERS_FOREIGN = _Entry(
        "processes with a helper of another version of aiflame, which is not told to begin: of"
        " their devices launches alone are known",
        cure="start them anew, with the library of this version",
    )
    DEVICE_MEMORY_NOT_OPENED = _Entry(
        "memory in which processes tell of devices that could not be opened: kernel times and"
        " samples of those processes are missing",
        cure="run with CAP_CHECKPOINT_RESTORE, or CAP_SYS_ADMIN on kernels before 5.9",
    )
    DEVICE_MEMORY_GONE = _Entry(
        "processes with a helper that had ended before what they share was opened: their launches"
        " are known, kernel times and samples are missing",
        cure="leave the recorder more CPU time; processes that end by exit() wait for it up to 2 s,"
        " those that end by a signal or _exit() do not",
    )
    KERNEL_TIMES_GONE = _Entry(
        "kernel times of processes that had ended before what they share was opened, as far as"
        " these have said how many",
    )
    DEVICE_MEMORY_DAMAGED = _Entry(
        "processes whose memory for telling of devices holds what no helper writes: it is not read"
        " any further"
    )
    DEVICE_RECORDS_OVERWRITTEN = _Entry(
        "records of kernel times and samples that a process wrote faster than they were read",
        is_of_device=True,
    )
    DEVICE_CONTROL_REFUSED = _Entry(
        "processes with a helper that could not be told to begin: kernel times and samples of"
        " theirs are missing",
        cure="run as root, or with CAP_SYS_PTRACE; a helper of an earlier version in a process of"
        " another user's takes CAP_DAC_OVERRIDE as well",
    )
    DEVICE_SAMPLES_DROPPED = _Entry("samples that a device dropped", is_of_device=True)
    DEVICE_BUFFER_FULL = _Entry(
        "times that a device's buffer of samples was full: all samples since it was read last are"
        " missing",
        cure="sample less often (record --gpu-duty)",
        is_of_device=True,
    )
    DEVICE_SAMPLES_FOREIGN = _Entry(
        "samples of a device in code that its driver does not tell about", is_of_device=True
    )
    DEVICE_STALLS_LEFT_OUT = _Entry(
        "seconds in which stalls of a process were not sampled, as the agent would have cost more"
        " than it may: kernel times are there",
        cure="raise cost_host_percent or cost_cpu_percent, or lower gpu_duty_percent",
        is_of_device=True,
    )
    DEVICE_SAMPLES_UNNUMBERED = _Entry(
        "samples of serialised windows for whose launches CUPTI had no room, or which it may tell"
        " wrongly: they are shared as the others are"
    )
    DEVICE_SAMPLES_REFUSED = _Entry(
        "samples of a device in functions or for reasons without a name, that it cannot have taken,"
        " or of more instructions than are told apart",
        is_of_device=True,
    )
    DEVICE_CONTEXTS_FULL = _Entry(
        "contexts of devices, or devices, beyond those that are told apart; nothing of theirs is"
        " sampled",
        is_of_device=True,
    )
    KERNEL_TIMES_DROPPED = _Entry("kernel times that a driver dropped, for want of buffers")
    KERNEL_TIMES_ADDED_UP = _Entry(
        "kernel times beyond 30,000 a second of one process, or its part where more than two have a"
        " helper: they count, added up by kernel, and are shared among the stacks that launched it"
    )
    DEVICE_NAMES_FULL = _Entry(
        "names of kernels and reasons for which there was no room: what is theirs is unnamed"
    )
    DEVICE_CODE_NOT_KEPT = _Entry(
        "machine code of kernels for which there was no room: their instructions have no text"
    )
    DEVICE_CODE_NOT_FOUND = _Entry(
        "code objects of kernels that were loaded before aiflame's helper and that no file of the"
        " process has, as what is compiled at run time: their instructions have no text",
        cure="record the program from its start: record -- COMMAND",
    )
    DEVICE_CODE_AMBIGUOUS = _Entry(
        "code objects of kernels that were loaded before aiflame's helper and that files have in"
        " several forms: which one ran is not known, and their instructions have no text",
        cure="record the program from its start: record -- COMMAND",
    )
    DEVICE_CODE_NOT_SEARCHED = _Entry(
        "files, and code in them, that were not searched for kernels that were loaded before"
        " aiflame's helper: they are damaged, or would have taken longer than the part of 20 s that"
        " each process has"
    )
    DEVICE_CODE_NOT_STORED = _Entry(
        "code objects of kernels, beyond 64 MB compressed or 32 MB of one process, that are not in"
        " the capture: reports cannot list what could not be listed when it was recorded"
    )
    DEVICE_FACTS_FULL = _Entry(
        "modules, graph nodes and other facts of devices that came faster than they were read, or"
        " for which there was no room"
    )
    GRAPH_BUILDERS_FULL = _Entry(
        "calls that have built nodes of graphs, beyond 65,536 that are remembered: later, kernels"
        " of such nodes are under the launch of the graph alone"
    )
    GRAPH_LAUNCHES_UNKNOWN = _Entry(
        "kernels of CUDA graphs to which CUPTI gave the number of another launch, and whose own is"
        " not told by their order: they are shared among stacks, or without one",
        cure="update CUPTI (13.1 Update 1 or later) and start the program anew",
    )
    LAUNCHES_NUMBERED_TWICE = _Entry(
        "launches whose calls of runtime and driver had two numbers: the times of their kernels"
        " may be shared among stacks"
    )
    KERNEL_NOT_DISASSEMBLED = _Entry(
        "GPU kernels whose instructions are not known",
        cure="for NVIDIA's: install nvdisasm (pip install nvidia-cuda-nvdisasm), also where the"
        " report is made",
    )
    DEVICE_CODE_REPLACED = _Entry(
        "samples of a second in which a GPU kernel's code gave way to other code at the same"
        " address; some may be of the other",
        is_of_device=True,
    )
    DEVICE_CODE_NOT_MAPPED = _Entry(
        "samples at unknown addresses of processes that run GPU kernels on CPUs: most are in"
        " kernels that were built shortly before their process ended",
        is_of_device=True,
    )
    DEVICE_STACKS_NOT_KEPT = _Entry(
        "stacks with unknown addresses, too many at once to look for GPU kernels in them",
        is_of_device=True,
    )

    # Counted by the fleet agent.
    SHORT_LIVED_JOINED = _Entry(
        "programs that ran for less than a second, and of which no on-CPU sample was taken, told of"
        " together by cgroup and name, as an agent's cost was above its budget: their time is kept,"
        " their pids, command lines and stacks of waits are not",
        cure="allow the agent more (cost_cpu_percent, cost_host_percent)",
    )
    NAMING_BEHIND = _Entry(
        "stacks that the agent had no time to name, so that it keeps up and within its budget:"
        " their time is kept, their frames are not; those of the largest shares of time came"
        " first",
        cure="allow the agent more (cost_cpu_percent, cost_host_percent)",
    )
    NAMES_NOT_SENT = _Entry(
        "stacks and GPU kernels whose container or service had over 2 MB of names in one stretch:"
        " their time is sent, their frames or names are not; the heaviest came first"
    )
    NOT_DELIVERED = _Entry(
        "samples of earlier stretches that a back-end did not take, or that waited too long for it;"
        " of each back-end by itself",
        cure="the agent's log says when; raise spool_size where it was full",
    )
    STRETCHES_LOST = _Entry(
        "stretches of time that an agent recorded, and neither named nor sent",
        cure="the agent's log says why; raise keep_size where they had no room",
    )
    WINDOWS_LOST = _Entry(
        "windows of some seconds that an agent recorded, and that found no room on its disk: what"
        " was in them is nowhere",
        cure="free some space where `directory` is, or lower keep_size and spool_size",
        is_of_time=True,
    )
    CAPTURES_NOT_WRITTEN = _Entry(
        "captures that an agent was to keep, and could not write",
        cure="free some space where the sink captures writes to, or set another directory",
    )
    UNNAMED_CONTAINERS = _Entry(
        "containers of which only the id is known: what they did is there, as unknown-container",
        cure="set kubelet, or let the agent read the files of the container engine",
    )
    PODS_NOT_TOLD = _Entry(
        "containers whose pods the kubelet has not told of yet, and rules ask about pods: what they"
        " did is not sent"
    )
    PODS_NOT_KNOWN = _Entry(
        "containers whose pods are not known, since no kubelet answers, and rules ask about pods:"
        " what they did is not sent",
        cure="set kubelet, or see in the agent's log why it does not answer",
    )
    LABELS_MERGED = _Entry(
        "processes of more containers and services than one stretch may tell apart: what they did"
        " is there, as other",
        cure="leave some out with exclude",
    )

    def __init__(self, entry: _Entry) -> None:
        self.stored_name = self.name.lower()
        self.meaning = entry.meaning
        self.cure = entry.cure
        self.in_kernel = entry.in_kernel
        self.is_of_time = entry.is_of_time
        self.is_of_device = entry.is_of_device
        self.is_asked_for = entry.is_asked_for


# By the names that captures and windows have.
KINDS_BY_NAME = {kind.stored_name: kind for kind in LossKind}


def blame(culprits: dict[LossKind, set[str]], kind: LossKind, name: str) -> None:
    """Adds a name to those that are to blame for a loss, unless there are too many."""
    known = culprits.setdefault(kind, set())
    if len(known) < MAX_CULPRITS:
        known.add(name)
