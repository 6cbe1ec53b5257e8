# SPDX-License-Identifier: Apache-2.0
"""Linker names become source names; hostile ones cost little and stay themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from aiflame.agent.symbols.demangle import Demangler
from aiflame.agent.symbols.rust import demangle_rust


@pytest.mark.parametrize(
    ("mangled", "readable"),
    [
        ("main", "main"),
        ("_ZN2at6native3addERKNS_6TensorE", "at::native::add(at::Tensor const&)"),
        ("_Z3foov.cold", "foo() [clone .cold]"),
        ("_Z3foov@plt", "foo()@plt"),
        ("memcpy@plt", "memcpy@plt"),
        ("_Znotaname", "_Znotaname"),
        (
            "_ZN4core3ptr85drop_in_place$LT$std..rt..lang_start$LT$$LP$$RP$$GT$..$u7b$$u7b$closure"
            "$u7d$$u7d$$GT$17h0123456789abcdefE.llvm.123",
            "core::ptr::drop_in_place<std::rt::lang_start<()>::{{closure}}>",
        ),
        # From Rust RFC 2603, with its hashes.
        ("_RNvCskwGfYPst2Cb_3foo16example_function", "foo::example_function"),
        ("_RNvMNtCs1234_7mycrate3fooINtB4_3FooReE3bar", "<mycrate::Foo<&str>>::bar"),
        ("_RINvNtC3std3mem8align_ofjdE", "std::mem::align_of::<usize, f64>"),
        ("_RNCNCNgCs6DXkGYLi8lr_2cc5spawn00B5_", "cc::spawn::{closure#0}::{closure#0}"),
        (
            "_RNvXs_C7mycrateINtC3foo3VecpEINtC3bar5TraitKj5_E3baz",
            "<foo::Vec<_> as bar::Trait<5>>::baz",
        ),
        ("_RMCs4fqI2P2rA04_13const_genericINtB0_4BoolKb1_E", "<const_generic::Bool<true>>"),
        ("_RINvC1a1fFG_RL0_hEuE", "a::f::<for<'a> fn(&'a u8)>"),
        ("_RINvC1a1fTjRQcAhj10_ESlE", "a::f::<(usize, &&mut char, [u8; 16]), [i32]>"),
    ],
)
def test_names(mangled: str, readable: str) -> None:
    assert Demangler().one(mangled) == readable


def test_unicode_identifier_of_rust() -> None:
    name = "_RNqCs4fqI2P2rA04_11utf8_identsu30____7hkackfecea1cbdathfdh9hlq6y"
    assert demangle_rust(name) == "utf8_idents::საჭმელად_გემრიელი_სადილი"


def expanding(levels: int) -> str:
    """A valid C++ name of which each level doubles the readable one."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    name, last = "_Z1f1A1PIS_S_E", "S1_"
    for level in range(levels):
        name += f"S0_I{last}{last}E"
        last = f"S{digits[2 + level]}_"
    return name


def test_expanding_name_is_shown_by_its_head() -> None:
    shown = Demangler().one(expanding(10))
    assert len(shown) == 4096 and shown.startswith("f(A, P<A, A>, P<P<A, A>")


def guarded(*names: str) -> tuple[list[str], int]:
    """Demangle under guard, in a process with one thread, as the guard demands."""
    program = (
        "import json, sys\n"
        "from aiflame.agent.symbols.demangle import Demangler\n"
        "demangler = Demangler(guard=True)\n"
        "found = demangler.names([name.encode() for name in sys.argv[1:]])\n"
        "print(json.dumps([found, demangler.failures]))\n"
    )
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found, failures = json.loads(done.stdout)
    return found, failures


def test_name_that_expands_without_bound_stays_mangled() -> None:
    """GIVEN a name of 300 bytes that stands for gigabytes, WHEN guarded, THEN it stays as it is
    after a bounded time, and the names around it are demangled."""
    endless = expanding(30)
    found, failures = guarded("_Z3onev", endless, "_Z3twov@plt")
    assert found == ["one()", endless, "two()@plt"]
    assert failures == 1


def test_after_a_few_endless_names_the_rest_stays_mangled() -> None:
    found, failures = guarded(*(expanding(30) + letter for letter in "abcdef"), "_Z3onev")
    assert found[-1] == "_Z3onev"
    assert failures == 3


@pytest.mark.parametrize(
    "name",
    [
        "_R" + "R" * 5000,
        "_RINvC1a1f" + "R" * 9000 + "uE",
        "_RINvC1a1f" + "T" * 9000,
        "_RNvC1a" + "9" * 500,
        "_RB_",
        "_RNvB0_1a",
        "_RIC1aB_E",
        "_R" + "NvC1a1b" * 1000,
        # Each tuple repeats the one before it twice.
        "_RINvC1a1fThhE" + "".join(f"TB{i}_B{i}_E" for i in range(30)) + "E",
        "_RINvC1a1fKcffffffffffffffff_E",
        "_RNvCu99999_1a",
        "_ZN99999foo17h0123456789abcdefE",
        "_ZN17h0123456789abcdefE",
        "_ZN1a$uffffff$17h0123456789abcdefE",
    ],
)
def test_hostile_rust_names_end_quickly(name: str) -> None:
    began = time.thread_time()
    result = demangle_rust(name)
    assert result is None or len(result) <= 8192
    assert time.thread_time() - began < 1


def test_name_beyond_the_limit_is_not_demangled() -> None:
    name = "_Z3foo" + "i" * 20_000
    shown = Demangler().one(name)
    assert shown.startswith("_Z3fooiii") and len(shown) == 4096


def test_disabled_demangler_only_cleans() -> None:
    assert Demangler(enabled=False).names([b"_Z3foov", None, b"a\nb"]) == [
        "_Z3foov",
        None,
        "a\ufffdb",
    ]
