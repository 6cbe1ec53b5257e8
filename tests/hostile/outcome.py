# SPDX-License-Identifier: Apache-2.0
"""What reading hostile input came to."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """Of many cases.

    Attributes:
        of: What was read.
        cases: How many.
        reads: How often one was read, by one reader each.
        refused: Why, how often.
        unforeseen: Exceptions that nobody thought of, by their text.
        first_cases: The first case with each of these.
        slowest_s: The most CPU time that one reader took for one case.
        slowest: Which reader, and which case.
    """

    of: str
    cases: int = 0
    reads: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unforeseen: Counter[str] = field(default_factory=Counter)
    first_cases: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    slowest: str = ""

    @contextlib.contextmanager
    def reading(self, name: str, *foreseen: type[Exception]) -> Iterator[None]:
        """Times a reader; exceptions that are not foreseen are counted and go no further.

        Without any that are foreseen, exceptions are the caller's.
        """
        begun_s = time.thread_time()
        try:
            yield
        except foreseen as error:
            self.refused[f"{name}: {type(error).__name__}"] += 1
        except Exception as error:
            if not foreseen:
                raise
            self.unforeseen[
                f"{name}, case {self.cases}: {type(error).__name__}: {error}"[:200]
            ] += 1
        finally:
            used_s = time.thread_time() - begun_s
            self.reads += 1
            if used_s > self.slowest_s:
                self.slowest_s, self.slowest = used_s, f"{name}, case {self.cases}"

    def facts(self) -> dict[str, object]:
        """What is worth a line."""
        return {
            "of": self.of,
            "cases": self.cases,
            "reads": self.reads,
            "refused": sum(self.refused.values()),
            "unforeseen": dict(self.unforeseen.most_common(20)),
            "first_cases": self.first_cases,
            "slowest_s": round(self.slowest_s, 3),
            "slowest": self.slowest,
            "peak_bytes": peak_bytes(),
        }


def forget_peak() -> None:
    """Has the peak begin anew: what was made to be read takes memory, too."""
    # Documentation/filesystems/proc.rst, clear_refs.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """Peak resident set of this program alone; rusage would include the forking parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) << 10
