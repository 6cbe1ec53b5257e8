# SPDX-License-Identifier: Apache-2.0
"""Three hundred processes of some milliseconds, and a machine that is busy while they run."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

ROUNDS = 30
# Ten processes a round, of programs that every Debian has; what they do takes 1 to 20 ms.
PROGRAMS = Counter(ls=1, date=1, grep=1, head=2, gzip=2, perl=1, sort=1, sed=1)
SCRIPT = f"""
for i in $(seq {ROUNDS}); do
  ls -l /usr/bin > /dev/null
  date > /dev/null
  grep -c root /etc/passwd > /dev/null
  head -c 200000 /bin/bash | gzip -c > /dev/null
  head -c 1000000 /bin/bash | gzip -1 -c > /dev/null
  perl -e '$s += $_ for 1..20000'
  sort /etc/passwd > /dev/null
  sed -n '$p' /etc/passwd > /dev/null
done
"""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keeps so many processors busy."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
