/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Reads of struct task_struct. Offsets are the host's (host.h), from BTF (/sys/kernel/btf/vmlinux):
 * no kernel header, no kernel version is assumed.
 */
#ifndef AIFLAME_TASK_H
#define AIFLAME_TASK_H

#include "aiflame.h"
#include "arch.h"
#include "host.h"

/* Kernel threads (include/linux/sched.h, unchanged since v2.6.27). */
#define PF_KTHREAD 0x00200000u
/* Set at the start of do_exit (at the same line, unchanged since v2.6.12). */
#define PF_EXITING 0x00000004u

/* Declared by number: BCC's own list of helpers ends with the kernel it was made for. */
static void *(*current_task_btf)(void) = (void *)158; /* bpf_get_current_task_btf, v5.11 */
static long (*task_pt_regs_of)(void *task) = (void *)175; /* bpf_task_pt_regs, v5.15 */

static __always_inline void *current_task(void)
{
	return (void *)bpf_get_current_task();
}

static __always_inline u32 task_u32(void *task, u32 offset)
{
	u32 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), task + offset);
	return value;
}

static __always_inline u64 task_u64(void *task, u32 offset)
{
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), task + offset);
	return value;
}

static __always_inline u32 task_tid(void *task)
{
	return task_u32(task, host(TASK_PID));
}

static __always_inline u32 task_tgid(void *task)
{
	return task_u32(task, host(TASK_TGID));
}

static __always_inline u64 task_started_ns(void *task)
{
	return task_u64(task, host(TASK_START_TIME));
}

/* Time on a CPU by the scheduler's own account, up to date when the task goes off it. */
static __always_inline u64 task_ran_ns(void *task)
{
	return task_u64(task, host(TASK_RAN));
}

/* SCHED_NORMAL, SCHED_BATCH, SCHED_IDLE (include/uapi/linux/sched.h). */
#define FAIR_POLICIES (1u << 0 | 1u << 3 | 1u << 5)

/* Whether the fair class runs a task: only that keeps apart what a task used before. */
static __always_inline bool task_is_fair(void *task)
{
	u32 policy = task_u32(task, host(TASK_POLICY));

	return policy < 32 && FAIR_POLICIES >> policy & 1;
}

/* Time on a CPU since a task of the fair class last came to one, as task_ran_ns has it. */
static __always_inline u64 task_ran_since_ns(void *task)
{
	return task_u64(task, host(TASK_RAN)) - task_u64(task, host(TASK_RAN_BEFORE));
}

/*
 * When a task that is off the CPU left it, by the scheduler's clock (rq_clock): when it got there,
 * and the time that it used since. 0: not known.
 */
static __always_inline u64 task_stopped_ns(void *task)
{
	u64 arrived;

	if (!host(HAS_LAST_ARRIVAL))
		return 0;
	arrived = task_u64(task, host(TASK_LAST_ARRIVAL));
	if (arrived && task_is_fair(task))
		return arrived + task_ran_since_ns(task);
	return 0;
}

static __always_inline u32 task_parent_tgid(void *task)
{
	return task_tgid((void *)task_u64(task, host(TASK_REAL_PARENT)));
}

static __always_inline bool task_is_exiting(void *task)
{
	return task_u32(task, host(TASK_FLAGS)) & PF_EXITING;
}

/* The name of the task's process: that of its first thread. */
static __always_inline void task_process_name(void *task, char *name, u32 size)
{
	void *leader = (void *)task_u64(task, host(TASK_GROUP_LEADER));

	bpf_probe_read_kernel(name, size, leader + host(TASK_COMM));
}

/* True once the last thread of the task's process has begun to exit. */
static __always_inline bool process_is_dead(void *task)
{
	return task_u32((void *)task_u64(task, host(TASK_SIGNAL)), host(SIGNAL_LIVE)) == 0;
}

/* Where the kernel saved the registers with which a task last entered it; `task` is BTF's kind. */
static __always_inline void *saved_regs_of(void *task)
{
	if (host(HAS_TASK_PT_REGS))
		return (void *)task_pt_regs_of(task);
	/* They end where the kernel stack begins (arch/x86/include/asm/processor.h). */
	return (void *)task_u64(task, host(TASK_STACK)) + host(THREAD_SIZE) -
	       sizeof(struct pt_regs);
}

/* The registers with which a task last entered the kernel; ip 0 for a kernel thread. */
static __always_inline void read_user_regs(struct user_regs *out, void *task, bool is_current)
{
	struct pt_regs regs = {};

	if (task_u32(task, host(TASK_FLAGS)) & PF_KTHREAD) {
		out->instruction_pointer = 0;
		return;
	}
	bpf_probe_read_kernel(&regs, sizeof(regs), saved_regs_of(task));
	user_regs_from(out, &regs);
	if (is_current)
		out->return_address = return_address_of_vfork(&regs);
}

/* The same of any task: its memory is not at hand. */
static __always_inline void user_regs_of(struct user_regs *out, void *task)
{
	read_user_regs(out, task, false);
}

/* The same of the current task. */
static __always_inline void current_user_regs(struct user_regs *out)
{
	if (host(HAS_TASK_PT_REGS))
		read_user_regs(out, current_task_btf(), true);
	else
		read_user_regs(out, current_task(), true);
}

#endif
