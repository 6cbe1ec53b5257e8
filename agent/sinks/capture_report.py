# SPDX-License-Identifier: Apache-2.0
"""What the process that writes a capture says of it, when it is written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

# In a message: losses are some ten, problems a hundred lines.
MAX_REPORT_BYTES = 1 << 17
_MAX_PROBLEMS, _MAX_PROBLEM_CHARACTERS = 100, 200
# They name files of targets: in JSON a character of a path may take 12 bytes.
_MAX_PROBLEM_BYTES = MAX_REPORT_BYTES // 2


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to say of a capture that was written.

    Attributes:
        lost_stacks: How many stacks never came.
        window_losses: As windows have them, by name.
        naming_losses: What could not be named, by name.
        problems: Of these, what to say of each.
        peak_rss_bytes: Largest resident set of the process, and of its symbol worker.
        disk_full: Why not all windows are in it, "" where they are.
    """

    lost_stacks: int = 0
    window_losses: dict[str, int] = field(default_factory=dict)
    naming_losses: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    peak_rss_bytes: int = 0
    disk_full: str = ""

    def bounded(self) -> Report:
        """Returns it with few enough problems for a message."""
        kept, left_bytes = [], _MAX_PROBLEM_BYTES
        for problem in self.problems[:_MAX_PROBLEMS]:
            words = problem[:_MAX_PROBLEM_CHARACTERS]
            left_bytes -= len(json.dumps(words)) + 1
            if left_bytes < 0:
                break
            kept.append(words)
        return replace(self, problems=tuple(kept))
