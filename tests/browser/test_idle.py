# SPDX-License-Identifier: Apache-2.0
"""The box of idle threads beside the flame graph, in a browser."""

from __future__ import annotations

from pathlib import Path

from aiflame.agent.model.profile import SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from profiles import MS, Sample, profile_of

BLOCKED = SampleClass.BLOCKED


def _opened(page: Page, folder: Path, address: str = "", is_idle_shown: bool = False) -> None:
    """A thread that works, and two that sleep nearly always, one in two stacks of one line."""
    wait = "main;[p]feed@/app/a.py:3;[k]futex_wait;[k]schedule"
    profile = profile_of(
        Sample("main;work", 2_000 * MS),
        Sample(wait, 1_000 * MS, SampleClass.BLOCKED, thread=1),
        Sample(f"{wait};[k]__schedule", 990 * MS, SampleClass.BLOCKED, thread=1),
        Sample("main;[p]feed@/app/a.py:4", 10 * MS, thread=1),
        Sample(wait, 2_000 * MS, SampleClass.BLOCKED, thread=2),
    )
    path = folder / "run.html"
    options = ReportOptions(is_idle_shown=is_idle_shown)
    path.write_bytes(FORMATS["html"].render(profile, options))
    page.open(path, address)


def _box(page: Page) -> str:
    found: str = page.value(
        "((box) => box.hidden ? '' : box.textContent)(document.getElementById('idle'))"
    )
    return found


def _click(page: Page, selector: str) -> None:
    page.value(f"document.querySelector({selector!r}).click()")


def test_idle_threads_are_in_a_box_that_opens(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path)
    assert page.text("whole") == (
        "100 % = 2.000 s of wall time summed over 1 thread, recorded in 2.000 s;"
        " without 4.000 s of 2 idle threads"
    )
    assert _box(page) == "[idle: 2 threads]"
    assert "100 % = 2.000 s of wall time; without 4.000 s of 2 idle threads" in page.text(
        "top-note"
    )
    # WHEN the box is clicked, THEN they are in the flame graph, and the address says so
    _click(page, "#idle")
    assert page.text("whole").startswith("100 % = 6.000 s of wall time summed over 3 threads")
    assert page.value("location.hash") == "#idle=1"
    assert "100 % = 6.000 s of wall time;" in page.text("top-note")
    assert "idle" not in page.text("top-note")
    _click(page, "#idle")
    assert page.text("whole").startswith("100 % = 2.000 s")
    assert page.value("location.hash") in ("", "#")


def test_other_views_and_chosen_threads_are_whole(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path)
    _click(page, "[data-view=offcpu]")
    assert page.text("whole").startswith("100 % = 3.990 s of off-CPU time")
    assert _box(page) == ""
    _click(page, "[data-view=cpu]")
    assert page.text("whole").startswith("100 % = 2.010 s of CPU time")
    _click(page, "[data-view=wall]")
    assert _box(page) == "[idle: 2 threads]"
    _opened(page, tmp_path, "#threads=t1")
    assert page.text("whole").startswith("100 % = 2.000 s of wall time summed over 1 thread")
    assert _box(page) == ""


def test_who_waits_for_a_cpu_whenever_it_wakes_up_is_idle(page: Page, tmp_path: Path) -> None:
    wait = "main;[p]feed@/app/a.py:3;[k]futex_wait"
    profile = profile_of(
        Sample("main;work", 2_000 * MS),
        Sample(wait, 1_600 * MS, SampleClass.BLOCKED, thread=1),
        Sample(wait, 200 * MS, SampleClass.WAITING_TO_RUN, thread=1),
        Sample(wait, 200 * MS, SampleClass.PREEMPTED, thread=1),
        # It would have worked, had there been a CPU for it.
        Sample(wait, 500 * MS, SampleClass.BLOCKED, thread=2),
        Sample("main;work", 1_500 * MS, SampleClass.PREEMPTED, thread=2),
    )
    path = tmp_path / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)
    assert _box(page) == "[idle: 1 thread]"


def test_who_serves_others_in_pythons_own_library_is_idle(page: Page, tmp_path: Path) -> None:
    library = "/usr/lib/python3.11/multiprocessing"
    serves = f"[p]_serve@{library}/resource_sharer.py:138"
    profile = profile_of(
        Sample("main;work", 2_000 * MS),
        Sample(f"{serves};[p]accept@{library}/connection.py:479", 1_700 * MS, BLOCKED, thread=1),
        Sample(f"{serves};[p]_recv@{library}/connection.py:395", 290 * MS, BLOCKED, thread=1),
        Sample(f"{serves};[p]_send@{library}/connection.py:384", 10 * MS, thread=1),
    )
    path = tmp_path / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)
    assert _box(page) == "[idle: 1 thread]"


def test_a_report_may_open_with_them(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, is_idle_shown=True)
    assert page.text("whole").startswith("100 % = 6.000 s of wall time summed over 3 threads")
    _click(page, "#idle")
    assert page.value("location.hash") == "#idle=0"
