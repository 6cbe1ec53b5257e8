/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of a helper that are probed (gpu/PROTOCOL.md). */
#ifndef AIFLAME_PROBES_H
#define AIFLAME_PROBES_H

#include <stdint.h>

void aiflame_gpu_launch(uint64_t launch, uint64_t kernel, uint64_t queue);
void aiflame_gpu_bell(void);

#endif
