# SPDX-License-Identifier: Apache-2.0
"""What holds of attribution whatever was launched and sampled."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from aiflame.agent.model.gpu import (
    CALL_DTYPE,
    NONE,
    ApiFunction,
    GpuProfile,
    Kernel,
    KernelCode,
    Operation,
)
from aiflame.gpu.attribution import TIME_DTYPE, Certainty, attribute
from device_profiles import device_samples
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    deadline=None, max_examples=60, database=None, derandomize=bool(os.environ.get("CI"))
)

_NAMES = ("", "a", "b")
_KERNELS = tuple(
    Kernel(process, "cuda", name, "") for process in range(2) for name in (*_NAMES, "a")
)
_SMALL = st.integers(0, 3)
_INDEX = st.integers(0, len(_KERNELS) - 1)
# Ordinary counts, and some for which a float has no room.
_COUNT = st.one_of(st.integers(0, 5), st.integers(0, 1_000), st.integers(2**53, 2**56))


@dataclass(frozen=True)
class Case:
    gpu: GpuProfile
    times: np.ndarray


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stack = st.one_of(st.integers(0, 6), st.just(NONE))
    no_kernel = st.one_of(_INDEX, _INDEX, _INDEX, st.just(NONE))
    calls = draw(
        st.lists(
            st.tuples(_SMALL, stack, _SMALL, st.integers(0, 1), no_kernel, st.just(0),
                      st.integers(0, 50), st.integers(0, 3_000), st.just(0)),
            max_size=30,
        )
    )  # fmt: skip
    samples = draw(
        st.lists(
            st.tuples(st.integers(0, 5), _SMALL, _INDEX, _SMALL, _SMALL,
                      st.one_of(st.just(NONE), stack), _COUNT),
            max_size=40,
        )
    )  # fmt: skip
    times = draw(
        st.lists(st.tuples(st.integers(0, 6), _INDEX, _SMALL, st.integers(0, 9_999)), max_size=20)
    )
    gpu = GpuProfile(
        functions=(
            ApiFunction("cuda", "launch", Operation.LAUNCH),
            ApiFunction("cuda", "copy", Operation.COPY),
        ),
        kernels=_KERNELS,
        codes=tuple(KernelCode(i, None, 0) for i in range(len(_KERNELS))),
        calls=np.array(calls, CALL_DTYPE),
        samples=device_samples(samples),
    )
    return Case(gpu, np.array(times, TIME_DTYPE))


def _launchers(gpu: GpuProfile, code: int) -> set[int]:
    """Every stack that launched the kernel of a code, the plain way."""
    wanted = _KERNELS[code]
    return {
        int(row["stack"])
        for row in gpu.calls
        if row["function"] == 0
        and row["count"]
        and row["kernel"] != NONE
        and wanted.name
        and (_KERNELS[row["kernel"]].process, _KERNELS[row["kernel"]].name)
        == (wanted.process, wanted.name)
    }


@SETTINGS
@given(cases())
def test_no_sample_is_lost_or_made(case: Case) -> None:
    for times in (None, case.times):
        rows = attribute(case.gpu, times)
        found: Counter[int] = Counter()
        for sample, _, _, count in rows.tolist():
            assert count > 0
            found[sample] += count
        wanted = {i: int(n) for i, n in enumerate(case.gpu.samples["count"]) if n}
        assert dict(found) == wanted


@SETTINGS
@given(cases())
def test_the_same_gives_the_same(case: Case) -> None:
    assert attribute(case.gpu, case.times).tobytes() == attribute(case.gpu, case.times).tobytes()


@SETTINGS
@given(cases())
def test_a_sample_goes_to_a_stack_that_launched_its_kernel(case: Case) -> None:
    gpu = case.gpu
    for sample, stack, certainty, _ in attribute(gpu).tolist():
        row = gpu.samples[sample]
        launchers = _launchers(gpu, int(row["code"]))
        if row["stack"] != NONE:
            assert (stack, certainty) == (row["stack"], Certainty.EXACT)
        elif stack == NONE:
            assert certainty == Certainty.UNATTRIBUTED
            assert not launchers or NONE in launchers
        else:
            assert stack in launchers
            alone = len(launchers) == 1
            assert certainty == (Certainty.EXACT if alone else Certainty.SHARED)


def _content(gpu: GpuProfile, times: np.ndarray) -> Counter[tuple[object, ...]]:
    """What is attributed, by the content of rows instead of their position."""
    found: Counter[tuple[object, ...]] = Counter()
    for sample, stack, certainty, count in attribute(gpu, times).tolist():
        found[(*gpu.samples[sample].tolist(), stack, certainty)] += count
    return found


@SETTINGS
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_rows_makes_no_difference(case: Case, random: object) -> None:
    shuffled = []
    for rows in (case.gpu.calls, case.gpu.samples, case.times):
        order = list(range(len(rows)))
        random.shuffle(order)  # type: ignore[attr-defined]
        shuffled.append(rows[order])
    other = replace(case.gpu, calls=shuffled[0], samples=shuffled[1])
    assert _content(other, shuffled[2]) == _content(case.gpu, case.times)


@SETTINGS
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
)
def test_a_stack_is_given_what_is_due_to_it_in_all(work: list[int], counts: list[int]) -> None:
    # GIVEN stacks that launch with the same weights in every second, and rows of any size
    gpu = GpuProfile(
        functions=(ApiFunction("cuda", "launch", Operation.LAUNCH),),
        kernels=(Kernel(0, "cuda", "k", ""),),
        codes=(KernelCode(0, None, 0),),
        calls=np.array(
            [
                (second, stack, 0, 0, 0, 0, 1, weight, 0)
                for second in range(5)
                for stack, weight in enumerate(work)
            ],
            CALL_DTYPE,
        ),
        samples=device_samples(
            (i % 5, 0, 0, i // 5 * 4, i % 3, NONE, n) for i, n in enumerate(counts)
        ),
    )
    rows = attribute(gpu)
    for stack, weight in enumerate(work):
        due = sum(counts) * weight / sum(work)
        given_to_it = int(rows["count"][rows["stack"] == stack].sum())
        # THEN each is off by less than one for every halving of at most nine stacks.
        assert abs(given_to_it - due) <= 4
