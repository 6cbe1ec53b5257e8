/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of a helper that are probed (gpu/PROTOCOL.md). */
#ifndef AIFLAME_PROBES_H
#define AIFLAME_PROBES_H

#include <stdbool.h>
#include <stdint.h>

void aiflame_gpu_launch(uint64_t launch, uint64_t kernel, uint64_t queue);
void aiflame_gpu_bell(void);
/* The process is over, and nobody has taken what it told. */
void aiflame_gpu_gone(uint64_t kernel_times);
/* Whether anybody listens to the bell. */
bool bell_is_probed(void);

#endif
