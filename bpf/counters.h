/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Named counters, one set a CPU: every path that loses something bumps its own. */
#ifndef AIFLAME_COUNTERS_H
#define AIFLAME_COUNTERS_H

#include "host.h"

BPF_PERCPU_ARRAY(counters, u64, COUNTER_MAX);

static __always_inline void count(u32 slot)
{
	u64 *value = counters.lookup(KEY(slot));

	if (value)
		*value += 1;
}

#endif
