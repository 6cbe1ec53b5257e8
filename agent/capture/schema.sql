-- SPDX-License-Identifier: Apache-2.0
-- A capture is one SQLite file. PRAGMA application_id is 0x41464C4D ("AFLM"), PRAGMA user_version
-- the schema version below. Times are nanoseconds; those called *_ns in rows of events count from
-- the start of the recording. Ids are local to the file.

-- key/value facts: aiflame_version, started_unix_ns, duration_ns, period_ns, command, target,
-- recorder_cpu_ns, recorder_peak_rss_bytes, interrupted_ns, complete ('1' once the recording was
-- finished in order), and fact:<title> lines shown under every report, in the order of their rowids.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

-- One row per process image: exec makes a new row under the same pid.
CREATE TABLE processes (
    id INTEGER PRIMARY KEY,
    pid INTEGER NOT NULL,
    parent_pid INTEGER NOT NULL,
    name TEXT NOT NULL,
    executable TEXT NOT NULL,
    command_line TEXT NOT NULL,
    cgroup TEXT NOT NULL,
    container_id TEXT NOT NULL,
    started_ns INTEGER NOT NULL,
    exited_ns INTEGER
);

-- Whose a process was, of what an agent recorded (since version 9): service, container,
-- container_id, engine, unit, node, namespace, pod, pod_uid, workload, workload_kind, version, and
-- extra:NAME for labels and annotations that its configuration asks for. "" has no row.
CREATE TABLE process_labels (
    process_id INTEGER NOT NULL REFERENCES processes (id),
    name TEXT NOT NULL,
    value TEXT NOT NULL
);

-- on_cpu_ns is exact (from context switches), not sampled. name is the kernel's (comm), or what
-- Python calls the thread.
CREATE TABLE threads (
    id INTEGER PRIMARY KEY,
    process_id INTEGER NOT NULL REFERENCES processes (id),
    tid INTEGER NOT NULL,
    name TEXT NOT NULL,
    on_cpu_ns INTEGER NOT NULL,
    observed_ns INTEGER NOT NULL
);

CREATE TABLE binaries (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    build_id TEXT NOT NULL
);

-- What a process had mapped: [start, end) holds the binary from file_offset on; bias is what to
-- subtract from an address to get the binary's own virtual address.
CREATE TABLE mappings (
    process_id INTEGER NOT NULL REFERENCES processes (id),
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    file_offset INTEGER NOT NULL,
    bias INTEGER NOT NULL,
    binary_id INTEGER NOT NULL REFERENCES binaries (id)
);

-- kind: 0 native, 1 kernel, 2 python, 3 marker made by aiflame, 4 machine code of an interpreter
-- that only hands calls on. A Python function has its qualified name and, in file, the path of its
-- source as the process knows it.
CREATE TABLE functions (
    id INTEGER PRIMARY KEY,
    kind INTEGER NOT NULL,
    name TEXT NOT NULL,
    binary_id INTEGER REFERENCES binaries (id),
    file TEXT NOT NULL
);

-- A location in a function. address is the binary's own virtual address (0: none), line 0: unknown.
CREATE TABLE frames (
    id INTEGER PRIMARY KEY,
    function_id INTEGER NOT NULL REFERENCES functions (id),
    line INTEGER NOT NULL,
    address INTEGER NOT NULL,
    inlined INTEGER NOT NULL
);

-- addresses: raw u64, little endian, leaf first, kernel_depth kernel ones and then the user ones.
-- frames: u32 ids of `frames`, little endian, root first, inlined functions expanded; NULL until
-- the symbols were resolved. end_reason: see StopReason in agent/model/profile.py. gil: 0 no Python on this
-- stack, 1 its lock held, 2 waited for, 3 released, 4 unknown (since version 2).
CREATE TABLE stacks (
    id INTEGER PRIMARY KEY,
    process_id INTEGER NOT NULL REFERENCES processes (id),
    kernel_depth INTEGER NOT NULL,
    end_reason INTEGER NOT NULL,
    addresses BLOB NOT NULL,
    frames BLOB,
    gil INTEGER NOT NULL DEFAULT 0
);

-- Time by interval (seconds since the start), class: 0 on-CPU (count samples, each weighing
-- period_ns), 1 blocked, 2 waiting to run, 3 preempted (count intervals, exact ns). Time off the CPU
-- is all in the second in which it ended; waits says when the long ones began.
CREATE TABLE samples (
    interval INTEGER NOT NULL,
    stack_id INTEGER NOT NULL REFERENCES stacks (id),
    thread_id INTEGER NOT NULL REFERENCES threads (id),
    class INTEGER NOT NULL,
    count INTEGER NOT NULL,
    ns INTEGER NOT NULL
);

-- From when to when samples of an interval were, where it ends in a later second (before version 11:
-- how many seconds it is, from that second on): nobody knows when in it they were.
CREATE TABLE intervals (
    interval INTEGER PRIMARY KEY,
    begin_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL
);

-- Off-CPU waits over the threshold, one by one: asleep for blocked_ns, then without a CPU for
-- runnable_ns.
CREATE TABLE waits (
    stack_id INTEGER NOT NULL REFERENCES stacks (id),
    thread_id INTEGER NOT NULL REFERENCES threads (id),
    start_ns INTEGER NOT NULL,
    blocked_ns INTEGER NOT NULL,
    runnable_ns INTEGER NOT NULL
);

-- What the kernel's scheduler accounts (since version 10) of threads that were there when the
-- recording ended: time on a CPU, time in a run queue and time slices between two readings of
-- /proc/PID/task/TID/schedstat, which together miss the recording's ends by misaligned_ns. A wait in
-- a run queue is accounted when it is over: open_wait_ns is how much of those that were open at a
-- reading may be in run_queue_ns, or missing. What CPUs were in interrupts, or stolen by the
-- hypervisor, meanwhile is interrupted_ns in meta. Since version 11, and where the kernel accounts
-- delays, also of threads that ended before (has_ended 1), from struct taskstats.
CREATE TABLE thread_accounts (
    thread_id INTEGER NOT NULL REFERENCES threads (id),
    on_cpu_ns INTEGER NOT NULL,
    run_queue_ns INTEGER NOT NULL,
    timeslices INTEGER NOT NULL,
    misaligned_ns INTEGER NOT NULL,
    open_wait_ns INTEGER NOT NULL,
    has_ended INTEGER NOT NULL
);

-- Delay accounting of processes that were there when it ended (since version 10) or that ended before
-- (since version 11), where the kernel does it: count waits of ns together. cause: blkio, swapin,
-- freepages, thrashing, compact, wpcopy, irq, as struct taskstats calls them.
CREATE TABLE delays (
    process_id INTEGER NOT NULL REFERENCES processes (id),
    cause TEXT NOT NULL,
    count INTEGER NOT NULL,
    ns INTEGER NOT NULL
);

-- The device half (since version 3). Devices that were looked for: tier 0 launches, 1 and times, 2 and
-- stalls; period_ns is what a sample stands for on one worker, 0 where it is no time; details (since
-- version 7): versions of drivers and libraries, and how it was sampled.
CREATE TABLE devices (
    id INTEGER PRIMARY KEY,
    family TEXT NOT NULL,
    name TEXT NOT NULL,
    tier INTEGER NOT NULL,
    limit_reason TEXT NOT NULL,
    period_ns INTEGER NOT NULL,
    details TEXT NOT NULL
);

-- Functions of device APIs that were probed. operation: 0 launch, 1 synchronise, 2 allocate, 3 free,
-- 4 copy.
CREATE TABLE api_functions (
    id INTEGER PRIMARY KEY,
    api TEXT NOT NULL,
    name TEXT NOT NULL,
    operation INTEGER NOT NULL
);

-- name: linkage name, '' where it is unknown, and unnamed says why.
CREATE TABLE kernels (
    id INTEGER PRIMARY KEY,
    process_id INTEGER NOT NULL REFERENCES processes (id),
    api TEXT NOT NULL,
    name TEXT NOT NULL,
    unnamed TEXT NOT NULL
);

-- Machine code of a kernel, which may be built more than once. binary_id: the file that holds it; of
-- CUDA's the one in which it was found by the kernel's name, NULL where CUPTI gave it. object_id
-- (since version 8): what it can be listed from, NULL where that was not kept.
CREATE TABLE kernel_codes (
    id INTEGER PRIMARY KEY,
    kernel_id INTEGER NOT NULL REFERENCES kernels (id),
    binary_id INTEGER REFERENCES binaries (id),
    size_bytes INTEGER NOT NULL,
    object_id INTEGER REFERENCES code_objects (id)
);

-- Code objects of which kernels were sampled (since version 8), as the family has them: of nvidia,
-- cubins; of opencl, in captures of agents, whole files. content: compressed (RFC 1950), of
-- size_bytes; of a large cubin what is not needed is zeros.
CREATE TABLE code_objects (
    id INTEGER PRIMARY KEY,
    family TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    content BLOB NOT NULL
);

-- offset: bytes from the kernel's first instruction; file '' and line 0 where unknown.
CREATE TABLE instructions (
    code_id INTEGER NOT NULL REFERENCES kernel_codes (id),
    offset INTEGER NOT NULL,
    text TEXT NOT NULL,
    file TEXT NOT NULL,
    line INTEGER NOT NULL,
    PRIMARY KEY (code_id, offset)
);

-- In the vendor's own words.
CREATE TABLE stall_reasons (
    id INTEGER PRIMARY KEY,
    family TEXT NOT NULL,
    name TEXT NOT NULL
);

-- Calls by interval (seconds since the start) and stack. kernel_id is NULL for what is no launch.
-- direction: 0 unknown, 1 to the device, 2 from it, 3 on it, 4 on the host. work: work items launched
-- in all, 0 where the API does not say; bytes: copied or allocated.
CREATE TABLE api_calls (
    interval INTEGER NOT NULL,
    stack_id INTEGER NOT NULL REFERENCES stacks (id),
    thread_id INTEGER NOT NULL REFERENCES threads (id),
    function_id INTEGER NOT NULL REFERENCES api_functions (id),
    kernel_id INTEGER REFERENCES kernels (id),
    direction INTEGER NOT NULL,
    count INTEGER NOT NULL,
    work INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);

-- Calls one by one (record --trace).
CREATE TABLE api_events (
    start_ns INTEGER NOT NULL,
    stack_id INTEGER NOT NULL REFERENCES stacks (id),
    thread_id INTEGER NOT NULL REFERENCES threads (id),
    function_id INTEGER NOT NULL REFERENCES api_functions (id),
    kernel_id INTEGER REFERENCES kernels (id),
    direction INTEGER NOT NULL,
    queue INTEGER NOT NULL,
    grid_x INTEGER NOT NULL,
    grid_y INTEGER NOT NULL,
    grid_z INTEGER NOT NULL,
    block_x INTEGER NOT NULL,
    block_y INTEGER NOT NULL,
    block_z INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);

-- Launches in their order on each queue (since version 5): `count` equal ones that follow each other,
-- the first enqueued at first_ns, the last at last_ns; ended_ns: when all had ended at the latest,
-- NULL where nothing tells. queue: the handle of the stream or queue; 0: in no order. Those that cannot have been on
-- a device when it was sampled are left out: api_calls counts all.
CREATE TABLE launches (
    stack_id INTEGER NOT NULL REFERENCES stacks (id),
    thread_id INTEGER NOT NULL REFERENCES threads (id),
    function_id INTEGER NOT NULL REFERENCES api_functions (id),
    kernel_id INTEGER NOT NULL REFERENCES kernels (id),
    queue INTEGER NOT NULL,
    first_ns INTEGER NOT NULL,
    last_ns INTEGER NOT NULL,
    ended_ns INTEGER,
    count INTEGER NOT NULL,
    work INTEGER NOT NULL
);

-- Samples of kernels. stack_id (since version 6): of the launch where the device named it by its
-- number, else NULL. Taken between begin_ns and end_ns (since version 5), which are the same where the
-- moment is known. Those that helpers tell are counted in samples of 2^20 cycles of the device,
-- whatever its period was; before, each counted as one.
CREATE TABLE device_samples (
    interval INTEGER NOT NULL,
    device_id INTEGER NOT NULL REFERENCES devices (id),
    code_id INTEGER NOT NULL REFERENCES kernel_codes (id),
    offset INTEGER NOT NULL,
    reason_id INTEGER NOT NULL REFERENCES stall_reasons (id),
    stack_id INTEGER REFERENCES stacks (id),
    begin_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    count INTEGER NOT NULL
);

-- How long a device ran a kernel (since version 4): count executions between begin_ns and end_ns, of
-- duration_ns in all. queue: handle of the stream or queue, 0 where it is not known or where a row is
-- of several; stack_id (since version 6): as in device_samples. built_stack_id (since version 8): of
-- the call by whose capture the node of a graph was built that ran.
CREATE TABLE kernel_times (
    device_id INTEGER NOT NULL REFERENCES devices (id),
    kernel_id INTEGER NOT NULL REFERENCES kernels (id),
    queue INTEGER NOT NULL,
    stack_id INTEGER REFERENCES stacks (id),
    begin_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    count INTEGER NOT NULL,
    duration_ns INTEGER NOT NULL,
    built_stack_id INTEGER REFERENCES stacks (id)
);

-- How busy devices were between two times, and what of their memory was in use at the end of that, of
-- all that ran on them (since version 8). NULL where the device does not tell; used_bytes and
-- total_bytes are told both, or neither.
CREATE TABLE device_readings (
    device_id INTEGER NOT NULL REFERENCES devices (id),
    begin_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    busy_permille INTEGER,
    used_bytes INTEGER,
    total_bytes INTEGER
);

CREATE TABLE losses (
    name TEXT PRIMARY KEY,
    count INTEGER NOT NULL,
    meaning TEXT NOT NULL
);
