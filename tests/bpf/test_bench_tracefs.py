# SPDX-License-Identifier: Apache-2.0
"""The bench on a machine where nobody has mounted tracefs, as in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from bench import run

pytestmark = pytest.mark.bpf

_HIDE = "umount -l /sys/kernel/debug/tracing /sys/kernel/tracing 2>/dev/null; "


def _in_a_namespace(script: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", _HIDE + script],
        env={**os.environ, "PYTHONPATH": path, "BENCH": run.__file__, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_tracefs_is_mounted_for_the_tools_that_want_it() -> None:
    provide = "from bench import machine; machine.provide_tracefs(); machine.provide_tracefs()"
    done = _in_a_namespace(f'"$PYTHON" -c "{provide}"; ls /sys/kernel/tracing/events/sched')
    assert "sched_switch" in done.stdout, done.stderr
    # The second time there is nothing to do.
    assert done.stderr.count("mounted /sys/kernel/tracing") == 1


def test_bench_without_tracefs_says_so() -> None:
    # GIVEN nothing that tracefs could be mounted on
    done = _in_a_namespace('mount -t tmpfs none /sys/kernel && exec "$PYTHON" "$BENCH" events')
    assert done.returncode == 1
    assert done.stderr.startswith("bench: bpftrace and perf need /sys/kernel/tracing"), done.stderr
    assert "Traceback" not in done.stderr
