# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's stall reasons, as CUPTI's PC sampling names them (cuptiPCSamplingGetStallReasons).

`selected` is a warp that issued, hence no stall. A name with `_not_issued` counts the samples of
its twin that were taken while the scheduler issued nothing: the same reason, seen once more.
"""

from __future__ import annotations

from aiflame.gpu.stalls.base import StallCategory, Vocabulary

# Of samples that are also among those of the reason without it.
_PART = "_not_issued"

VOCABULARY = Vocabulary(
    names={
        "selected": StallCategory.ISSUING,
        "long_scoreboard": StallCategory.MEMORY,
        "lg_throttle": StallCategory.MEMORY,
        "tex_throttle": StallCategory.MEMORY,
        "drain": StallCategory.MEMORY,
        "short_scoreboard": StallCategory.LOCAL_MEMORY,
        "mio_throttle": StallCategory.LOCAL_MEMORY,
        "wait": StallCategory.DEPENDENCY,
        "math_pipe_throttle": StallCategory.PIPE_BUSY,
        "dispatch_stall": StallCategory.PIPE_BUSY,
        "barrier": StallCategory.SYNC,
        "membar": StallCategory.SYNC,
        "sleeping": StallCategory.SYNC,
        "warpgroup_arrive": StallCategory.SYNC,
        # What metrics of Hopper call the wait at a warpgroup instruction.
        "gmma": StallCategory.SYNC,
        "no_instructions": StallCategory.FETCH_CONTROL,
        # As metrics other than those of PC sampling spell it.
        "no_instruction": StallCategory.FETCH_CONTROL,
        "branch_resolving": StallCategory.FETCH_CONTROL,
        "imc_miss": StallCategory.FETCH_CONTROL,
        "not_selected": StallCategory.READY,
        "misc": StallCategory.OTHER,
    },
    # The second one belongs to older chips.
    prefixes=("smsp__pcsamp_warps_issue_stalled_", "smsp__pcsamp_warp_stall_"),
    suffixes=(_PART,),
)


def is_part_of_another(reason: str) -> bool:
    """Whether samples of a reason are counted by another one too, and must not be added."""
    return reason.lower().endswith(_PART)
