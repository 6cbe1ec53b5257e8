/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Names of kernels by their handles: what namings.bpf.c was told, and calls.bpf.c looks up. */
#ifndef AIFLAME_KERNEL_NAMES_H
#define AIFLAME_KERNEL_NAMES_H

#include "callers.h"

/* Words of a name that its id is made of: longer ones differ in their beginning or in length. */
#define NAME_ID_WORDS 64

/* The least recently used go where there are more: then a handle is all that is known. */
BPF_TABLE("lru_hash", struct kernel_name_key, u64, kernel_names, SIZED_BY_HOST);

/* Puts the id of its name in the place of a kernel's handle, where it was told. */
static __always_inline void name_kernel(struct call_event *call)
{
	struct kernel_name_key key = { .image = call->image, .tgid = call->tgid };
	u64 *name_id;

	key.handle = call->kernel;
	name_id = call->kernel ? kernel_names.lookup(&key) : NULL;
	if (name_id) {
		call->kernel = *name_id;
		call->kind |= CALL_KERNEL_IS_NAMED;
	}
}

#endif
