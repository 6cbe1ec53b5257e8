# SPDX-License-Identifier: Apache-2.0
"""Stall reasons of every vendor, and colours that can be read."""

from __future__ import annotations

import pytest
from aiflame.agent.model.gpu import StallReason
from aiflame.gpu.stalls import VOCABULARIES, StallCategory, category_of

_EXPECTED = {
    "nvidia": {
        StallCategory.ISSUING: "selected",
        StallCategory.MEMORY: "long_scoreboard lg_throttle tex_throttle drain",
        StallCategory.LOCAL_MEMORY: "short_scoreboard mio_throttle",
        StallCategory.DEPENDENCY: "wait",
        StallCategory.PIPE_BUSY: "math_pipe_throttle dispatch_stall",
        StallCategory.SYNC: "barrier membar warpgroup_arrive sleeping gmma",
        StallCategory.FETCH_CONTROL: "no_instructions no_instruction branch_resolving imc_miss",
        StallCategory.READY: "not_selected",
        StallCategory.OTHER: "misc",
    },
    "intel": {
        StallCategory.ISSUING: "active Active",
        StallCategory.MEMORY: "sbid send SbidStall SendStall",
        StallCategory.DEPENDENCY: "dist_acc DistStall",
        StallCategory.PIPE_BUSY: "pipestall PipeStall",
        StallCategory.SYNC: "sync SyncStall",
        StallCategory.FETCH_CONTROL: "inst_fetch control InstrFetchStall ControlStall",
        StallCategory.OTHER: "other tdr OtherStall PSDepStall",
    },
    "amd": {
        StallCategory.ISSUING: "issued",
        StallCategory.MEMORY: "WAITCNT",
        StallCategory.DEPENDENCY: "ALU ALU_DEPENDENCY",
        StallCategory.PIPE_BUSY: "EX_STALL INTERNAL ARBITER_WIN_EX_STALL INTERNAL_INSTRUCTION",
        StallCategory.SYNC: "BARRIER SLEEP BARRIER_WAIT SLEEP_WAIT",
        StallCategory.FETCH_CONTROL: "NOT_AVAILABLE NO_INSTRUCTION_AVAILABLE",
        StallCategory.READY: "ARBITER ARBITER_NOT_WIN",
        StallCategory.OTHER: "OTHER_WAIT NONE",
    },
    "opencl": {StallCategory.ISSUING: "issuing"},
}
_NAMES = [
    (family, name, category)
    for family, table in _EXPECTED.items()
    for category, names in table.items()
    for name in names.split()
]


@pytest.mark.parametrize(("family", "name", "category"), _NAMES)
def test_every_name_has_its_category(family: str, name: str, category: StallCategory) -> None:
    assert category_of(StallReason(family, name)) is category


def test_no_name_is_in_a_table_without_being_expected_here() -> None:
    expected = {(family, name.lower()) for family, name, _ in _NAMES}
    assert expected == {
        (family, name) for family, known in VOCABULARIES.items() for name in known.names
    }


@pytest.mark.parametrize(
    "prefix", ["", "smsp__pcsamp_warps_issue_stalled_", "smsp__pcsamp_warp_stall_"]
)
@pytest.mark.parametrize("suffix", ["", "_not_issued"])
def test_nvidia_spells_a_reason_in_six_ways(prefix: str, suffix: str) -> None:
    for category, names in _EXPECTED["nvidia"].items():
        for name in names.split():
            reason = StallReason("nvidia", f"{prefix}{name}{suffix}")
            assert category_of(reason) is category, reason


def test_amd_spells_a_reason_with_the_name_of_its_enumeration() -> None:
    prefix = "ROCPROFILER_PC_SAMPLING_INSTRUCTION_NOT_ISSUED_REASON_"
    assert category_of(StallReason("amd", f"{prefix}WAITCNT")) is StallCategory.MEMORY


@pytest.mark.parametrize("family", [*VOCABULARIES, "tpu", ""])
@pytest.mark.parametrize(
    "name", ["", "unheard_of", "smsp__pcsamp_warps_issue_stalled_", "_not_issued", "\ud800;\x00"]
)
def test_an_unknown_reason_is_other(family: str, name: str) -> None:
    assert category_of(StallReason(family, name)) is StallCategory.OTHER


def test_a_reason_of_one_vendor_means_nothing_for_another() -> None:
    assert category_of(StallReason("intel", "long_scoreboard")) is StallCategory.OTHER


def test_categories_differ_in_colour_and_in_words() -> None:
    assert len(StallCategory) == 9
    assert len({category.color for category in StallCategory}) == len(StallCategory)
    assert len({category.label for category in StallCategory}) == len(StallCategory)
    assert StallCategory.LOCAL_MEMORY.label == "local memory"
    assert StallCategory.FETCH_CONTROL.label == "fetch/control"
