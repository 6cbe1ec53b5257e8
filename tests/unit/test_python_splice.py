# SPDX-License-Identifier: Apache-2.0
"""Splicing: known stacks in words, and properties over random ones."""

from __future__ import annotations

import random

import pytest
from aiflame.agent.python.splice import Cuts, Match, Role, Spliced, role_of, splice
from aiflame.agent.python.walk import PythonFrame

KERNEL, EVAL, GLUE, OTHER = Role.KERNEL, Role.EVAL, Role.GLUE, Role.OTHER


def _pythons(text: str) -> list[PythonFrame]:
    """One frame a letter; a dot after it ends the run; a dot alone is an empty run."""
    found: list[PythonFrame] = []
    for index, letter in enumerate(text):
        if letter != ".":
            ends = text[index + 1 : index + 2] == "."
            found.append(PythonFrame(ord(letter), 0, ends))
        elif index == 0 or text[index - 1] == ".":
            found.append(PythonFrame(0, 0, True))
    return found


def _shown(natives: str, spliced: Spliced, pythons: list[PythonFrame]) -> str:
    return "".join(
        chr(pythons[piece.at].code_address) if piece.is_python else natives[piece.at]
        for piece in spliced.pieces
        if not piece.is_hidden
    )


_ROLES = {"K": KERNEL, "E": EVAL, "G": GLUE, "O": OTHER, "?": Role.UNNAMED, "T": Role.TRAMPOLINE}
_ROLES["H"] = Role.HANDLER


@pytest.mark.parametrize(
    ("natives", "python", "cuts", "expected", "match"),
    [
        ("OEGOGEGG", "ab.c.", Cuts(), "OabOc", Match.EXACT),
        # a C function below its call, and a kernel frame above
        ("KOGE", "a.", Cuts(), "KOa", Match.EXACT),
        # time is spent in the glue itself
        ("KGE", "a.", Cuts(), "KGa", Match.EXACT),
        ("GGE", "a.", Cuts(), "Ga", Match.EXACT),
        # a stripped interpreter: what it calls may be work, what calls it between frames is not
        ("O?E??E?", "a.b.", Cuts(), "O?ab", Match.EXACT),
        # trampolines of -X perf: beside their Python frames, also when the leaf is on its way in
        ("OETGETGO", "a.b.", Cuts(), "OabO", Match.EXACT),
        ("KTGETG", "a.", Cuts(), "Ka", Match.EXACT),
        ("ETGETG", "a.", Cuts(), "Ea", Match.LEAF_RACE),
        # where Python frames are not known, they stand for them
        ("ETGETG", "a", Cuts(python=True), "aET", Match.PYTHON_CUT),
        ("ETGETG", "", Cuts(), "ETGETG", Match.NO_PYTHON),
        # instructions that are functions stand for runs, with what calls the first or without
        ("KHE", "a.", Cuts(), "Ka", Match.EXACT),
        ("OGHEGHEO", "a.b.", Cuts(), "OabO", Match.EXACT),
        ("KGHE", "a.", Cuts(), "KGa", Match.EXACT),
        ("HEHE", "a.", Cuts(), "HEa", Match.LEAF_RACE),
        ("OGHGHG", "a.b.", Cuts(), "Oab", Match.EXACT),
        ("EGHE", "a.b.", Cuts(), "ab", Match.EXACT),
        ("EOEO", "a.", Cuts(), "EOaO", Match.LEAF_RACE),
        ("EOEO", ".a.", Cuts(), "OaO", Match.EXACT),
        ("EEE", "a.", Cuts(), "EEa", Match.RUNS_MISSING),
        ("EO", "a.b.c.", Cuts(native=True), "aObc", Match.NATIVE_CUT),
        ("OO", "a.b.", Cuts(native=True), "OOab", Match.NATIVE_CUT),
        ("EOEOE", "a.b", Cuts(python=True), "aObOE", Match.PYTHON_CUT),
        ("EOE", "a.b.c.", Cuts(), "abOc", Match.EVALS_MISSING),
        ("OOO", "a.", Cuts(), "OOO", Match.NO_EVAL),
        # in 3.15, what is below all frames
        ("OOO", ".", Cuts(), "OOO", Match.NO_PYTHON),
        ("EOO", ".", Cuts(), "OO", Match.EXACT),
        ("OGO", "", Cuts(), "OGO", Match.NO_PYTHON),
        ("EGE", "", Cuts(), "EGE", Match.NO_PYTHON),
    ],
)
def test_stacks(natives: str, python: str, cuts: Cuts, expected: str, match: Match) -> None:
    pythons = _pythons(python)
    spliced = splice([_ROLES[letter] for letter in natives], pythons, cuts)
    assert _shown(natives, spliced, pythons) == expected
    assert spliced.match is match


def test_glue_and_eval_loops_are_there_and_hidden() -> None:
    natives = "OGEGGE"
    spliced = splice([_ROLES[x] for x in natives], _pythons("a.b."))
    order = ["a" if piece.is_python else natives[piece.at] for piece in spliced.pieces]
    assert "".join(order) == "OGaEGGaE"
    assert [piece.at for piece in spliced.pieces if piece.is_hidden] == [1, 2, 3, 4, 5]


def test_properties_of_any_two_stacks() -> None:
    chance = random.Random(11)
    for _ in range(5000):
        roles = [chance.choice(list(Role)) for _ in range(chance.randrange(20))]
        pythons = [
            PythonFrame(chance.choice((0, 8, 16)), 0, chance.random() < 0.5)
            for _ in range(chance.randrange(12))
        ]
        cuts = Cuts(chance.random() < 0.3, chance.random() < 0.3)
        spliced = splice(roles, pythons, cuts)
        natives = [piece.at for piece in spliced.pieces if not piece.is_python]
        frames = [piece.at for piece in spliced.pieces if piece.is_python]
        # Each list keeps its order, and no frame is shown twice.
        assert natives == sorted(set(natives))
        assert frames == sorted(set(frames))
        # All Python frames show, or none.
        shown = [i for i, frame in enumerate(pythons) if frame.code_address]
        assert frames == ([] if spliced.match in (Match.NO_EVAL, Match.NO_PYTHON) else shown)
        # None is missing, and hidden are eval frames, their instructions and glue alone.
        assert natives == [*range(len(roles))]
        hidden = {roles[piece.at] for piece in spliced.pieces if piece.is_hidden}
        assert hidden <= {EVAL, GLUE, Role.UNNAMED, Role.TRAMPOLINE, Role.HANDLER}


_CALLS = """_PyFunction_Vectorcall PyObject_Call _PyObject_MakeTpCall cfunction_call run_mod
_PyEval_Vector method_vectorcall cfunction_vectorcall_FASTCALL_KEYWORDS.lto_priv.0 slot_tp_call
_PyObject_FastCallDict method_vectorcall_NOARGS gen_send_ex2.constprop.0 PyEval_EvalCode
function_code_fastcall pymain_run_python.constprop.0 Py_BytesMain builtin_exec"""
_WORK = """time_sleep lock_PyThread_acquire_lock PyThread_acquire_lock_timed take_gil list_sort_impl
gc_collect_main dict_subscript PyDict_SetItem builtin_sorted select_poll_poll long_add
_PyUnicode_JoinArray main"""


@pytest.mark.parametrize("name", _CALLS.split())
def test_calls_between_frames_are_glue(name: str) -> None:
    assert role_of(name, is_eval=False, in_interpreter=True) is GLUE
    assert role_of(name, is_eval=False, in_interpreter=False) is OTHER


@pytest.mark.parametrize("name", _WORK.split())
def test_work_is_not_glue(name: str) -> None:
    assert role_of(name, is_eval=False, in_interpreter=True) is OTHER


@pytest.mark.parametrize("name", ["_TAIL_CALL_CALL_KW", "_TAIL_CALL_error.llvm.7.cold"])
def test_functions_of_the_tail_calling_interpreter_are_instructions(name: str) -> None:
    assert role_of(name, is_eval=False, in_interpreter=True) is Role.HANDLER
    assert role_of(name, is_eval=False, in_interpreter=False) is OTHER


def test_the_address_decides_what_is_an_eval_frame() -> None:
    assert role_of("", is_eval=True, in_interpreter=True) is EVAL
    assert role_of("", is_eval=False, in_interpreter=True) is Role.UNNAMED
    assert role_of("", is_eval=False, in_interpreter=False) is OTHER
    assert role_of("x", is_eval=True, in_interpreter=True, is_kernel=True) is KERNEL
