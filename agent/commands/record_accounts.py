# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself, into the capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiflame.agent.recording.kernel_accounts import Growth

if TYPE_CHECKING:
    from aiflame.agent.capture.writer import CaptureWriter


def put_accounts(writer: CaptureWriter, growth: Growth) -> None:
    """Writes the accounts of threads and processes that a capture has; it has all its windows."""
    threads, known_threads = writer.newest_threads(), writer.ids("threads")
    accounts = {row[0]: row for row in growth.ended.tolist() if row[0] in known_threads}
    for pid, tid, *times in growth.threads.tolist():
        # Also of a thread that has ended, and that nobody has waited for: this is all of it.
        if (pid, tid) in threads:
            accounts[threads[pid, tid]] = (threads[pid, tid], *times, 0)
    writer.put("thread_accounts", accounts.values())
    processes, known_processes = writer.newest_processes(), writer.ids("processes")
    delays = {(one.process, one.cause): (one.count, one.ns) for one in growth.ended_delays}
    for delay in growth.delays:
        # Likewise, and of a process that goes on without its main thread.
        if delay.pid in processes:
            delays[processes[delay.pid], delay.cause] = (delay.count, delay.ns)
    rows = [(*key, *waits) for key, waits in delays.items() if key[0] in known_processes]
    writer.put("delays", rows)
    writer.put_meta({"interrupted_ns": growth.interrupted_ns})
