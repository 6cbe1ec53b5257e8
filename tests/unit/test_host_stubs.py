# SPDX-License-Identifier: Apache-2.0
"""Host functions that stand for GPU kernels tell the kernels' names."""

from __future__ import annotations

import pytest
from aiflame.gpu.host_stubs import is_stub, name_from_host_symbol
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "name", ["(" * 10**5, "<" * 10**5, "a<" * 90 + ">" * 90, "()::" * 10**4, "9" * 10**5, "\0" * 99]
)
def test_hostile_names_are_bounded(name: str) -> None:
    found = name_from_host_symbol(name + "__device_stub__x")
    assert found is None or len(found) <= 10_000


@pytest.mark.parametrize(
    ("symbol", "kernel"),
    [
        # nvcc: the kernel's mangled name, as a function's name of its own
        ("_Z32__device_stub__ZN4work5scaleEPffPff", "_ZN4work5scaleEPff"),
        ("_ZL42__device_stub__ZN4work4fillIdLi2EEEvPT_S1_Pdd", "_ZN4work4fillIdLi2EEEvPT_S1_"),
        ("_ZL25__device_stub__Z6hiddenPiPi.cold", "_Z6hiddenPi"),
        ("__device_stub__Z3addPf", "_Z3addPf"),
        # clang, for CUDA and HIP: a prefix of the plain name
        ("_Z18__device_stub__addPf", "_Z3addPf"),
        ("_ZN2ns18__device_stub__addEPf", "_ZN2ns3addEPf"),
        ("_ZN3ns218__device_stub__addEPf", "_ZN3ns23addEPf"),
        ("_ZL21__device_stub__KernelIdEv1SIT_E", "_ZL6KernelIdEv1SIT_E"),
        ("__device_stub__add", "add"),
    ],
)
def test_stub_of_a_kernel_has_its_name(symbol: str, kernel: str) -> None:
    assert is_stub(symbol)
    assert name_from_host_symbol(symbol) == kernel


@pytest.mark.parametrize("symbol", ["_Z3addPf", "_ZN4work5scaleEPff", "plain"])
def test_host_function_of_the_same_name_is_the_kernel(symbol: str) -> None:
    assert not is_stub(symbol)
    assert name_from_host_symbol(symbol) == symbol


@pytest.mark.parametrize(
    ("symbol", "kernel"),
    [
        ("_ZL6hiddenPi", "_Z6hiddenPi"),
        ("_ZN4workL4fillIdLi2EEEvPT_S1_", "_ZN4work4fillIdLi2EEEvPT_S1_"),
        ("_ZN4work5scaleEPff", "_ZN4work5scaleEPff"),
        ("_ZN4work4fillIdLi2EEEvPT_S1_", "_ZN4work4fillIdLi2EEEvPT_S1_"),
        ("_ZN1a1LL1bEv", "_ZN1a1L1bEv"),
        ("_ZN12_GLOBAL__N_11kEv", "_ZN12_GLOBAL__N_11kEv"),
        ("plain", "plain"),
        ("_Z", "_Z"),
        ("_ZN99a", "_ZN99a"),
    ],
)
def test_local_kernel_of_cuda_has_its_global_name(symbol: str, kernel: str) -> None:
    assert name_from_host_symbol(symbol, "cuda") == kernel
    assert name_from_host_symbol(symbol) == symbol


@pytest.mark.parametrize("symbol", ["", "a b", "cudaLaunchKernel@plt", "\x1b[31m", "9", "ж"])
def test_what_is_no_function_is_no_kernel(symbol: str) -> None:
    assert name_from_host_symbol(symbol) is None


@given(st.text(st.sampled_from("_ZN0123456789device_stub.@x"), max_size=80))
def test_any_symbol_is_taken(symbol: str) -> None:
    for name in (name_from_host_symbol(symbol), name_from_host_symbol(symbol, "cuda")):
        assert name is None or "@" not in name
