# SPDX-License-Identifier: Apache-2.0
"""From the addresses of a window to frames: kernel, native, Python.

A window has all that naming needs but the files that processes had mapped. What stays unnamed keeps
its module and offset. Nothing here knows who records, or what becomes of the names.
"""
