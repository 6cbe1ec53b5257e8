# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are breadth: CI has all, and a user's `make test` what stands for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(names: str, values: Iterable[Any], **keywords: Any) -> pytest.MarkDecorator:
    """Like pytest.mark.parametrize, for cases of which each takes about a second or more.

    Those after the first are breadth.
    """

    def marked(value: Any) -> Any:
        return pytest.param(*(value if "," in names else (value,)), marks=pytest.mark.breadth)

    listed = [*values]
    listed[1:] = map(marked, listed[1:])
    return pytest.mark.parametrize(names, listed, **keywords)
