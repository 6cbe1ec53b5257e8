# SPDX-License-Identifier: Apache-2.0
"""Puts a thread's Python frames into its native stack, each run where its eval call stands.

Native and Python frames were taken at the same instant, leaf first both. Each native frame in the
eval loop stands for one run of Python frames, up to and including the frame that ends the run.
Where the instructions of the eval loop are functions of their own (--with-tail-call-interp), it is
their frames that do so: each jumps to the next, so that there is one in each eval loop, while the
function that calls the first may be inlined anywhere.
Where the numbers of eval frames and runs differ, nothing says which are missing but these rules:

* the Python chain was cut (too deep, unreadable): pair from the leaf on, the eval frames that are
  left stay native;
* the native stack was cut: pair from the leaf on, the runs that are left are the callers;
* one run too few, both whole: the leaf's eval loop has not linked its first frame yet, or has
  unlinked its last. It stays native, all else pairs from the root on;
* else pair from the root on: eval frames that are left at the leaf stay native, runs that are left
  go to the leaf side of the first pair.

Which rule was used is part of the answer, to be counted. Answers are indices: frames can be of any
type. Pure; no names are looked up here but those that `role_of` is given.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiflame.agent.python.walk import PythonFrame


class Role(enum.Enum):
    """What a native frame is to the splice."""

    KERNEL = 0
    EVAL = 1  # its address is in one of the eval loop's ranges
    GLUE = 2  # the interpreter calling itself: no work of its own
    UNNAMED = 3  # of a stripped interpreter: whether it works or calls cannot be told
    OTHER = 4
    TRAMPOLINE = 5  # a stub of -X perf, which is named as the Python function that it calls
    HANDLER = 6  # an instruction of the eval loop that is a function


class Match(enum.Enum):
    """How eval frames and runs were paired; the value names the counter."""

    EXACT = "exact"
    NO_PYTHON = "no_python"  # neither eval frames nor runs, or eval frames without any run
    LEAF_RACE = "leaf_race"
    PYTHON_CUT = "python_cut"
    NATIVE_CUT = "native_cut"
    RUNS_MISSING = "runs_missing"
    EVALS_MISSING = "evals_missing"
    NO_EVAL = "no_eval"  # runs, but a whole native stack without an eval frame: not shown


class Piece(NamedTuple):
    """One frame of the combined stack: which list it is from, and its position there.

    Hidden are native frames of the interpreter that a reader can do without: eval loops that became
    Python frames, and glue between them.
    """

    is_python: bool
    at: int
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class Spliced:
    """A combined stack.

    Attributes:
        pieces: Leaf first. Eval loops stand after the Python frames that they ran.
        match: How it was made.
    """

    pieces: tuple[Piece, ...]
    match: Match


class Cuts(NamedTuple):
    """Which of the two walks did not get to its end."""

    native: bool = False
    python: bool = False


# Functions of the interpreter that stand between two Python frames, or between a Python frame and
# the C function that it calls, and only hand arguments on: Objects/{call,methodobject,descrobject,
# classobject,genobject,typeobject,funcobject}.c, Python/{ceval,pythonrun}.c, Modules/main.c of
# v3.8.18 to v3.13.0; what calls trampolines: Python/perf_trampoline.c, v3.12.1. GCC appends
# .constprop.0, .isra.0, .part.0, .cold and .lto_priv.0.
_GLUE = re.compile(
    r"""(?:
    _?PyObject_(?:Call|Vectorcall|FastCall|MakeTpCall)\w* | object_vacall |
    _?PyVectorcall_\w+ | _PyStack_\w+ |
    _?PyFunction_(?:Vectorcall|FastCall)\w* | function_code_fastcall | func_descr_get |
    _?PyCFunction_\w*[Cc]all\w* | cfunction_(?:vectorcall\w*|call\w*) |
    _?PyMethodDef_RawFastCall\w* | _PyMethodDescr_\w*[Cc]all\w* |
    method_vectorcall\w* | method_call | methoddescr_call | wrapperdescr_call | wrapper_call |
    instancemethod_call | classmethod_\w+ | slot_tp_\w+ | vectorcall_(?:method|maybe|unbound) |
    call_(?:method|maybe|unbound\w*|function|attribute) | do_call_core | fast_function |
    partial_(?:call|fastcall|vectorcall)\w* | type_call | _?PyType_Call |
    gen_(?:send\w*|iternext\w*|_?close\w*) | _?PyGen_\w+ | PyIter_(?:Next|Send) |
    coro_wrapper_\w+ | _PyEval_(?:Vector|EvalCode\w*|EvalFrame|EvalFrame_\w+) |
    PyEval_(?:EvalCode\w*|EvalFrame\w*|CallObject\w*|CallFunction|CallMethod) |
    py_?run_?\w* | _?PyRun_\w+ | run_(?:mod|eval_code_obj|pyc_file) |
    Py_(?:RunMain|BytesMain|Main) |
    pymain_\w+ | builtin_(?:exec|eval)(?:_impl)? | thread_run | t_bootstrap | pythread_wrapper |
    py_trampoline_evaluator
    )(?:\.\w+)*""",
    re.VERBOSE,
)

# Python/ceval_macros.h, v3.14.0.
_HANDLER = re.compile(r"_TAIL_CALL_\w+(?:\.\w+)*")


def role_of(name: str, is_eval: bool, in_interpreter: bool, is_kernel: bool = False) -> Role:
    """The role of a native frame.

    Args:
        name: Its function's name, "" where unknown.
        is_eval: Its address is in one of the eval loop's ranges.
        in_interpreter: Its binary is the interpreter's.
        is_kernel: It is a frame of the kernel.
    """
    if is_kernel:
        return Role.KERNEL
    if is_eval:
        return Role.EVAL
    # A C extension may have functions of these names; only the interpreter's are glue.
    if not in_interpreter:
        return Role.OTHER
    if not name:
        return Role.UNNAMED
    if _HANDLER.fullmatch(name):
        return Role.HANDLER
    return Role.GLUE if _GLUE.fullmatch(name) else Role.OTHER


def splice(
    roles: Sequence[Role],
    pythons: Sequence[PythonFrame],
    cuts: Cuts = Cuts(),  # noqa: B008  (immutable)
) -> Spliced:
    """Combine one native stack and the Python frames of the same instant, leaf first both.

    Args:
        roles: Of the native frames, kernel frames among them.
        pythons: The Python frames.
        cuts: Which of the two is incomplete at its root.

    Returns:
        All frames. Hidden is glue, but where no user-space frame is on the leaf side of it, since
        time is spent in it then; unnamed frames, but where no Python frame is; trampolines, but
        where their Python frame is not known; and what calls the first instruction's function.
    """
    evals = _eval_loops(roles)
    if len(pythons) == 1 and not pythons[0].code_address and not evals:
        # The frame below all others, which 3.15 has in each thread (PyThreadState.base_frame).
        pythons = ()
    runs = _runs(pythons)
    match, pairs, surplus = _pair(evals, len(runs), cuts)
    if match in (Match.NO_PYTHON, Match.NO_EVAL):
        return Spliced(tuple(Piece(False, i) for i in range(len(roles))), match)
    pieces: list[Piece] = []
    glue = _glue(roles, pairs, match)
    for index in range(len(roles)):
        if index in pairs:
            for run in pairs[index]:
                pieces += [Piece(True, i) for i in runs[run] if pythons[i].code_address]
        pieces.append(Piece(False, index, index in pairs or index in glue))
    for run in surplus:
        pieces += [Piece(True, i) for i in runs[run] if pythons[i].code_address]
    return Spliced(tuple(pieces), match)


def _eval_loops(roles: Sequence[Role]) -> list[int]:
    """Which native frames stand for runs."""
    return [
        index
        for index, role in enumerate(roles)
        if role is Role.HANDLER or (role is Role.EVAL and not _is_entry(roles, index))
    ]


def _is_entry(roles: Sequence[Role], index: int) -> bool:
    """Whether what a native frame calls is the function of an instruction."""
    return index > 0 and roles[index - 1] is Role.HANDLER


def _glue(roles: Sequence[Role], pairs: dict[int, list[int]], match: Match) -> set[int]:
    """Which native frames only hand on what others do."""
    found = set()
    has_user_leaf = has_python = False
    is_known = True
    for index, role in enumerate(roles):
        has_python = has_python or index in pairs
        is_entry = role is Role.EVAL and _is_entry(roles, index)
        if role in (Role.EVAL, Role.HANDLER) and not is_entry:
            # Past the end of a cut chain trampolines are all that is known of Python.
            is_known = index in pairs or match is not Match.PYTHON_CUT
        if (
            (is_entry and index - 1 in pairs)
            or (role is Role.GLUE and has_user_leaf)
            or (role is Role.UNNAMED and has_python)
            or (role is Role.TRAMPOLINE and is_known)
        ):
            found.add(index)
        has_user_leaf = has_user_leaf or role is not Role.KERNEL
    return found


def _runs(pythons: Sequence[PythonFrame]) -> list[range]:
    """Index ranges of the runs; the last may be open, if the chain was cut."""
    found: list[range] = []
    begin = 0
    for index, frame in enumerate(pythons):
        if frame.ends_run:
            found.append(range(begin, index + 1))
            begin = index + 1
    if begin < len(pythons):
        found.append(range(begin, len(pythons)))
    return found


def _pair(evals: list[int], runs: int, cuts: Cuts) -> tuple[Match, dict[int, list[int]], list[int]]:
    """Runs by the native index that they replace, and those that follow the root."""
    if not runs:
        return Match.NO_PYTHON, {}, []
    count = len(evals)
    if count == runs:
        return Match.EXACT, {evals[i]: [i] for i in range(runs)}, []
    if count < runs and cuts.native:
        return Match.NATIVE_CUT, {evals[i]: [i] for i in range(count)}, [*range(count, runs)]
    if not count:
        return Match.NO_EVAL, {}, []
    if count > runs and cuts.python:
        return Match.PYTHON_CUT, {evals[i]: [i] for i in range(runs)}, []
    if count > runs:
        spare = count - runs
        pairs = {evals[spare + i]: [i] for i in range(runs)}
        return (Match.LEAF_RACE if spare == 1 else Match.RUNS_MISSING), pairs, []
    spare = runs - count
    pairs = {evals[i]: [spare + i] for i in range(count)}
    pairs[evals[0]] = [*range(spare + 1)]
    return Match.EVALS_MISSING, pairs, []
