/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The few kernel definitions that BCC's own headers need, so that programs compile on a machine
 * without kernel headers and on every kernel alike. BCC_KERNEL_SOURCE points at this tree.
 *
 * Nothing here describes kernel structs: their offsets come from BTF when a recording starts.
 * BCC includes this file before everything else; it wants it to exist as proof of a source tree.
 */
#ifndef AIFLAME_KCONFIG_H
#define AIFLAME_KCONFIG_H

#define CONFIG_BPF_SYSCALL 1 /* BCC refuses to compile without */

#endif
