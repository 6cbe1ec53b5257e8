# SPDX-License-Identifier: Apache-2.0
"""Which samples cells have that costs of launches are fitted to."""

from __future__ import annotations

import numpy as np
from aiflame.gpu.attribution.cells import Launched, Sampled, samples_of_cells
from aiflame.gpu.attribution.launches import UNNAMED
from hypothesis import given, settings
from hypothesis import strategies as st

_A, _B, _NOT_LAUNCHED = 0, 1, 2

# Of each stretch: what is launched, as (kernel, who); and what is sampled, as (part in per cent,
# kernel).
_LAUNCHES = st.lists(
    st.tuples(st.sampled_from([_A, _B, UNNAMED]), st.integers(0, 3)), min_size=1, max_size=6
)
_SAMPLES = st.lists(
    st.tuples(st.integers(0, 100), st.sampled_from([_A, _B, _NOT_LAUNCHED, UNNAMED])), max_size=6
)


def _launched(stretches: list[list[tuple[int, int]]]) -> Launched:
    rows = [(i, name, key) for i, launches in enumerate(stretches) for name, key in launches]
    stretch, name, key = np.array(rows, np.int64).reshape(-1, 3).T
    return Launched(stretch.copy(), name.copy(), key.copy(), np.ones(len(stretch)))


def _sampled(stretches: list[list[tuple[int, int]]]) -> Sampled:
    rows = [(i, part, name) for i, samples in enumerate(stretches) for part, name in samples]
    stretch, part, name = np.array(rows, np.int64).reshape(-1, 3).T
    return Sampled(stretch.copy(), part / 100, name.copy())


@given(
    st.lists(_LAUNCHES, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), _SAMPLES), max_size=60),
    st.booleans(),
)
@settings(max_examples=200)
def test_each_sample_of_a_launched_kernel_is_in_one_cell_of_its_stretch(
    kinds: list[list[tuple[int, int]]],
    stretches: list[tuple[int, list[tuple[int, int]]]],
    is_in_order: bool,
) -> None:
    launches = [kinds[kind % len(kinds)] for kind, _ in stretches]
    samples = [own for _, own in stretches]
    found = samples_of_cells(_launched(launches), _sampled(samples), is_in_order=is_in_order)
    of_launched = [
        name
        for launched, sampled in zip(launches, samples, strict=True)
        for _, name in sampled
        if name in [kernel for kernel, _ in launched if kernel != UNNAMED]
    ]
    assert found.value.sum() == len(of_launched)
    assert len(found.cell) == sum(map(len, launches))
    # A cell is of one kernel.
    names = np.array([name for launched in launches for name, _ in launched])
    for cell in range(len(found.value)):
        assert len(set(names[found.cell == cell].tolist())) <= 1


def test_runs_of_stretches_that_are_alike_are_told_by_the_order_of_samples() -> None:
    # GIVEN launches of A, B, A, B, and one sample in each of many stretches
    launches = [[(_A, 0), (_B, 1), (_A, 2), (_B, 3)]] * 500
    begins = np.array([0, 60, 70, 90, 100])  # of each launch, in per cent
    parts = [number * 61 % 100 for number in range(500)]
    samples = [
        [(part, (_A, _B)[(int(np.searchsorted(begins, part, side="right")) - 1) % 2])]
        for part in parts
    ]
    # WHEN they are in order, THEN each launch has its part of the samples
    found = samples_of_cells(_launched(launches), _sampled(samples), is_in_order=True)
    by_launch = np.zeros(4)
    for launch in range(4):
        by_launch[launch] = found.value[np.unique(found.cell[launch::4])].sum()
    assert abs(by_launch - [300, 50, 100, 50]).max() <= 10
    # ELSE launches of one kernel cannot be told apart
    found = samples_of_cells(_launched(launches), _sampled(samples), is_in_order=False)
    assert (found.cell[0::4] == found.cell[2::4]).all()
