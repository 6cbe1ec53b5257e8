# SPDX-License-Identifier: Apache-2.0
"""Whatever a container engine's database has, reading it ends soon and without an exception."""

from __future__ import annotations

from pathlib import Path

from hostile.databases import read_databases


def test_no_database_gets_out_of_hand(tmp_path: Path) -> None:
    for outcome in read_databases(300, tmp_path, 20_261_129):
        assert outcome.reads == 300
        assert outcome.unforeseen == {}
        assert 30 < outcome.refused["missing"] < 300  # it is damage, and some is elsewhere
        assert outcome.slowest_s < 3
