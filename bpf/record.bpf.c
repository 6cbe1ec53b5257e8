/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The one translation unit: the attach families share maps, and BCC gives each unit maps of its
 * own. Since BCC rewrites map accesses in the main file only, the files are pasted in place of their
 * #include lines before they are compiled; nothing else is done to the text.
 */
#define BPF_LICENSE GPL

#include <linux/types.h>
#include "offcpu.bpf.c"
#include "oncpu.bpf.c"
#include "calls.bpf.c"
#include "namings.bpf.c"
#include "lives.bpf.c"
#include "threads.bpf.c"
#include "sweeps.bpf.c"
