/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions that a stack walk is to find. NOINLINE keeps one out of its caller. KEEP_FRAME() is for
 * functions that call nothing: GCC leaves the frame pointer out of those that need no stack, with
 * -fno-omit-frame-pointer and -mno-omit-leaf-frame-pointer too, and their caller is then missed.
 */
#ifndef AIFLAME_WORKLOADS_FRAMES_H
#define AIFLAME_WORKLOADS_FRAMES_H

#define NOINLINE __attribute__((noinline))
#define KEEP_FRAME() __asm__ volatile("" : : "r"(__builtin_frame_address(0)))

#endif
