# SPDX-License-Identifier: Apache-2.0
"""The list of losses: names that captures already hold, words for each, and none left over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from aiflame.agent.losses import LossKind

_ROOT = Path(__file__).parents[2]
_SOURCES = "".join(
    path.read_text()
    for folder in ("agent", "gpu", "bpf")
    for path in sorted((_ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".h") and path.name not in ("losses.py", "aiflame.h")
)

# Of captures that exist: scripts look for them.
_KNOWN = """
bad_debug_file bad_debug_info bad_elf bad_symbol_table bad_unwind_info bad_unwind_records
binary_not_opened binary_not_read call_arguments_unreadable call_sizes_cut callers_full calls_full
calls_not_listed calls_not_probed cpus_came_online debug_info_too_large device_code_not_mapped
device_code_replaced device_stacks_not_kept kernel_frames_cut kernel_names_lost kernel_names_unread
kernel_not_disassembled kernel_not_opened kernel_symbols_hidden mappings_not_kept
names_not_demangled no_kernel_stack no_scratch perf_map_cut perf_map_refused processes_full
python_bad_pointer python_exited python_loop python_misfit python_store_full
python_threads_not_found python_too_deep python_unreadable_stack python_unsupported ring_full
sample_outside_kernel sampling_skipped sleepers_kernel_frames_lost sleepers_not_walked stack_lost
stack_store_full stacks_stuck sums_full switch_not_seen symbolizer_died symbolizer_gave_up
thread_table_full threads_full threads_not_entered too_many_mappings too_many_symbols
unreadable_binary unwind_memory_full unwind_rules_cut unwind_table_not_built user_frames_cut
waits_not_listed
"""


def test_names_stay_what_they_are_in_captures() -> None:
    assert set(_KNOWN.split()) <= {kind.stored_name for kind in LossKind}


@pytest.mark.parametrize("kind", LossKind)
def test_every_loss_has_words(kind: LossKind) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.stored_name)
    assert len(kind.meaning.split()) >= 4
    assert not re.search(r"\s\s|\s$|\.$", f"{kind.meaning} {kind.cure}".rstrip(" "))


def test_every_loss_is_counted_somewhere() -> None:
    by_kernel = {*re.findall(r"\bcount\(LOST_(\w+)\)", _SOURCES)}
    by_host = {*re.findall(r"\bLossKind\.(\w+)\b", _SOURCES)}
    assert {k for k in LossKind if k.name not in (by_kernel if k.in_kernel else by_host)} == set()


def test_cures_are_options_of_record() -> None:
    source = (_ROOT / "agent" / "commands" / "record.py").read_text()
    options = {option for kind in LossKind for option in re.findall(r"--[a-z-]+", kind.cure)}
    assert options
    assert {option for option in options if f'"{option}"' not in source} == set()
