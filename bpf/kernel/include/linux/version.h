/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The oldest kernel whose BPF features aiflame's programs use (inner maps of different sizes:
 * v5.10). BCC stores the code in each object; kernels since v5.0 do not check it.
 */
#ifndef AIFLAME_VERSION_H
#define AIFLAME_VERSION_H

#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 10, 0)

#endif
