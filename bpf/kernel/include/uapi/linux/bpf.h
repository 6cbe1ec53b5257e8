/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* BCC carries its own bpf.h and includes it before this file: nothing to add. */
#ifndef AIFLAME_BPF_H
#define AIFLAME_BPF_H
#endif
