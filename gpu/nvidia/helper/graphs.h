/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which launch of a graph a kernel is of: CUPTI's number, unless what is known of launches refutes it.
 * For the helper's thread.
 */
#ifndef AIFLAME_GRAPHS_H
#define AIFLAME_GRAPHS_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti.h"

/* A session begins, after `newest` by number, with a CUPTI of that version. */
void graphs_begin(uint32_t version, uint64_t newest);
/* A graph is about to be launched. `id` is CUPTI's of the executable graph, 0: unknown. */
void graphs_see(uint64_t launch, uint64_t executable, uint32_t id, uint64_t at_ns);
/* Not all launches were seen, or not all kernels are told: nothing is known of their order. */
void graphs_miss_launches(void);
void graphs_miss_kernels(void);
/* Of CUPTI, by which kernels have an order. */
void graphs_clock_was_set(void);
/* The launch of a kernel; 0: unknown, which is counted where CUPTI's number is refuted. */
uint64_t graphs_launch_of(const struct cupti_kernel *kernel, uint64_t begin_ns);
/* Whether a sample's number says nothing, as it may be one of those that are refuted. */
bool graphs_doubt(uint64_t launch);

#endif
