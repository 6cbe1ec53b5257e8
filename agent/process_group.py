# SPDX-License-Identifier: Apache-2.0
"""What keeps a Ctrl-C at the terminal from children: it is for the recorder, which ends them.

A process group of their own does, and so would a session; but each session is also a scheduling
group of its own (autogroups, sched(7)), and on some kernels a new one starves. Beside two busy
pairs of processes that wake each other, one pair for each CPU, a child in a new session got its
first time on a processor when the pairs ended, after 4.8 to 9.4 s, and one in a new process group
at once (v6.18).
"""

from __future__ import annotations

import os
import sys
from typing import Any

# Of subprocess.Popen. Python 3.10 has no such argument, and forks instead of vfork for this.
OWN_PROCESS_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)
