# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself, into the capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiflame.agent.recording.kernel_accounts import Growth

if TYPE_CHECKING:
    from aiflame.agent.capture.writer import CaptureWriter


def put_accounts(writer: CaptureWriter, growth: Growth) -> None:
    """Writes the accounts of threads and processes that a capture has; it has all its windows."""
    threads, processes = writer.newest_threads(), writer.newest_processes()
    writer.put(
        "thread_accounts",
        [
            (threads[pid, tid], *times)
            for pid, tid, *times in growth.threads.tolist()
            if (pid, tid) in threads
        ],
    )
    writer.put(
        "delays",
        [
            (processes[delay.pid], delay.cause, delay.count, delay.ns)
            for delay in growth.delays
            if delay.pid in processes
        ],
    )
    writer.put_meta({"interrupted_ns": growth.interrupted_ns})
