# SPDX-License-Identifier: Apache-2.0
"""Kernel names: functions, modules, BPF programs, and nothing where no code is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.fleet.naming_worker import _kernel_symbols
from aiflame.agent.symbols.kallsyms import KernelSymbols, KernelSymbolsHidden

SAMPLE = """\
ffffffff81000000 T _stext
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000100 t local_helper
ffffffff81000100 T exported_helper
ffffffff81000100 W weak_helper
ffffffff81000180 D a_variable
ffffffff81000200 t last_function
ffffffff81000300 T _etext
ffffffff81000400 R read_only
ffffffffc0001000 t module_function\t[nvidia]
ffffffffc0001040 t module_next\t[nvidia]
ffffffffc0a00000 t bpf_prog_6deef7357e7b4530_on_switch\t[bpf]
"""


def load(tmp_path: Path, text: str) -> KernelSymbols:
    path = tmp_path / "kallsyms"
    path.write_text(text)
    return KernelSymbols.load(path)


def look(symbols: KernelSymbols, *addresses: int) -> list[str | None]:
    found = symbols.lookup(np.array(addresses, dtype=np.uint64))
    return [entry and f"{entry.name} {entry.module}" for entry in found]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_functions_by_address(tmp_path: Path, is_on_disk: bool) -> None:
    symbols = load(tmp_path, SAMPLE)
    symbols = symbols.on_disk(tmp_path) if is_on_disk else symbols
    assert look(symbols, 0xFFFFFFFF81000000, 0xFFFFFFFF810000FF, 0xFFFFFFFF81000100) == [
        "startup_64 [kernel]",
        "startup_64 [kernel]",
        "exported_helper [kernel]",
    ]
    assert look(symbols, 0xFFFFFFFFC0001010, 0xFFFFFFFFC0001050, 0xFFFFFFFFC0A00008) == [
        "module_function nvidia",
        "module_next nvidia",
        "bpf_prog_6deef7357e7b4530_on_switch bpf",
    ]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_nothing_outside_the_code(tmp_path: Path, is_on_disk: bool) -> None:
    symbols = load(tmp_path, SAMPLE)
    symbols = symbols.on_disk(tmp_path) if is_on_disk else symbols
    outside = (
        0,
        0x7F0000000000,
        0xFFFFFFFF80FFFFFF,  # before the first
        0xFFFFFFFF81000300,  # at the end mark
        0xFFFFFFFFBFFFFFFF,  # before the modules
        0xFFFFFFFFC0900000,  # in the gap between modules
        0xFFFFFFFFC0B00000,  # 1 MiB past the last
        0xFFFFFFFFFFFFFFFF,
    )
    assert look(symbols, *outside) == [None] * len(outside)


def test_an_agent_has_them_in_memory_where_its_directory_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load(tmp_path, SAMPLE)
    monkeypatch.setattr(KernelSymbols, "load", lambda: found)
    assert _kernel_symbols(tmp_path / "none") is found
    on_disk = _kernel_symbols(tmp_path)
    assert on_disk is not found
    assert len(on_disk) == len(found)


def test_hidden_addresses_are_an_error_with_the_cure(tmp_path: Path) -> None:
    text = "0000000000000000 T _text\n0000000000000000 t f\n"
    with pytest.raises(KernelSymbolsHidden) as caught:
        load(tmp_path, text)
    assert caught.value.hint == "sudo sysctl kernel.kptr_restrict=1"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("text", ["", "nonsense\n\n", "zz T f\n", "1" * 40 + " T f\n"])
def test_list_without_functions_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(EnvironmentUnfit, match="no kernel function"):
        load(tmp_path, text)


def test_missing_list_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match="cannot read"):
        KernelSymbols.load(tmp_path / "none")


def test_function_at_the_end_of_the_address_space(tmp_path: Path) -> None:
    symbols = load(tmp_path, "ffffffffffffff00 T last\n")
    assert look(symbols, 0xFFFFFFFFFFFFFFF0) == ["last [kernel]"]
