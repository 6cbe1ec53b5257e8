# SPDX-License-Identifier: Apache-2.0
"""Python frames of running CPython processes: where they are, what they are called, which line.

`layouts` holds every fact that depends on the version, `interpreter` finds an interpreter in a
mapped binary, `threads` and `walk` read a process the way the kernel half does, `codes` and
`lines` turn a frame into a name and a line, and `splice` puts Python frames into native stacks.
Nothing here stops the target, writes to it, or needs it to co-operate.
"""
