# SPDX-License-Identifier: Apache-2.0
"""AMD's stall reasons: what rocprofiler-sdk's stochastic PC sampling says was not issued, and why.

The names are those of its enumeration of reasons, with or without its prefix, and shorter ones that
its tools print. An instruction that was issued has no reason; a family calls that "issued".
"""

from __future__ import annotations

from aiflame.gpu.stalls.base import StallCategory, Vocabulary

VOCABULARY = Vocabulary(
    names={
        "issued": StallCategory.ISSUING,
        # Memory of any kind: the type of the instruction could tell which.
        "waitcnt": StallCategory.MEMORY,
        "alu": StallCategory.DEPENDENCY,
        "alu_dependency": StallCategory.DEPENDENCY,
        "ex_stall": StallCategory.PIPE_BUSY,
        "arbiter_win_ex_stall": StallCategory.PIPE_BUSY,
        "internal": StallCategory.PIPE_BUSY,
        "internal_instruction": StallCategory.PIPE_BUSY,
        "barrier": StallCategory.SYNC,
        "barrier_wait": StallCategory.SYNC,
        "sleep": StallCategory.SYNC,
        "sleep_wait": StallCategory.SYNC,
        "not_available": StallCategory.FETCH_CONTROL,
        "no_instruction_available": StallCategory.FETCH_CONTROL,
        "arbiter": StallCategory.READY,
        "arbiter_not_win": StallCategory.READY,
        "other_wait": StallCategory.OTHER,
        "none": StallCategory.OTHER,
    },
    prefixes=("rocprofiler_pc_sampling_instruction_not_issued_reason_",),
)
