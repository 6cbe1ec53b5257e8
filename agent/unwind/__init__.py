# SPDX-License-Identifier: Apache-2.0
"""Unwind tables: what .eh_frame and .debug_frame say, in the form that the kernel half searches.

`build.build` makes the table of one binary, `walk.ReplayWalker` follows tables as the
kernel half does.
"""
