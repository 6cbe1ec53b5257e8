/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The contract between the kernel half (bpf/) and the host half (agent/kernel/abi.py): every
 * struct, enum and limit that both sides see. A test compares the layouts; change both together.
 *
 * Times are CLOCK_MONOTONIC nanoseconds (bpf_ktime_get_ns) unless a name says otherwise.
 */
#ifndef AIFLAME_H
#define AIFLAME_H

/* Made of agent/losses.py when the programs are compiled (agent/kernel/compile.py). */
#include "losses.h"

/*
 * Frames kept of a stack, and of its Python frames: twice what perf keeps by default. Compilers that
 * follow a program by recursion are over 127 deep half of the time (mypy: 60 to 180).
 */
#define MAX_FRAMES 255
/* What their arrays have room for: a power of two, so that an index can be masked (host.h). */
#define FRAME_SLOTS 256
/* Of them the kernel's at most, which is its own default (kernel.perf_event_max_stack). */
#define MAX_KERNEL_FRAMES 127

/* Where nanoseconds went; SampleClass in agent/model/profile.py. */
enum sample_class {
	CLASS_ON_CPU = 0,
	CLASS_BLOCKED = 1, /* switch-out to wake-up */
	CLASS_WAITING_TO_RUN = 2, /* wake-up to switch-in */
	CLASS_PREEMPTED = 3, /* switched out while runnable, to switch-in */
};

/* How a user stack ended; StopReason in agent/model/profile.py. */
enum stop_reason {
	STOP_ROOTED = 0,
	STOP_KERNEL_ONLY = 1,
	STOP_NO_FRAME_POINTER = 2,
	STOP_UNREADABLE = 3,
	STOP_TOO_DEEP = 4,
	STOP_NOT_WALKED = 5,
	STOP_LOST = 6, /* set by the host half only */
	STOP_EXCLUDED = 7,
	STOP_ROOTED_BY_TABLE =
		8, /* a row says that the return address is undefined: the outermost */
	STOP_NO_TABLE =
		9, /* a caller in code that is in no mapping or has neither CFI nor frame pointer */
	STOP_UNSUPPORTED_RULE = 10, /* CFI that no rule expresses */
	STOP_ROOTED_BY_HEURISTIC =
		11, /* as ROOTED_BY_TABLE, a caller found by a checked heuristic */
	STOP_NO_TABLE_YET = 12, /* set by the host half only */
	STOP_NOT_RUN_YET = 13, /* likewise, for NOT_RUN_STACK */
	STOP_NOT_SAMPLED = 14, /* likewise, for NOT_SAMPLED_STACK */
};

/* How a row finds the CFA; RuleKind in agent/unwind/x86_64.py. */
enum rule_kind {
	RULE_NO_CFI = 0,
	RULE_RSP = 1, /* CFA = RSP + cfa_offset */
	RULE_RBP = 2, /* CFA = RBP + cfa_offset */
	RULE_RBP_DEREF = 3, /* CFA = *(RBP + cfa_offset) */
	RULE_PLT = 4, /* CFA = RSP + 8, and 8 more once (RIP & 15) >= cfa_offset */
	RULE_SIGNAL = 5, /* RSP, RIP, RBP = *(RSP + cfa_offset), *(... + 8), *(RSP + rbp_offset) */
	RULE_UNDEFINED_RA = 6,
	RULE_UNSUPPORTED = 7,
	/* From prologues, where there is no CFI. The return address must prove to be one. */
	RULE_RSP_HEURISTIC = 8, /* as RULE_RSP */
	RULE_RBP_HEURISTIC = 9, /* as RULE_RBP */
	/* From prologues or CFI. Only of a leaf, since callees' rules do not tell where RBX is. */
	RULE_RBX = 10, /* CFA = RBX + cfa_offset */
	/* From prologues. CFA = *(RSP + high half of cfa_offset) + low half. */
	RULE_RSP_SLOT = 11,
	/* Of code that changes to another stack, wherever that is. As RULE_RBP_HEURISTIC. */
	RULE_OTHER_STACK = 12,
};

/* Where a row finds the caller's RBP; RbpKind in agent/unwind/x86_64.py. */
enum rbp_kind {
	RBP_SAME = 0,
	RBP_AT_CFA = 1,
	RBP_AT_RBP = 2,
	RBP_AT_RSP = 3,
	RBP_UNKNOWN = 4,
};

/* Binaries with a table at the same time. */
#define TABLES_MAX 4096
/* A page of 512 bytes has six rows on average: a search takes three steps instead of eleven. */
#define TABLE_PAGE_SHIFT 9

struct unwind_rule {
	u8 kind; /* enum rule_kind */
	u8 rbp_kind; /* enum rbp_kind */
	s16 rbp_offset; /* bytes */
	s32 cfa_offset; /* bytes */
};

/*
 * One executable mapping of a process; address - bias is a distance from the table's first page.
 * Slot 0 of a process's mappings is none: start is its image, end the number of mappings, and bias
 * a random number, which no other mappings have, nor the same ones before they changed.
 */
struct mapping_slot {
	u64 start;
	u64 end;
	u64 bias;
	u32 table; /* slot in unwind_tables */
	u32 pages; /* of that table; 0: no table, and one of these in `table` where it tells why */
};

#define TABLE_IS_NONE 0xfffffffeu /* code of no file: it was generated */
#define TABLE_IS_MISSING 0xffffffffu /* there may be one */

/*
 * One slot each in `counters`: Counter in agent/kernel/abi.py, and LOST_NAME for each entry of
 * agent/losses.py that this half counts.
 */
enum counter {
	COUNTER_SAMPLES = 0, /* on-CPU samples of targets */
	COUNTER_SWITCHES, /* switch-outs of targets */
	COUNTER_STACKS_STORED, /* new entries in `stacks` since the programs were loaded */
	COUNTER_SUMS_STORED, /* new entries in either map of sums */
	COUNTER_WITHOUT_TABLES, /* user stacks walked by frame pointer: no tables yet */
	COUNTER_CALLS, /* calls of device APIs by targets */
	COUNTER_CALLS_STORED, /* new entries in either map of sums of calls */
	COUNTER_WAITS_CHOSEN, /* switch-outs of targets that took a stack by chance */
	KERNEL_HALF_LOSSES, /* LOST_STACK_STORE_FULL, ... */
	COUNTER_MAX,
};

/* First word of every record in the ring buffer. */
enum event_type {
	EVENT_PROCESS_SEEN = 1, /* first capture in a process image: read its mappings now */
	EVENT_PROCESS_EXIT = 2,
	EVENT_THREAD_EXIT = 3,
	EVENT_WAIT = 4, /* an off-CPU wait over the threshold */
	EVENT_DRAIN = 5, /* stacks or sums are filling: do not wait for the interval to end */
	EVENT_CALL = 6, /* a call of a device API, where each was asked for */
	EVENT_KERNEL_NAMED = 7, /* a device API tied a name to a kernel's handle */
	EVENT_SAMPLE = 8, /* an on-CPU sample of a process whose samples have a time */
	EVENT_EXEC = 9, /* the arguments of a program, which may end before anybody asks */
	EVENT_BELL = 10, /* a helper has something to tell that should not wait */
	EVENT_LEFT_OUT_EXEC = 11, /* a process that is left out has become another program */
};

/* Bits of process_state.flags. */
#define PROCESS_TARGET 1u
#define PROCESS_EXCLUDED 2u /* the recorder and its children */
#define PROCESS_SEEN 4u /* EVENT_PROCESS_SEEN was sent for this image */
#define PROCESS_AT_EXEC 8u /* becomes a target when it calls exec */
#define PROCESS_SETTLED 16u /* it was sent when the image's libraries were mapped */
#define PROCESS_GONE 32u /* its helper has said what nobody has taken */
#define PROCESS_LEFT_OUT 64u /* no target, by what the host half knows of it */
#define PROCESS_ARGUMENTS_DUE 128u /* they were not sent at its exec, and are if it is announced */

/* Bits of thread_state.flags. */
#define THREAD_SEEDED 1u /* entered by the host half when the recording started */

/* Which processes are recorded: HOST_FILTER's values; Filter in agent/kernel/abi.py. */
#define FILTER_PIDS 0
#define FILTER_CGROUP 1
#define FILTER_ALL 2

/* Constants that the loader puts into the programs (host.h); HostConstant in agent/kernel/abi.py. */
enum host_constant {
	HOST_FILTER = 0, /* FILTER_* */
	HOST_WITH_OFF_CPU, /* 0: on_switch and on_waking are not attached, no thread state is kept */
	HOST_WITH_USER_STACKS,
	HOST_WITH_KERNEL_STACKS,
	HOST_WITH_CALLS, /* of device APIs */
	HOST_WITH_EXCLUDED, /* what is in `excluded_cgroups` is not recorded */
	HOST_BY_CHANCE, /* 0: each switch-out takes a stack */
	HOST_KERNEL_FRAMES_MAX, /* the kernel cuts stacks there: kernel.perf_event_max_stack */
	HOST_HAS_TASK_PT_REGS, /* the helper bpf_task_pt_regs (v5.15) */
	HOST_HAS_ATTACH_COOKIE, /* the helper bpf_get_attach_cookie (v5.15) */
	HOST_HAS_CGROUP_ID, /* the helper bpf_get_current_cgroup_id (v4.18, CONFIG_CGROUPS) */
	HOST_SWITCH_HAS_STATE, /* sched_switch hands over the state that decided (v5.18) */
	HOST_THREAD_SIZE, /* bytes of a kernel stack */
	HOST_HAS_LAST_ARRIVAL, /* CONFIG_SCHED_INFO: TASK_LAST_ARRIVAL is known */
	HOST_TASK_PID, /* from here on offsets in bytes */
	HOST_TASK_TGID,
	HOST_TASK_COMM,
	HOST_TASK_GROUP_LEADER,
	HOST_TASK_FLAGS,
	HOST_TASK_STATE,
	HOST_TASK_STACK,
	HOST_TASK_SIGNAL,
	HOST_TASK_REAL_PARENT,
	HOST_TASK_START_TIME,
	HOST_TASK_RAN, /* se.sum_exec_runtime */
	HOST_TASK_RAN_BEFORE, /* se.prev_sum_exec_runtime */
	HOST_TASK_NVCSW,
	HOST_TASK_NIVCSW,
	HOST_TASK_LAST_ARRIVAL, /* sched_info.last_arrival */
	HOST_TASK_POLICY,
	HOST_TASK_ON_CPU,
	HOST_TASK_THREAD_POINTER, /* thread.fsbase */
	HOST_SIGNAL_LIVE,
	HOST_TASK_MM,
	HOST_MM_ARG_START,
	HOST_MM_ARG_END,
	HOST_MAX,
};

/* Slots of `settings`, written by the host half while programs run. */
enum setting {
	/*
	 * Where the open window begins, monotonic; set a moment ahead. From then on programs write the
	 * one of the two sum maps that its lowest bit names, before it the one of the boundary before.
	 */
	SETTING_BOUNDARY_NS = 0,
	SETTING_END_NS =
		1, /* programs ignore what happens from then on; 0: nothing is recorded yet */
	SETTING_STACKS_DRAIN = 2, /* EVENT_DRAIN is due after this many new stacks of one CPU */
	SETTING_SUMS_DRAIN = 3, /* the same for sums */
	SETTING_CALLS_DRAIN = 4, /* and for sums of API calls */
	SETTING_PERIOD_NS = 5, /* weight of one on-CPU sample */
	SETTING_FOLLOW_CHILDREN = 6, /* 1: children of targets are targets */
	SETTING_WAIT_EVENT_NS = 7, /* waits from this length on are sent one by one */
	SETTING_CALL_EVENTS = 8, /* API calls sent one by one each second and CPU; 0 for none */
	SETTING_BOUNDARY_BEFORE_NS = 9, /* set before SETTING_BOUNDARY_NS is, to what that was */
	SETTING_TIMED_SAMPLES = 10, /* EVENT_SAMPLE of each second and CPU; 0 for none */
	/* Runs of launches that are told apart each second. */
	SETTING_LAUNCH_RUNS = 11,
	SETTING_STACK_COPIES = 12, /* stacks copied in each second and process; 0 for none */
	/* With HOST_BY_CHANCE: of cgroups that are not in `chances`, one switch-out in so many. */
	SETTING_ONE_IN = 13,
	SETTING_CHANCES_NUMBER = 14, /* another one whenever chances have changed */
	/* Threads that wait less often than this have all their waits taken. */
	SETTING_SPACING_NS = 15,
	/* One on-CPU sample in so many has a stack, and the weight of all; 0 as 1. */
	SETTING_SAMPLES_ONE_IN = 16,
	/*
	 * With HOST_BY_CHANCE: until it is so old, a process of a cgroup that is in `chances` is announced
	 * at an on-CPU sample alone, its waits take no stack, and its threads' ends are added to those of
	 * others; 0: at any time. LONG_WAIT_NS or less.
	 */
	SETTING_DETAILS_AFTER_NS = 17,
	/* Of waits that SETTING_WAIT_EVENT_NS has sent, shorter ones are counted alone; 0: none. */
	SETTING_WAIT_LISTED_NS = 18,
	SETTING_MAX,
};

/* How many of a kind there were in the second that began at second_ns. */
struct event_budget {
	u64 second_ns;
	u64 sent;
};

struct process_state {
	u64 image; /* identity of the process image: ns at which it was first known */
	u32 flags;
	u32 asked; /* how often the host half was asked to read its mappings again */
	u64 asked_ns; /* when it was last asked */
	struct event_budget copies; /* of stacks */
	struct event_budget bells;
	u32 one_in; /* switch-outs of its cgroup, as of chances_number */
	u32 chances_number; /* SETTING_CHANCES_NUMBER when it was looked up */
	/* The process whose mappings it was forked with and has until an exec; 0: none. */
	u32 mappings_tgid;
	u32 unused;
	u64 mappings_image;
};

/*
 * The interval in which a thread was at the last boundary of windows, once it is over: the host half
 * charges the part of an interval before a boundary, programs the part after it.
 */
struct crossing {
	u64 boundary_ns; /* 0: none yet */
	u64 on_cpu_ns; /* thread_state.on_cpu_ns at the boundary */
	u64 stack; /* from here on as in thread_state */
	u64 switched_ns;
	u64 waking_ns;
	u32 off_class;
	u32 weight;
};

/*
 * Weights of intervals off the CPU. An interval without chance is exact: it counts as it is. Of
 * those by chance, one that was chosen has a stack and stands for so many, and others have none.
 */
#define WEIGHT_EXACT 0u
#define WEIGHT_NOT_CHOSEN 0xffffffffu
/* No more than this: one in 65,536 switch-outs is as good as none. */
#define WEIGHT_MAX 65536u

/* From this length on a wait is exact, whether it was chosen or not: few are, and they matter. */
#define LONG_WAIT_NS 1000000000ull
/*
 * So is one that was as old as this when a window closed: what it had of that window is told then,
 * when nobody knows how long it will be.
 */
#define OPEN_WAIT_NS 100000000ull

/*
 * All intervals by chance of a thread since it is known, chosen or not, by enum sample_class. It has
 * two of these, as there are two maps of sums: programs write one while the host half reads the
 * other. In place of CLASS_ON_CPU, which is none of them, its wait to run for the first time: that
 * is exact, and a sum of its own would be most of a host's rows that starts programs all the time.
 */
struct chance_total {
	u64 ns[4];
	u32 count[4];
};

#define TOTAL_NOT_RUN CLASS_ON_CPU

/* Images of processes that are told of together. */
struct short_lived_key {
	u64 cgroup_id;
	u32 parent_tgid;
	u32 unused;
	char comm[16]; /* empty where it has become another program */
};

/* What their threads had of one window, in which they were made and have ended. */
struct short_lived_total {
	u64 images; /* whose first thread has ended, by exit or exec */
	u64 on_cpu_ns;
	u64 observed_ns;
	struct chance_total by_chance;
};

struct thread_state {
	u64 started_ns; /* task_struct.start_time: tells a reused thread id apart */
	u64 first_seen_ns;
	u64 switched_ns; /* last switch, in or out; 0: not yet known */
	u64 waking_ns; /* first wake-up since the switch-out, or 0 */
	u64 stack; /* id of the stack at switch-out */
	u64 on_cpu_ns; /* exact time on a CPU between known switches */
	u64 ran_ns; /* task_struct.se.sum_exec_runtime at the switch-out */
	u64 image;
	u32 tgid;
	u32 off_class; /* CLASS_ON_CPU while it runs, else how it was switched out */
	u32 flags;
	u32 weight; /* of the interval off the CPU: WEIGHT_*, or how many it stands for */
	u64 out_ns; /* last switch-out */
	u64 gap_ns; /* between switch-outs, on a moving average */
	struct crossing crossing;
	struct chance_total by_chance[2];
};

struct stack_record {
	u64 image;
	u64 python; /* id in `python_chains`, 0 for none */
	u32 tgid;
	u16 kernel_depth; /* frames used of frames[] by the kernel's half */
	u16 user_depth; /* and after them by the user's */
	u16 end; /* enum stop_reason */
	u16 kernel_cut; /* 1: more kernel frames than MAX_KERNEL_FRAMES */
	u32 gil; /* enum python_gil */
	u64 call_return; /* inside a call of a device API: where that returns to; else 0 */
	u32 call; /* and its slot in `api_calls` */
	u32 unused;
	u64 frames[FRAME_SLOTS]; /* each half leaf first */
};

/*
 * Of a stack, from the page that the stack pointer is in; most stacks end before. OpenBLAS has
 * buffers of 28 KB on it (kernel/x86_64/dgemm_kernel_4x8_haswell.S, v0.3.21).
 */
#define STACK_COPY_PAGES 16
#define STACK_PAGE_BYTES 4096

/*
 * A stack whose walk met code without a table: as far as it was walked, and what it takes to walk on
 * from there. Sums and calls know it by an id of its own.
 */
struct stack_copy {
	u64 stack; /* its id */
	u64 depth; /* user frames of the record up to that code, and in it */
	u64 instruction_pointer; /* registers of the last of these frames */
	u64 stack_pointer;
	u64 frame_pointer;
	u64 base_pointer; /* of the leaf */
	u32 is_exact; /* 0: the instruction pointer is a return address */
	u32 has_frame_pointer;
	u64 pages; /* how many could be read, from the page of the stack pointer on */
	struct stack_record record; /* walked on without that table */
	u8 memory[STACK_COPY_PAGES * STACK_PAGE_BYTES];
};

/* What a thread had to do with the GIL when its stack was taken. */
enum python_gil {
	PYTHON_GIL_NONE = 0, /* no Python on this stack, or none that Python knows of */
	PYTHON_GIL_HELD = 1,
	PYTHON_GIL_NOT_HELD = 2, /* waiting for it, or released: its native frames tell */
	PYTHON_GIL_UNKNOWN = 3,
};

/* How a walk of Python frames ended; WalkEnd in agent/python/walk.py. */
enum python_end {
	PYTHON_COMPLETE = 0,
	PYTHON_TOO_DEEP = 1,
	PYTHON_UNREADABLE = 2,
	PYTHON_BAD_POINTER = 3,
	PYTHON_LOOP = 4,
};

/* Enums of agent/python/layouts.py: Position, RunEnd, GilHolder; SHIM_OWNER, ACTIVE_FLAG. */
#define PYTHON_POSITION_UNITS 1
#define PYTHON_POSITION_POINTER 2
#define PYTHON_RUN_EVERY_FRAME 0
#define PYTHON_RUN_ENTRY_BYTE 1
#define PYTHON_RUN_SHIM 2
#define PYTHON_SHIM_OWNER 3
#define PYTHON_GIL_RUNTIME 0
#define PYTHON_GIL_INTERPRETER 1
#define PYTHON_ACTIVE_FLAG 16

/* The eval loop, and the parts that compilers move out of it. */
#define PYTHON_EVAL_RANGES 4

/* An interpreter in a process, written by the host half: Layout in agent/python/layouts.py. */
struct python_process {
	u64 image;
	u64 eval_start[PYTHON_EVAL_RANGES]; /* addresses of the process */
	u64 eval_bytes[PYTHON_EVAL_RANGES]; /* 0: no such range */
	u64 gil; /* address of a pointer to the holder, for PYTHON_GIL_RUNTIME */
	u64 state_slot; /* from the thread pointer to where the thread keeps its thread state */
	u32 thread_frame; /* offsets in bytes from here on */
	u32 thread_status; /* for PYTHON_GIL_INTERPRETER */
	u32 cframe_frame;
	u32 frame_code;
	u32 frame_previous;
	u32 frame_position;
	u32 frame_mark;
	u32 frame_bytes;
	u32 code_instructions;
	u32 code_tags; /* bits to clear in a pointer to code */
	u32 code_copies; /* 0: all threads run the same instructions */
	u32 frame_copy;
	u8 position_kind;
	u8 run_end;
	u8 gil_kind;
	u8 has_cframe;
	u32 unused;
};

/* Of the address of a code object, which is a multiple of 8: its frame was entered from C. */
#define PYTHON_ENDS_RUN 1

struct python_chain {
	u64 image;
	u32 tgid;
	u16 depth; /* frames used */
	u16 end; /* enum python_end */
	u64 codes[FRAME_SLOTS]; /* leaf first: code objects; 0: an eval loop without a frame */
	s32 positions[FRAME_SLOTS]; /* bytes from the first instruction of each */
};

/* The stack of a thread between fork and its first instruction: there is none to be walked. */
#define NOT_RUN_STACK 1ull
/* The stack of an interval that was not chosen to have one. */
#define NOT_SAMPLED_STACK 2ull

/* A stack that the host half has read of a thread in a long wait: the one that began at switched_ns. */
struct swept_stack {
	u64 switched_ns;
	u64 stack;
};

struct sum_key {
	u64 stack; /* id in `stacks`, 0 for none */
	u64 image; /* a thread that has not run yet has no stack that would tell */
	u32 tgid;
	u32 tid;
	u32 sample_class;
	u32 weight; /* of each interval: WEIGHT_EXACT, or how many it stands for */
};

struct sum_value {
	u64 count; /* samples, or intervals */
	u64 ns;
};

struct process_event {
	u32 type;
	u32 tgid;
	u32 parent_tgid;
	u32 unused;
	u64 image;
	u64 ns;
	u64 cgroup_id; /* inode of the cgroup v2 directory */
	char comm[16];
};

/* Of the arguments of a program: what tells the runs of a compiler apart. */
#define ARGUMENTS_BYTES 256

struct exec_event {
	u32 type;
	u32 tgid;
	u64 image;
	u32 size; /* bytes of `arguments` that are known */
	u32 unused;
	char arguments[ARGUMENTS_BYTES]; /* a NUL after each */
};

struct thread_event {
	u32 type;
	u32 tgid;
	u32 tid;
	u32 parent_tgid;
	u64 image;
	u64 ns;
	u64 first_seen_ns;
	u64 on_cpu_ns;
	struct crossing crossing;
	struct chance_total by_chance[2];
	u64 cgroup_id; /* of v2; 0 where the kernel does not tell */
	char comm[16];
};

struct wait_event {
	u32 type;
	u32 tgid;
	u32 tid;
	u32 unused;
	u64 stack;
	u64 image;
	u64 start_ns;
	u64 blocked_ns;
	u64 runnable_ns;
};

struct bell_event {
	u32 type;
	u32 tgid;
	u64 image;
	u64 kernel_times; /* that go with the process's memory, as nobody has taken them */
};

/* Functions of device APIs that can be told apart; a number is given out for each by the host half. */
#define API_CALLS_MAX 1024
/* Sites where they are probed, in all files; and APIs. */
#define API_PROBES_MAX 8192
#define APIS_MAX 8
/* Of the work and bytes of one call: sums of hostile ones must not overflow. */
#define CALL_SIZE_MAX (1ull << 46)

/* How a launch says what it launches; Grid in gpu/apis/base.py. */
#define GRID_NONE 0
#define GRID_DIM3 1
#define GRID_NUMBERS 2
#define GRID_CONFIG 3
#define GRID_OPENCL 4
#define GRID_COUNTS 5

/* Where a function that names a kernel leaves its handle; HandleFrom in gpu/apis/base.py. */
#define HANDLE_ARGUMENT 0
#define HANDLE_POINTED 1
#define HANDLE_RETURNED 2

/* What a call has waited for when it returns; WaitsFor in gpu/apis/base.py. */
#define WAITS_FOR_NOTHING 0
#define WAITS_FOR_QUEUE 1 /* all that was on the queue that is its argument */
#define WAITS_FOR_PROCESS 2 /* all that was on any queue of the process */
#define WAITS_FOR_EVENTS 3 /* (count, list): launches of these events, and what was before each */

/* OPERATION_LAUNCH is Operation.LAUNCH in agent/model/gpu.py. */
#define OPERATION_LAUNCH 0

/* Argument in gpu/apis/base.py. */
struct api_argument {
	u8 is_used;
	u8 number;
	u8 is_pointer; /* 1: the argument points to what holds the value at `offset` */
	u8 size_bytes; /* 4 or 8 */
	u32 offset; /* bytes */
};

/* Call and Naming in gpu/apis/base.py; the host half writes one for each probed function. */
struct api_call {
	struct api_argument kernel; /* of a naming: the handle, or where it will be */
	struct api_argument queue;
	struct api_argument bytes; /* of a bell: kernel times that nobody has taken */
	struct api_argument kind; /* of a copy */
	struct api_argument name; /* of a naming */
	struct api_argument alias; /* of a naming: a handle that has the name */
	struct api_argument event; /* of a launch: where its event will be */
	struct api_argument blocking; /* it waits only where this is not 0 */
	struct api_argument launch_id; /* of a launch: its number, 0 for none */
	u32 grid; /* GRID_* */
	u32 handle_from; /* HANDLE_*, of a naming */
	u32 api; /* number of its API, below APIS_MAX */
	u32 operation; /* Operation in agent/model/gpu.py */
	u32 waits_for; /* WAITS_FOR_* */
	u32 unused;
};

/* One site where a function is probed; its number is the attach cookie. */
struct api_probe {
	u64 before_bytes; /* from the probe back to the start of the code that is inside the call */
	u64 after_bytes; /* and on to its end */
	u32 call; /* slot in `api_calls` */
	u32 stack_bytes; /* what the function has pushed before the probe */
};

struct call_key {
	u64 stack; /* id in `stacks` */
	u64 image;
	u64 kernel; /* handle or host address; 0 for what is no launch */
	u64 queue; /* of a launch */
	u64 run; /* of a launch: time of the first of its run, 0 where runs are not told apart */
	u32 tgid;
	u32 tid;
	u32 call; /* slot in `api_calls` */
	u32 kind; /* of a copy: its direction as the API counts them; or CALL_KERNEL_IS_NAMED */
};

/* `kernel` is the name_id that came with its name, not a handle: handles are used again. */
#define CALL_KERNEL_IS_NAMED 0x80000000u

struct call_value {
	u64 count; /* 0: it tells the number of a launch that is counted elsewhere */
	u64 work; /* work items in all */
	u64 bytes;
	u64 first_ns; /* from here on of launches */
	u64 last_ns;
	u64 waited_from_ns; /* what was on the queue then */
	u64 waited_until_ns; /* had ended by then; 0: not known */
	u64 launch_id; /* of the one launch of its run; 0: it has none */
};

/* A queue, or all of a process (ALL_QUEUES). */
struct queue_key {
	u64 image;
	u64 queue;
	u64 tgid;
};

/* As queues of a process: no queue has these handles. CUDA's cudaStreamLegacy is 1 (driver_types.h). */
#define ALL_QUEUES (~0ull)
#define DEFAULT_QUEUE 1

/* What is known of a queue: the run of launches that is open, and the last wait that is over. */
struct queue_state {
	u64 run; /* time of its first launch; 0: none */
	u64 run_hash; /* the same for equal launches */
	u64 waited_from_ns;
	u64 waited_until_ns;
};

/* An on-CPU sample with its time. It is counted with its stack as all others are. */
struct sample_event {
	u32 type;
	u32 tid;
	u64 stack;
	u64 ns;
};

struct call_event {
	u32 type;
	u32 tgid;
	u32 tid;
	u32 call;
	u64 stack;
	u64 image;
	u64 ns;
	u64 kernel;
	u64 queue;
	u64 bytes;
	u32 kind;
	u32 grid[3]; /* in the API's own units: blocks, groups or work items */
	u32 block[3];
	u32 unused;
};

/* Longer ones, of C++ templates, the host half reads from the process itself. */
#define KERNEL_NAME_BYTES 1024

/* What a process calls a kernel by its handle, and, with a name_id as handle, which names it has. */
struct kernel_name_key {
	u64 image;
	u64 handle;
	u64 tgid;
};

struct kernel_named_event {
	u32 type;
	u32 tgid;
	u64 image;
	u64 handle;
	u64 alias; /* a handle that has the name, where there is none here; else 0 */
	u64 name_address;
	u64 name_id; /* the same for the same name */
	u32 call; /* slot in `api_calls` */
	u32 name_bytes; /* with its zero; KERNEL_NAME_BYTES where it is cut */
	char name[KERNEL_NAME_BYTES]; /* only name_bytes of it are sent */
};

/*
 * What threads.bpf.c tells of a thread. Two readings that are equal have no run of the thread
 * between them: a thread that runs uses time.
 */
struct thread_registers {
	u64 started_ns; /* since the boot, as thread_state.started_ns */
	u64 ran_ns; /* task_struct.se.sum_exec_runtime */
	u64 voluntary_switches;
	u64 involuntary_switches;
	u64 instruction_pointer; /* as it entered the kernel; 0 for a kernel thread */
	u64 stack_pointer;
	u64 frame_pointer;
	u64 base_pointer;
	u64 thread_pointer; /* the FS base: where thread-local storage is */
	u64 stopped_ns; /* when it last left a CPU, by the scheduler's clock; 0 where unknown */
	u32 tgid;
	u32 tid;
	u32 state; /* task_struct.__state: 0 for a thread that runs or may run */
	u32 is_on_cpu;
	char comm[16];
};

/* Of a sleeper's kernel half: most are less than 20 frames deep. */
#define SWEPT_FRAMES 32

/* What sweeps.bpf.c tells of a thread that has slept long, and that has no stack. */
struct swept_thread {
	u64 switched_ns;
	u64 ran_ns; /* as in thread_state */
	u64 image;
	u32 tgid;
	u32 tid;
	s64 kernel_bytes; /* of `kernel`, or what the kernel said */
	u64 kernel[SWEPT_FRAMES]; /* leaf first */
};

#endif
