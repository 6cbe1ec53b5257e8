# SPDX-License-Identifier: Apache-2.0
"""What `make kernels` says when something is not as it should be. Nothing is booted here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kernels import run
from kernels.archive import ArchiveError, Suite
from kernels.catalogue import KERNELS, Archive
from kernels.checks import Verdict

# A port on which nobody listens: the discard service.
_NOWHERE = Archive("http://127.0.0.1:9/debian", Path("/none.gpg"), "none")


def test_archive_that_is_not_reached_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ArchiveError, match=r"http://127\.0\.0\.1:9/debian bookworm: .*127\.0\.0\.1"
    ):
        Suite(_NOWHERE, "bookworm", tmp_path, _NOWHERE.keyring)


def test_kernel_that_is_not_known_is_refused() -> None:
    command = [sys.executable, run.__file__, "2.4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no such kernel: 2.4" in done.stderr
    assert all(name in done.stderr for name in KERNELS)


def test_table_has_what_was_shown() -> None:
    good = Verdict([], "", 16, 0.99876, 4608, 154_267)
    good.losses["kernel_names_unread"] = 1
    refused = Verdict(["no program was loaded"])
    table = run.markdown(
        [
            run.Row("6.1.0-50", "Debian 12", good, 226.4),
            run.Row("5.10.0-32", "Debian 11", refused, 30.0),
        ]
    )
    assert table.splitlines()[2:] == [
        "| 6.1.0-50 (Debian 12) | none | 16 programs | 99.88 % | 4,608 | kernel_names_unread 1"
        " | 154,267 | 226 |",
        "| 5.10.0-32 (Debian 11) | none | **no** | - | - | 0 | - | 30 |",
    ]
