# SPDX-License-Identifier: Apache-2.0
"""Loads a library into a live process, where what has to be measured is told inside only.

`inject` is the way in. `fitness` tells whether a process can be asked at all, `remote_exec` has
CPython do it by itself. `threads` tells which of its threads may be lent, `seccomp` what its
filters would do; `requests` is what a thread is handed, and `code` (code.S) what it runs then.
`tracer` holds threads, in a process of its own (`tracer_worker`) that may be killed at any moment:
the target goes on, by itself if it has to.
"""
