# SPDX-License-Identifier: Apache-2.0
"""Kernel names are short where they are shown, and tell different kernels apart."""

from __future__ import annotations

import pytest
from aiflame.gpu.kernel_names import is_stub, name_from_host_symbol, short_name, short_names
from hypothesis import given
from hypothesis import strategies as st

_COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
    "::{lambda()#7}::operator()() const::{lambda(float)#1}"
)


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("vecAdd", "vecAdd"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("add(float*, int)", "add"),
        ("work::scale(float*, float)", "work::scale"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul>)",
            "at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, "
            "array<char*, 3ul>>",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
            f"{_COPY}>(at::TensorIteratorBase&, {_COPY} const&)::{{lambda(int)#1}}>(int, "
            f"at::native::gpu_kernel_impl_nocast<{_COPY}>(at::TensorIteratorBase&, {_COPY} const&)"
            "::{lambda(int)#1})",
            "at::native::elementwise_kernel<128, 2, gpu_kernel_impl_nocast<direct_copy_kernel_cuda"
            "::{lambda#3}::{lambda#7}::{lambda(float)#1}>::{lambda(int)#1}>",
        ),
        (
            "void at::native::(anonymous namespace)::apply<at::native::(anonymous namespace)::"
            "Metadata<4>, (at::native::ADAM_MODE)1, (bool)0, float const*>(int)",
            "at::native::(anonymous namespace)::apply<Metadata<4>, (ADAM_MODE)1, false, "
            "float const*>",
        ),
        (
            "void f<std::vector<int, std::allocator<int> >, std::basic_string<char, "
            "std::char_traits<char>, std::allocator<char> > >()",
            "f<vector<int>, basic_string<char>>",
        ),
        ("void Foo::operator()<int>(int) const", "Foo::operator()<int>"),
        ("Foo::operator()(int) const", "Foo::operator()"),
        ("bool operator< <int>(A<int> const&, int)", "operator< <int>"),
        ("void k<(a>b), 3>(int)", "k<(a>b), 3>"),
        ("void k<void (*)(int), &(anonymous namespace)::g>(int)", "k<void (*)(int), &g>"),
        ("char const* f<int>(int)", "f<int>"),
        ("void fill<4>(int*) [clone .constprop.0]", "fill<4>"),
        ("add.kd", "add"),
    ],
)
def test_what_all_kernels_have_in_common_is_left_out(demangled: str, short: str) -> None:
    assert short_name(demangled) == short


def test_name_that_is_too_long_loses_its_innermost_arguments_first() -> None:
    inner = ", ".join(f"ns::Type{i}" for i in range(40))
    assert short_name(f"void k<ns::A<ns::B<ns::C<{inner}> > > >()") == "k<A<B<C<...>>>>"
    assert short_name(f"void k<ns::A<ns::B<{inner}> > >()") == "k<A<B<...>>>"
    cut = short_name(f"void k<{inner}>()")
    assert len(cut) <= 200
    assert cut.startswith("k<Type0, Type1")
    assert "..." in cut
    assert cut.endswith("Type39>")


def test_names_that_would_look_alike_are_shown_in_full() -> None:
    names = [
        "add(float*)",
        "add(double*)",
        "void mul<n::F>(int)",
        "void mul<m::F>(int)",
        "sub(int)",
    ]
    assert short_names(names) == {
        "add(float*)": "add(float*)",
        "add(double*)": "add(double*)",
        "void mul<n::F>(int)": "mul<n::F>(int)",
        "void mul<m::F>(int)": "mul<m::F>(int)",
        "sub(int)": "sub",
    }
    assert short_names(["void f(int)", "f(int)"]) == {
        "void f(int)": "void f(int)",
        "f(int)": "f(int)",
    }


_JUNK = st.text(st.sampled_from("ab:<>(){}[]&*, .#0operatlmd\n\0\1"), max_size=60)


@given(st.one_of(_JUNK, st.text(max_size=300)))
def test_junk_is_shown_as_something(name: str) -> None:
    short = short_name(name)
    assert len(short) <= 200
    assert bool(short) == bool(name)


@given(st.lists(_JUNK, max_size=8, unique=True))
def test_different_names_stay_different(names: list[str]) -> None:
    shown = short_names(names)
    assert set(shown) == set(names)
    assert len(set(shown.values())) == len(names)


@pytest.mark.parametrize(
    "name", ["(" * 10**5, "<" * 10**5, "a<" * 90 + ">" * 90, "()::" * 10**4, "9" * 10**5, "\0" * 99]
)
def test_hostile_names_are_bounded(name: str) -> None:
    assert len(short_name(name)) <= 200
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
