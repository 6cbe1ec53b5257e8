# SPDX-License-Identifier: Apache-2.0
"""Processes that come together in the page, in a browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aiflame.agent.model.profile import ALL_PROCESSES, Profile, SampleClass, Thread
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.merge import opening
from browser.chromium import Page
from profiles import MS, RECORDING, Sample, process, profile_of


def _profile(target: str) -> Profile:
    """Two compilers, one with a function that is called as they are, and a shell that waits."""
    return profile_of(
        Sample("main;parse", 30 * MS),
        Sample("main;cc1", 20 * MS, thread=1),
        Sample("wait", 50 * MS, SampleClass.WAITING_TO_RUN, thread=2),
        processes=(process(11, "cc1"), process(12, "cc1"), process(10, "sh")),
        threads=(Thread(0, 11, "cc1", 0, 0), Thread(1, 12, "cc1", 0, 0), Thread(2, 10, "sh", 0, 0)),
        recording=replace(RECORDING, target=target),
    )


def _opened(page: Page, folder: Path, target: str, address: str = "") -> None:
    profile = _profile(target)
    path = folder / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, opening(profile)))
    page.open(path, address)


def _roots(page: Page) -> list[list[object]]:
    found: list[list[object]] = page.value(
        "((t, names) => [...t.label.keys()].filter((i) => t.depth[i] === 1 && t.total[i])"
        ".map((i) => [names[t.label[i]], t.total[i] / 1e6]))"
        "(aiflame.graph.tree, aiflame.data.names)"
    )
    return found


def _threads(page: Page) -> list[str]:
    found: list[str] = page.value(
        "[...document.querySelectorAll('#threads option')].map((o) => o.textContent)"
    )
    return found


def _choose(page: Page, control: str, value: str) -> None:
    page.value(
        f"((s) => {{ s.value = {value!r}; s.dispatchEvent(new Event('change')); }})"
        f"(document.getElementById({control!r}))"
    )


def test_a_whole_machine_opens_with_cpu_time_by_name(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, ALL_PROCESSES)
    assert page.text("whole").startswith("100 % = 50.000 ms of CPU time summed over 3 threads")
    assert _roots(page) == [["cc1", 50]]
    assert page.value("document.getElementById('merge').value") == "comm"
    # THEN threads of one name are one entry, which chooses all of them
    assert _threads(page) == ["all", "all of cc1", "cc1 (2 threads)", "all of sh", "sh"]
    _choose(page, "threads", "t0")
    assert _roots(page) == [["cc1", 50]]
    # WHEN processes are apart, THEN each is a root, and the address says so
    _choose(page, "merge", "none")
    assert _roots(page) == [["cc1 (11)", 30], ["cc1 (12)", 20]]
    assert page.value("location.hash") == "#merge=none"
    _choose(page, "threads", "t1")
    assert _roots(page) == [["cc1 (12)", 20]]


def test_the_choice_is_kept_in_the_address(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, "make (pid 9)", "#merge=container&view=wall")
    assert _roots(page) == [["[no container]", 100]]
    _choose(page, "merge", "none")
    assert _roots(page) == [["cc1 (11)", 30], ["cc1 (12)", 20], ["sh (10)", 50]]
    assert page.value("location.hash") in ("", "#")
    # A function that is called as its process is stays apart from it.
    _choose(page, "merge", "comm")
    assert _roots(page) == [["cc1", 50], ["sh", 50]]
    totals = page.value(
        "[...aiflame.sums.total.keys()].filter((i) => aiflame.data.names[i] === 'cc1')"
        ".map((i) => aiflame.sums.total[i] / 1e6)"
    )
    assert sorted(totals) == [20, 50]
