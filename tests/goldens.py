# SPDX-License-Identifier: Apache-2.0
"""Golden files: what a report must be, byte by byte.

Where a change of output is meant, `AIFLAME_UPDATE_GOLDEN=1 pytest ...` writes them anew; read the
difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "golden"


def assert_golden(name: str, actual: bytes) -> None:
    """Compare with tests/golden/NAME."""
    path = _FOLDER / name
    if os.environ.get("AIFLAME_UPDATE_GOLDEN"):
        path.write_bytes(actual)
    assert actual.decode().splitlines() == path.read_bytes().decode().splitlines()
    assert actual == path.read_bytes()
