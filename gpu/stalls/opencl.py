# SPDX-License-Identifier: Apache-2.0
"""The one reason of kernels that run on CPUs: a sample of a running thread is an issuing one."""

from __future__ import annotations

from aiflame.gpu.stalls.base import StallCategory, Vocabulary

VOCABULARY = Vocabulary(names={"issuing": StallCategory.ISSUING})
