# SPDX-License-Identifier: Apache-2.0
"""What vendors call stall reasons, and the nine categories common to them.

Captures keep the vendor's words; a category is derived when something is shown, so that a table can
be corrected without recording anew. Adding a vendor is one module and one line here.
"""

from __future__ import annotations

from aiflame.agent.model.gpu import StallReason
from aiflame.gpu.stalls import amd, intel, nvidia, opencl
from aiflame.gpu.stalls.base import StallCategory, Vocabulary

__all__ = ["VOCABULARIES", "StallCategory", "Vocabulary", "category_of"]

VOCABULARIES: dict[str, Vocabulary] = {
    "amd": amd.VOCABULARY,
    "intel": intel.VOCABULARY,
    "nvidia": nvidia.VOCABULARY,
    "opencl": opencl.VOCABULARY,
}


def category_of(reason: StallReason) -> StallCategory:
    """Returns the category of a reason; OTHER for a family or a name that no table has."""
    vocabulary = VOCABULARIES.get(reason.family)
    return StallCategory.OTHER if vocabulary is None else vocabulary.category(reason.name)
