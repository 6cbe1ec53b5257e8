# SPDX-License-Identifier: Apache-2.0
"""Python frames in flame graphs: their labels, and which frames are shown."""

from __future__ import annotations

import json

import pytest
from aiflame.agent.model.profile import (
    EXITED,
    UNMAPPED,
    FrameKind,
    Function,
    SampleClass,
    StopReason,
)
from aiflame.agent.reports import FORMATS, Frames, ReportOptions
from aiflame.agent.reports.palette import Category, category_of, fill
from aiflame.agent.reports.rows import label_of
from goldens import assert_golden
from pprof_decoder import decode
from profiles import MS, Sample, profile_of, python_profile, small_profile


def _folded(profile, **options) -> list[str]:
    data = FORMATS["folded"].render(profile, ReportOptions(plain=True, **options))
    return data.decode().splitlines()


@pytest.mark.parametrize("frames", Frames)
def test_golden(frames: Frames) -> None:
    options = ReportOptions(frames=frames)
    assert_golden(
        f"python.{frames.value}.folded", FORMATS["folded"].render(python_profile(), options)
    )


@pytest.mark.parametrize(
    ("name", "file", "line", "label"),
    [
        ("Net.forward", "/app/train.py", 12, "Net.forward (train.py:12)"),
        ("Net.forward", "/app/train.py", 0, "Net.forward (train.py)"),
        ("<module>", "<string>", 1, "<module> (<string>:1)"),
        ("f", "", 3, "f (line 3)"),
        ("f", "", 0, "f"),
        ("a\nb", "x\x1b.py", 1, "a\ufffdb (x\ufffd.py:1)"),
        ("f", "/" + "x" * 5_000, 1, f"f ({'x' * 4_096}... (5000 characters):1)"),
    ],
)
def test_labels_of_python_frames(name: str, file: str, line: int, label: str) -> None:
    assert label_of(Function(FrameKind.PYTHON, name, None, file), line) == label


def test_other_kinds_have_no_line_in_their_label() -> None:
    for kind in set(FrameKind) - {FrameKind.PYTHON}:
        assert label_of(Function(kind, "f", None, "/src/f.c"), 12) == "f"


def test_a_python_function_is_split_by_line_and_a_native_one_is_not() -> None:
    profile = profile_of(
        Sample("main:1;[p]f@/a.py:3", 5), Sample("main:2;[p]f@/a.py:4", 6), Sample("main:3", 7)
    )
    assert _folded(profile) == [
        "server (100);main 7",
        "server (100);main;f (a.py:3) 5",
        "server (100);main;f (a.py:4) 6",
    ]


def test_every_selection_keeps_all_time() -> None:
    whole = int(python_profile().samples["ns"].sum())
    for frames in Frames:
        for hide in (False, True):
            lines = _folded(python_profile(), frames=frames, hide_importlib=hide)
            assert sum(int(line.rpartition(" ")[2]) for line in lines) == whole


def test_causes_are_known_where_their_frames_are_not_shown() -> None:
    profile = profile_of(
        Sample("main;[i]eval;[p]f@/a.py:3;read;[k]do_futex;[k]futex_wait", 5, SampleClass.BLOCKED)
    )
    assert _folded(profile, frames=Frames.PYTHON) == ["server (100);f (a.py:3);[blocked: lock] 5"]


def test_markers_stay_in_every_selection() -> None:
    profile = profile_of(Sample("main;[p]f@/a.py:3;[m][truncated: x]", 5, end=StopReason.NO_TABLE))
    assert _folded(profile, frames=Frames.PYTHON) == [
        "server (100);[truncated: no table];f (a.py:3);[truncated: x] 5"
    ]


def test_a_program_without_python() -> None:
    profile = profile_of(Sample("main;[k]read", 5))
    for frames in (Frames.BOTH, Frames.NATIVE, Frames.ALL):
        assert _folded(profile, frames=frames) == ["server (100);main;read 5"]
    assert _folded(profile, frames=Frames.PYTHON) == ["server (100) 5"]


@pytest.mark.parametrize(
    ("frame", "is_hidden"),
    [
        ("[p]_find_and_load@<frozen importlib._bootstrap>:3", True),
        ("[p]exec_module@<frozen importlib._bootstrap_external>:3", True),
        ("[p]_run_code@<frozen runpy>:88", True),
        ("[p]_run_module_as_main@/usr/lib/python3.10/runpy.py:196", True),
        ("[p]race@/home/me/runpy.py:2", False),
        ("[p]f@/app/importlib.py:3", False),
        ("importlib@x", False),
    ],
)
def test_import_machinery_can_be_hidden(frame: str, is_hidden: bool) -> None:
    profile = profile_of(Sample(f"main;[p]top@/a.py:1;{frame};[p]end@/a.py:2", 5))
    assert len(_folded(profile)[0].split(";")) == 5
    (line,) = _folded(profile, hide_importlib=True)
    assert len(line.split(";")) == (4 if is_hidden else 5)


def test_colours_of_kinds() -> None:
    interpreter = Function(FrameKind.INTERPRETER, "_PyEval_EvalFrameDefault", 0, "")
    assert category_of(interpreter) is Category.NATIVE
    assert category_of(Function(FrameKind.PYTHON, "a::b", None, "/a.py")) is Category.PYTHON
    # What Java and Node make, which is in no file, and what is in none for another reason.
    for name, category in {
        "int Busy.sortStuff(java.util.Random)": Category.GENERATED,
        "[generated code]": Category.GENERATED,
        "v8::Evaluate": Category.GENERATED,
        UNMAPPED: Category.NATIVE,
        EXITED: Category.NATIVE,
        "[native 0x7f0012345678]": Category.NATIVE,
    }.items():
        assert category_of(Function(FrameKind.NATIVE, name, None, "")) is category, name
    assert category_of(Function(FrameKind.NATIVE, "[generated code]", 0, "")) is Category.NATIVE
    # pink: red 245-255, green and blue 138-178
    for shade in range(8):
        red, green, blue = bytes.fromhex(fill(Category.PYTHON, shade, False)[1:])
        assert 245 <= red <= 255
        assert 138 <= green <= 178 and 138 <= blue <= 178


def test_speedscope_has_file_and_line_of_each_python_frame() -> None:
    document = json.loads(FORMATS["speedscope"].render(python_profile(), ReportOptions()))
    frames = {frame["name"]: frame for frame in document["shared"]["frames"]}
    for line in (12, 13):
        name = f"Net.forward (train.py:{line})"
        assert frames[name] == {"name": name, "file": "/app/train.py", "line": line}
    assert "_PyEval_EvalFrameDefault" not in frames


def test_pprof_has_name_file_and_line_apart() -> None:
    decoded = decode(FORMATS["pprof"].render(python_profile(), ReportOptions(frames=Frames.PYTHON)))
    text = decoded.text()
    assert "Net.forward" in text and "/app/train.py" in text
    assert "Net.forward (" not in text
    assert {m for s in decoded.samples for m in s.mappings} == {"[python]"}


def test_pprof_labels_samples_with_the_state_of_the_gil() -> None:
    decoded = decode(FORMATS["pprof"].render(python_profile(), ReportOptions()))
    ns: dict[object, int] = {}
    for sample in decoded.samples:
        state = sample.labels.get("gil")
        ns[state] = ns.get(state, 0) + sample.values["wall/nanoseconds"]
    assert ns == {"held": 300 * MS, "released": 1_200 * MS, "waiting": 300 * MS, None: 90 * MS}


def test_pprof_knows_causes_where_their_frames_are_not_shown() -> None:
    options = ReportOptions(frames=Frames.PYTHON)
    assert b"lock" in decode(FORMATS["pprof"].render(small_profile(), options)).text().encode()


def test_the_svg_shows_what_was_chosen() -> None:
    shown = {
        frames: FORMATS["svg"].render(python_profile(), ReportOptions(frames=frames)).decode()
        for frames in Frames
    }
    assert {f for f in Frames if "<title>Net.forward (train.py:12)" in shown[f]} == {
        Frames.BOTH,
        Frames.PYTHON,
        Frames.ALL,
    }
    assert {f for f in Frames if "_PyEval_EvalFrameDefault" in shown[f]} == {
        Frames.NATIVE,
        Frames.ALL,
    }
    assert {f for f in Frames if "at::matmul" in shown[f]} == set(Frames) - {Frames.PYTHON}
