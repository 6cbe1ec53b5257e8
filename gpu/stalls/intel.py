# SPDX-License-Identifier: Apache-2.0
"""Intel's stall reasons: the ten counters of an EU stall record.

Both spellings are known: that of the xe driver's records, and that of the metrics of Level Zero
(group EuStallSampling).
"""

from __future__ import annotations

from aiflame.gpu.stalls.base import StallCategory, Vocabulary

VOCABULARY = Vocabulary(
    names={
        "active": StallCategory.ISSUING,
        # A scoreboard token: mostly a load that is under way, of whatever memory.
        "sbid": StallCategory.MEMORY,
        "sbidstall": StallCategory.MEMORY,
        "send": StallCategory.MEMORY,
        "sendstall": StallCategory.MEMORY,
        "dist_acc": StallCategory.DEPENDENCY,
        "diststall": StallCategory.DEPENDENCY,
        "pipestall": StallCategory.PIPE_BUSY,
        "sync": StallCategory.SYNC,
        "syncstall": StallCategory.SYNC,
        "inst_fetch": StallCategory.FETCH_CONTROL,
        "instrfetchstall": StallCategory.FETCH_CONTROL,
        "control": StallCategory.FETCH_CONTROL,
        "controlstall": StallCategory.FETCH_CONTROL,
        "other": StallCategory.OTHER,
        "otherstall": StallCategory.OTHER,
        # The order of pixel shaders.
        "tdr": StallCategory.OTHER,
        "psdepstall": StallCategory.OTHER,
    },
)
