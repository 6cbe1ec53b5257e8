/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* BCC's stack-trace macro names roundup_pow_of_two(); aiflame's programs use no such map. */
#ifndef AIFLAME_LOG2_H
#define AIFLAME_LOG2_H
#endif
