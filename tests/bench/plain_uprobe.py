# SPDX-License-Identifier: Apache-2.0
"""What one writes with BCC in ten minutes: counts calls by frame-pointer stack. For comparison.

`plain_uprobe.py LIBRARY SYMBOL OFFSET`; runs in the distribution's interpreter, which has bcc.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# Kernel headers need not be installed: this much of them is enough.
os.environ["BCC_KERNEL_SOURCE"] = str(Path(__file__).resolve().parents[2] / "bpf" / "kernel")
import bcc

_TEXT = b"""
#include <linux/types.h>
#define roundup_pow_of_two(n) (n)
BPF_STACK_TRACE(traces, 16384);
struct key { u32 pid; int stack; };
BPF_HASH(calls, struct key, u64);
int on_call(void *ctx)
{
	struct key key = { .pid = bpf_get_current_pid_tgid() >> 32 };

	key.stack = traces.get_stackid(ctx, BPF_F_USER_STACK);
	calls.increment(key);
	return 0;
}
"""


def main() -> None:
    """Attaches, and waits for a signal."""
    library, symbol, offset = sys.argv[1].encode(), sys.argv[2].encode(), int(sys.argv[3])
    program = bcc.BPF(text=_TEXT)
    program.attach_uprobe(name=library, sym=symbol, sym_off=offset, fn_name=b"on_call")
    print("live", flush=True)
    signal.sigwait({signal.SIGINT})


if __name__ == "__main__":
    main()
