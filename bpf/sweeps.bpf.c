/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Threads in a long wait that has no stack, since chance did not choose it: which they are, and the
 * kernel half of their stacks. The host half reads the rest from their registers and memory.
 *
 * Attach: none, as threads.bpf.c: it runs when its file is read.
 * Needs: what threads.bpf.c needs, and bpf_get_task_stack (v5.9).
 * Loses: nothing. A thread that wakes up meanwhile has no record, or one of a wait that is over.
 */
#include "offcpu.bpf.c"
#include "threads.bpf.c"

/* Declared by number: BCC's own list of helpers ends with the kernel it was made for. */
static long (*task_stack)(void *task, void *buffer, u32 size, u64 flags) = (void *)141;

/* Too large for the stack. Not per CPU: the host half reads one file at a time. */
BPF_ARRAY(swept_threads, struct swept_thread, 1);

/* The name tells BCC and the kernel what it is. */
int bpf_iter__task_sweep(struct task_iteration *ctx)
{
	struct swept_thread *record;
	struct swept_stack *swept;
	struct thread_state *thread;
	void *seq = *ctx->meta;
	void *task = ctx->task;
	u64 now_ns, switched_ns;
	u32 tid;

	if (!task)
		return 0;
	record = swept_threads.lookup(KEY(0));
	if (!record)
		return 0;
	tid = task_tid(task);
	thread = threads.lookup(KEY(tid));
	if (!thread || thread->weight != WEIGHT_NOT_CHOSEN || thread->off_class != CLASS_BLOCKED ||
	    thread->waking_ns)
		return 0;
	now_ns = bpf_ktime_get_ns();
	switched_ns = thread->switched_ns;
	/* It may have come back a moment ago, which would be a wait that begins in the future. */
	if ((s64)(now_ns - switched_ns) < (s64)OPEN_WAIT_NS)
		return 0;
	swept = swept_stacks.lookup(KEY(tid));
	if (swept && swept->switched_ns == switched_ns)
		return 0;
	record->switched_ns = switched_ns;
	record->ran_ns = thread->ran_ns;
	record->image = thread->image;
	record->tgid = thread->tgid;
	record->tid = tid;
	record->kernel_bytes = 0;
	if (host(WITH_KERNEL_STACKS))
		record->kernel_bytes = task_stack(task, record->kernel, sizeof(record->kernel), 0);
	seq_write(seq, record, sizeof(*record));
	return 0;
}
