/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * All threads at one moment, with the registers with which they entered the kernel: what the host
 * half walks the stacks of sleeping threads from, since no probe sees them.
 *
 * Attach: none. An iterator over tasks runs when its file is read: BPF_LINK_CREATE, then
 * BPF_ITER_CREATE. The link may name one process (v6.1); else all tasks of the host are visited,
 * and the reader picks.
 * Needs: BPF_PROG_TYPE_TRACING with BPF_TRACE_ITER and bpf_seq_write (v5.8), and what task.h needs.
 * It has no maps: `dump` loads it alone.
 *
 * Loses: nothing. A record that finds no room is written anew at the next read. Threads that exit
 * have none, and one that is made or ends meanwhile may be missing.
 */
#include <linux/types.h>
#include "task.h"

/* Declared by number: BCC's own list of helpers ends with the kernel it was made for. */
static long (*seq_write)(void *seq, const void *data, u32 size) = (void *)127;

/* struct bpf_iter__task (kernel/bpf/task_iter.c); the first member of meta is the seq_file. */
struct task_iteration {
	void **meta;
	void *task; /* NULL after the last */
};

/* The name tells BCC and the kernel what it is. */
int bpf_iter__task(struct task_iteration *ctx)
{
	struct thread_registers record = {};
	struct user_regs regs = {};
	void *seq = *ctx->meta;
	void *task = ctx->task;

	if (!task)
		return 0;
	if (task_is_exiting(task))
		return 0;
	user_regs_of(&regs, task);
	record.instruction_pointer = regs.instruction_pointer;
	record.stack_pointer = regs.stack_pointer;
	record.frame_pointer = regs.frame_pointer;
	record.base_pointer = regs.base_pointer;
	record.thread_pointer = task_u64(task, host(TASK_THREAD_POINTER));
	record.started_ns = task_started_ns(task);
	record.ran_ns = task_ran_ns(task);
	record.voluntary_switches = task_u64(task, host(TASK_NVCSW));
	record.involuntary_switches = task_u64(task, host(TASK_NIVCSW));
	record.stopped_ns = task_stopped_ns(task);
	record.tgid = task_tgid(task);
	record.tid = task_tid(task);
	record.state = task_u32(task, host(TASK_STATE));
	record.is_on_cpu = task_u32(task, host(TASK_ON_CPU));
	bpf_probe_read_kernel(record.comm, sizeof(record.comm), task + host(TASK_COMM));
	seq_write(seq, &record, sizeof(record));
	return 0;
}
