# SPDX-License-Identifier: Apache-2.0
"""Names that stay from capture to capture, with a kernel's list that tests make up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.symbolize import known_names
from aiflame.agent.symbolize.known_names import KnownNames, NamedRange
from aiflame.agent.symbols.frames import Range, SourceFrame
from aiflame.agent.symbols.kallsyms import KernelSymbols, KernelSymbolsHidden


class _Kernel:
    """A kernel whose list is as `names` has it; counts how often it was read."""

    def __init__(self, folder: Path) -> None:
        self.reads = 0
        self.modules = "ext4 1000000 3 - Live 0x0\n"
        self.name = "schedule"
        self.is_hidden = False
        self._path = folder / "kallsyms"

    def load(self) -> KernelSymbols:
        self.reads += 1
        if self.is_hidden:
            raise KernelSymbolsHidden("hidden")
        self._path.write_text(f"ffffffff81000000 T {self.name}\nffffffff81001000 T _etext\n")
        return KernelSymbols.load(self._path)

    def known(self) -> KnownNames:
        return KnownNames(self.load, lambda: self.modules)


@pytest.fixture
def kernel(tmp_path: Path) -> _Kernel:
    return _Kernel(tmp_path)


def _name(known: KnownNames) -> str:
    symbols = known.kernel()
    assert symbols is not None
    (found,) = symbols.lookup(np.array([0xFFFFFFFF81000010], np.uint64))
    assert found is not None
    return found.name


def test_the_list_is_read_once(kernel: _Kernel) -> None:
    known = kernel.known()
    assert [_name(known) for _ in range(100)] == ["schedule"] * 100
    assert kernel.reads == 1


def test_it_is_read_again_once_modules_have_changed(kernel: _Kernel) -> None:
    known = kernel.known()
    assert _name(known) == "schedule"
    kernel.modules = kernel.modules.replace(" 3 - ", " 4 jbd2, ")  # it is used once more
    assert _name(known) == "schedule"
    assert kernel.reads == 1
    kernel.name, kernel.modules = "other", kernel.modules + "nvidia 2 0 - Live 0x0\n"
    assert _name(known) == "other"
    assert _name(known) == "other"
    assert kernel.reads == 2


@pytest.mark.parametrize(("has_gaps", "reads"), [(False, 1), (True, 2)])
def test_a_gap_has_it_read_again_sooner(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch, has_gaps: bool, reads: int
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(known_names.time, "monotonic", lambda: now_s)
    known = kernel.known()
    known.kernel()
    if has_gaps:
        known.tell_gap(0xFFFFFFFFC0001000)
    known.kernel()
    assert kernel.reads == 1  # not each time
    now_s += 300
    known.kernel()
    assert kernel.reads == reads
    if has_gaps:  # the list does not have it: its program has gone
        known.tell_gap(0xFFFFFFFFC0001000)
    now_s += 300
    known.kernel()
    assert kernel.reads == reads
    now_s += 1_000
    known.kernel()
    assert kernel.reads == reads + 1


def test_a_kernel_that_hides_its_addresses_is_asked_once(kernel: _Kernel) -> None:
    kernel.is_hidden = True
    known = kernel.known()
    assert [known.kernel() for _ in range(10)] == [None] * 10
    assert kernel.reads == 1


def _named(begin: int, end: int, name: str = "") -> NamedRange:
    return NamedRange(Range(begin, end), (SourceFrame(name, "", 0, False),) if name else ())


def _copies(count: int, kernel: _Kernel) -> list[KnownNames]:
    """The names that processes have of which each is a copy of the first."""
    found = [kernel.known() for _ in range(count)]
    for known in found:
        known.kernel()
        for address in range(3):
            known.keep(1, _named(address, address + 1))
    return found


def test_a_copy_brings_what_it_has_found_out(kernel: _Kernel) -> None:
    known, copy = _copies(2, kernel)
    copy.begin_notes()
    copy.keep(1, _named(9, 20, "f"))
    copy.tell_gap(0xFFFFFFFFC0001000)
    assert known.find(1, 9) is None
    known.learn(copy.notes())
    assert known.find(1, 9) == known.find(1, 19) == _named(9, 20, "f")
    # A copy reads no list, and the next look at one sees what was missing there.
    reads = kernel.reads
    assert copy.kernel() is not None
    assert kernel.reads == reads
    known._loaded_s -= 300
    known.kernel()
    assert kernel.reads == reads + 1


def test_what_copies_use_stays_and_all_else_goes(kernel: _Kernel) -> None:
    known, copy = _copies(2, kernel)
    for _ in range(50):  # stretches
        copy.begin_notes()
        assert copy.find(1, 2) is not None
        for _ in range(known_names._RANGES[0] // 20):
            copy.turn()
        known.learn(copy.notes())
    assert [known.find(1, address) is not None for address in range(3)] == [False, False, True]


def test_what_a_copy_asked_for_as_all_grew_old_is_not_asked_for_again(kernel: _Kernel) -> None:
    known, copy = _copies(2, kernel)
    copy.begin_notes()
    for each in (known, copy):
        each._began_s -= 2 * known_names._NAMES_S
    copy.turn()
    assert copy.find(1, 0) is None
    copy.keep(1, _named(0, 1, "g"))
    known.learn(copy.notes())
    assert known.find(1, 0) == _named(0, 1, "g")
    assert known.find(1, 1) is None


def test_what_is_found_of_an_address_is_its_range_or_nothing(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN functions of some files, a few of which are kept
    monkeypatch.setattr(known_names, "_RANGES", (300, 8))
    known, random = kernel.known(), np.random.default_rng(1)
    kept: dict[tuple[int, int], NamedRange] = {}
    for _ in range(500):
        file, at = int(random.integers(3)), int(random.integers(40))
        # WHEN one is asked for, THEN it is the one that was told last, or is not known any more
        found = known.find(file, 10 * at + int(random.integers(10)))
        assert found is None or (found == kept[file, at] and found.addresses.begin // 10 == at)
        kept[file, at] = _named(
            10 * at, 10 * at + int(random.integers(1, 10)), f"{random.random()}"
        )
        known.keep(file, kept[file, at])
        assert known.find(file, 10 * at) == kept[file, at]
        assert known.find(file, 10 * at + 9) is None
    # AND no more is known than what is kept
    every = [known.find(file, 10 * at) for file in range(3) for at in range(40)]
    assert 8 <= len([one for one in every if one is not None]) <= 2 * 8


def test_notes_are_no_more_than_is_kept(kernel: _Kernel) -> None:
    (copy,) = _copies(1, kernel)
    copy.begin_notes()
    size = known_names._RANGES[1]
    for address in range(10 * size):
        copy.keep(2, _named(address, address + 1))
    notes = copy.notes()
    assert size <= len(notes.new) <= 2 * size
    assert (2, 10 * size - 1) in notes.new


def test_what_is_kept_of_the_list_is_names(tmp_path: Path) -> None:
    lines = [f"ffffffff81{n:06x} {'tTd'[n % 3]} function_{n}\t[module]\n" for n in range(300)]
    path = tmp_path / "kallsyms"
    path.write_text("".join(lines))
    symbols = KernelSymbols.load(path)
    found = symbols.lookup(np.arange(0xFFFFFFFF81000000, 0xFFFFFFFF81000000 + 298, dtype=np.uint64))
    # An address of data is in the function before it.
    assert [(f.name, f.module) for f in found if f] == [
        (f"function_{n - (n % 3 == 2)}", "module") for n in range(298)
    ]
