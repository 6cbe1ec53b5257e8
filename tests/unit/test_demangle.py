# SPDX-License-Identifier: Apache-2.0
"""Linker names become source names; hostile ones cost little and stay themselves."""

from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.demangle import Demangler
from recordings import children_of


@pytest.fixture(scope="module", params=[False, True], ids=["new", "fork"])
def demangler(request: pytest.FixtureRequest) -> Demangler:
    return Demangler(forks=request.param)


@pytest.mark.parametrize(
    ("mangled", "readable"),
    [
        ("main", "main"),
        ("_ZN2at6native3addERKNS_6TensorE", "at::native::add(at::Tensor const&)"),
        ("_Z3foov.cold", "foo() [clone .cold]"),
        ("_Z3foov.isra.0.constprop.1.2", "foo() [clone .isra.0] [clone .constprop.1.2]"),
        ("_ZN1aC1ERKSt6vectorIiSaIiEE", "a::a(std::vector<int, std::allocator<int>> const&)"),
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
        ("_RNvCskwGfYPst2Cb_3foo16example_function.llvm.12.cold", "foo::example_function"),
        (
            "_RNqCs4fqI2P2rA04_11utf8_identsu30____7hkackfecea1cbdathfdh9hlq6y",
            "utf8_idents::საჭმელად_გემრიელი_სადილი",
        ),
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
def test_names(demangler: Demangler, mangled: str, readable: str) -> None:
    assert demangler.names([mangled.encode()]) == [readable.encode()]
    assert demangler.failures == 0


def expanding(levels: int) -> bytes:
    """A valid C++ name of which each level doubles the readable one."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    name, last = "_Z1f1A1PIS_S_E", "S1_"
    for level in range(levels):
        name += f"S0_I{last}{last}E"
        last = f"S{digits[2 + level]}_"
    return name.encode()


def expanding_rust(levels: int) -> bytes:
    """The same in Rust: tuples that repeat the one before them twice."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    name, before = "INvC1a1fThhE", len("INvC1a1f")
    for _ in range(levels):
        number = before - 1  # as base 62, and one less (Rust RFC 2603, <backref>)
        again = f"B{digits[number // 62] if number >= 62 else ''}{digits[number % 62]}_"
        before = len(name)
        name += f"T{again}{again}E"
    return f"_R{name}E".encode()


@pytest.mark.parametrize("name", [expanding(12), expanding_rust(12)])
def test_name_that_expands_is_shown_by_its_head(demangler: Demangler, name: bytes) -> None:
    (shown,) = demangler.names([name])
    assert len(shown) == 16_384
    assert shown.startswith((b"f(A, P<A, A>, P<P<A, A>", b"a::f::<(u8, u8), ((u8, u8), (u8, u8))"))


@pytest.mark.parametrize("endless", [expanding(30), expanding_rust(30)])
def test_name_that_expands_without_bound_stays_mangled(
    demangler: Demangler, endless: bytes
) -> None:
    """GIVEN a name of 300 bytes that stands for gigabytes, THEN it stays as it is, and the names
    around it are demangled."""
    assert len(endless) < 400
    found = demangler.names([b"_Z3onev", endless, b"_Z3twov@plt"])
    assert found == [b"one()", endless, b"two()@plt"]
    assert demangler.failures == 1
    # WHEN there are others THEN they have their names
    assert demangler.names([b"_Z5threev"]) == [b"three()"]
    assert demangler.failures == 0


def test_after_a_few_endless_names_the_rest_stays_mangled(demangler: Demangler) -> None:
    endless = [expanding(30) + letter.encode() for letter in "abcdef"]
    assert demangler.names([*endless, b"_Z3onev"]) == [*endless, b"_Z3onev"]
    assert demangler.failures == 3


@pytest.mark.parametrize(
    "name",
    [
        b"_R" + b"R" * 5000,
        b"_RINvC1a1f" + b"R" * 9000 + b"uE",
        b"_RINvC1a1f" + b"T" * 9000,
        b"_RNvC1a" + b"9" * 500,
        b"_RB_",
        b"_RNvB0_1a",
        b"_RIC1aB_E",
        b"_R" + b"NvC1a1b" * 1000,
        b"_RINvC1a1fKcffffffffffffffff_E",
        b"_RNvCu99999_1a",
        b"_ZN99999foo17h0123456789abcdefE",
        b"_ZN17h0123456789abcdefE",
        b"_ZN1a$uffffff$17h0123456789abcdefE",
        b"_Z" + b".a" * 4000,
        b"_Z" + b"17h0123456789abcdefE" * 400,
        b"_Z1f" + b"P" * 9000 + b"i",
        b"_Z1f" + b"1AI" * 2400 + b"i" + b"E" * 2400,
        b"_Z1fIXpl" + b"pl" * 1600 + b"Li1E" * 1602 + b"EEvv",
        b"_Z1f" + b"PF" * 1900 + b"vvE" + b"vE" * 1899,
        b"_Z" + b"Z1fvE" * 1900 + b"1x",
        b"_Z3f\xff\xfev",
        b"_Z4line\n_Z4vaddi",
        b"_Z4null\0v",
    ],
    ids=repr,
)
def test_hostile_names_cost_no_child(demangler: Demangler, name: bytes) -> None:
    shown, other = demangler.names([name, b"_Z3onev"])
    assert 0 < len(shown) <= 16_384
    assert other == b"one()"
    assert demangler.failures == 0


def test_name_beyond_the_limit_is_not_demangled(demangler: Demangler) -> None:
    name = b"_Z3foo" + b"i" * 20_000
    assert demangler.names([name]) == [name]


def test_more_names_than_one_question_holds(demangler: Demangler) -> None:
    names = [b"_Z%d%sv" % (len(word), word) for word in (b"f%d" % i for i in range(1000))]
    found = demangler.names([*names, b"main", *names])
    assert found[:1001] == [*(b"f%d()" % i for i in range(1000)), b"main"]
    assert found[1001:] == found[:1000]


def test_many_long_names_are_no_failure(demangler: Demangler) -> None:
    # Together they are more than a child may take.
    names = [expanding(18) + letter.encode() for letter in "abcdefhijlmnostvwxyz"]
    found = demangler.names(names)
    assert {len(name) for name in found} == {16_384}
    assert demangler.failures == 0


def test_the_child_ends_with_its_demangler(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    demangler = Demangler()
    assert demangler.names([b"main"]) == [b"main"]
    assert started == []
    demangler.names([b"_Z3onev"])
    (child,) = started
    assert child.poll() is None
    del demangler
    gc.collect()
    assert child.returncode is not None


@pytest.mark.parametrize("forks", [False, True])
def test_the_child_has_no_rights(forks: bool) -> None:
    demangler = Demangler(forks=forks)
    assert demangler.names([b"_Z3foov"]) == [b"foo()"]
    child = children_of(os.getpid())[-1]
    status = Path(f"/proc/{child}/status").read_text()
    assert "Seccomp:\t2" in status and f"CapEff:\t{0:016x}" in status
