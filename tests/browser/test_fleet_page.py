# SPDX-License-Identifier: Apache-2.0
"""The page of a fleet in a browser: filters by label, and the strip by the time of day."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.profile import Fleet, FleetLabel, Process, SampleClass, Thread
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from browser.looks import hard_to_read, misplaced, window
from device_profiles import Launch, Ran, device_profile_of
from profiles import MS, Sample
from support import wait_until

_S = 1_000 * MS
_HOSTILE = '</script><img src=x onerror="document.title=1">'
_BEGIN_S = 1_795_392_000  # 2026-11-23 00:00:00 UTC
_PODS = 15


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten minutes of train on n1, web on n1 and n2, and a service with a hostile name on n3."""
    processes = tuple(
        Process(0, 0, name, "", "", "", "", 0, None) for name in ("train", "web", "odd")
    )
    # By thread: process, service, node, pod, class; the last one is what a device did.
    who = (
        *((0, 0, 0, 0, 0), (1, 1, 0, 1, 0), (1, 1, 1, 2, 1)),
        *((2, 2, 2, _PODS, 0), (0, 0, 0, 0, -1)),
    )
    profile = device_profile_of(
        [Launch("main;launch", "k", 7, interval=60)],
        [Ran("k", 0, 50, "barrier", interval=60)],
        cpu=[
            Sample("main;load", 60 * _S, count=60, first_s=0, thread=0),
            Sample("main;serve", 20 * _S, count=20, first_s=60, thread=1),
            Sample("main;poll", 15 * _S, SampleClass.BLOCKED, first_s=540, thread=2),
            Sample("main;other", 5 * _S, count=5, first_s=540, thread=3),
        ],
        processes=processes,
        threads=tuple(Thread(process, 0, processes[process].name, 0, 0) for process, *_ in who),
    )
    names = (
        ("service", ("train", "web", _HOSTILE), 0),
        ("node", ("n1", "n2", "n3"), 0),
        ("pod", tuple(f"pod-{i}" for i in range(_PODS)), 9_985),
        ("class", ("on-CPU", "blocked"), 0),
    )
    labels = tuple(
        FleetLabel(name, values, others, np.array([of[i] for of in who], np.int64))
        for i, (name, values, others) in enumerate(names, 1)
    )
    devices = np.full(len(profile.gpu.kernels), len(who) - 1, np.int64)
    profile = replace(
        profile,
        recording=replace(profile.recording, duration_ns=600 * _S),
        fleet=Fleet("00:00 to 00:10", _BEGIN_S, 60, labels, devices),
    )
    path = tmp_path_factory.mktemp("page") / "fleet.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    return path


def _words(page: Page, label: str) -> str:
    found: str = page.value(f"document.querySelector('[data-label={label}] .chosen').textContent")
    return found


def _shares(page: Page, label: str) -> dict[str, str]:
    found: dict[str, str] = page.value(
        f"Object.fromEntries([...document.querySelectorAll('[data-label={label}] .values label')]"
        ".filter((row) => !row.hidden).map((row) =>"
        " [row.querySelector('.value').textContent, row.querySelector('.share').textContent]))"
    )
    return found


def _tick(page: Page, label: str, value: str) -> None:
    """Opens the list of a label, if need be, and clicks on a value, with the mouse."""
    field = f"document.querySelector('[data-label={label}]')"
    if not page.value(f"{field}.open"):
        _click(page, f"{field}.querySelector('summary')")
    row = (
        f"[...{field}.querySelectorAll('.values label')]"
        f".find((row) => row.querySelector('.value').textContent === {value!r})"
    )
    _click(page, row)


def _click(page: Page, element: str) -> None:
    x, y = page.value(
        f"((r) => [r.left + r.width / 2, r.top + r.height / 2])({element}.getBoundingClientRect())"
    )
    page.mouse("mousePressed", x, y)
    page.mouse("mouseReleased", x, y)


def _functions(page: Page) -> set[str]:
    found: list[str] = page.value(
        "[...document.querySelectorAll('#top tbody td button')].map((c) => c.textContent)"
    )
    return {*found} & {"load", "serve", "poll", "other"}


def _address(page: Page) -> str:
    found: str = page.value("decodeURIComponent(location.hash)")
    return found


def test_choosing_a_value_makes_everything_of_it(page: Page, report: Path) -> None:
    page.open(report)
    assert page.text("whole") == "100 % = 100.000 s of wall time, 00:00 to 00:10"
    assert (_words(page, "service"), _words(page, "pod")) == ("all 3", "all 10,000")
    assert _shares(page, "service") == {"train": "60.00 %", "web": "35.00 %", _HOSTILE: "5.00 %"}
    # WHEN a service is chosen THEN whole, functions, address and the strip are of it
    _tick(page, "service", "web")
    assert "100 % = 35.000 s of wall time, service web" in page.text("whole")
    assert _functions(page) == {"serve", "poll"}
    assert (_address(page), _words(page, "service")) == ("#service=web", "web")
    assert page.value("aiflame.strip.lanes.map((lane) => lane.total[lane.most] / 1e9)") == [20, 15]
    # AND shares of other labels are of it, those of its own still of all
    assert _shares(page, "node") == {"n1": "57.14 %", "n2": "42.86 %", "n3": "0.00 %"}
    assert _shares(page, "service")["train"] == "60.00 %"
    # AND a second value adds to it, a second label narrows it
    _tick(page, "service", "train")
    assert "95.000 s" in page.text("whole")
    assert _words(page, "service") == "2 of 3"
    _tick(page, "node", "n1")
    assert "80.000 s" in page.text("whole")
    assert _functions(page) == {"load", "serve"}


def test_a_filter_and_a_time_range_narrow_each_other(page: Page, report: Path) -> None:
    page.open(report, "#node=n1&from=0&to=60")
    assert "60.000 s of wall time, node n1, 00:00:00 to 00:01:00 UTC of" in page.text("whole")
    assert _functions(page) == {"load"}
    assert _shares(page, "service")["train"] == "100.00 %"
    title = page.value("document.getElementById('range').title")
    assert title == f"aiflame query flame --from {_BEGIN_S} --to {_BEGIN_S + 60}"
    page.open(report, "#node=n2&from=0&to=60")
    assert page.text("empty") == "This selection has no wall time."


def test_back_escape_and_clear_undo_filters(page: Page, report: Path) -> None:
    page.open(report)
    _tick(page, "service", "web")
    _tick(page, "class", "blocked")
    assert "15.000 s" in page.text("whole")
    page.value("history.back()")
    wait_until(lambda: "35.000 s" in page.text("whole"))
    assert page.value(
        "[...document.querySelectorAll('[data-label=class] input:checked')].length === 0"
    )
    page.value("document.getElementById('filters-clear').click()")
    assert "100.000 s" in page.text("whole")
    assert _address(page) == ""
    page.open(report, "#service=web")
    page.press("Escape")
    assert "100.000 s" in page.text("whole")


def test_the_keys_do_all_of_it(page: Page, report: Path) -> None:
    page.open(report)
    page.value("document.querySelector('[data-label=service] summary').focus()")
    page.press("Enter")
    wait_until(lambda: page.value("document.querySelector('[data-label=service]').open"))
    page.press("Tab")
    page.press("2")  # of a field, no view
    page.press(" ")
    wait_until(lambda: _address(page) == "#service=train")
    # Escape closes the list, then clears the filter
    page.press("Escape")
    assert not page.value("document.querySelector('[data-label=service]').open")
    assert _address(page) == "#service=train"
    page.press("Escape")
    assert _address(page) == ""


def test_what_has_no_name_is_said_and_chosen_as_others(page: Page, report: Path) -> None:
    page.open(report)
    assert page.text("filters-note") == (
        "pod: the 15 with most of 10,000 have a name here, the rest are other (9,985)"
    )
    _tick(page, "pod", "other (9,985)")
    assert "5.000 s of wall time, pod other (9,985)" in page.text("whole")
    assert _functions(page) == {"other"}
    # AND long lists are searched
    page.value(
        "((box) => { box.value = 'POD-1'; box.dispatchEvent(new Event('input')); })"
        "(document.querySelector('[data-label=pod] [type=search]'))"
    )
    assert {*_shares(page, "pod")} == {"pod-1", *(f"pod-{n}" for n in range(10, 15))}


def test_devices_are_filtered_too(page: Page, report: Path) -> None:
    # What a device did has no class: that filter leaves it as it is.
    page.open(report, "#view=gpu&service=train&class=blocked")
    assert "50 device samples of 1 kernel, service train, class blocked" in page.text("whole")
    hidden = "[...document.querySelectorAll('.filter[hidden]')].map((one) => one.dataset.label)"
    assert page.value(hidden) == ["class"]
    assert _shares(page, "service") == {"train": "100.00 %", "web": "0.00 %", _HOSTILE: "0.00 %"}
    page.open(report, "#view=gpu&service=web")
    assert "0 device samples of 0 kernels" in page.text("whole")
    assert page.text("graph-note") == "Attribution with these filters: no device samples."


def test_names_with_markup_are_text(page: Page, report: Path) -> None:
    page.open(report)
    title = page.value("document.title")
    _tick(page, "service", _HOSTILE)
    assert "5.000 s" in page.text("whole")
    assert page.value("document.images.length") == 0
    assert page.value("document.title") == title
    page.open(report, "#" + page.value("location.hash.slice(1)"))
    assert "5.000 s" in page.text("whole")


@pytest.mark.parametrize(
    "address", ["#service=nobody", "#service=train&service=web&service=", "#pod=__proto__"]
)
def test_values_that_there_are_not_are_no_filter(page: Page, report: Path, address: str) -> None:
    page.open(report, address)
    expected = "95.000 s" if "train" in address else "100.000 s"
    assert expected in page.text("whole")


@pytest.mark.parametrize("width", [1_000, 1_600])
def test_nothing_is_wider_than_the_window(page: Page, report: Path, width: int) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    page.open(report)
    for label in ("service", "class"):
        page.value(f"document.querySelector('[data-label={label}]').open = true")
        wait_until(
            lambda: page.value(
                "((r) => r.width > 0 && r.left >= 0 && r.right <= innerWidth)"
                "(document.querySelector('details[open] .panel').getBoundingClientRect())"
            )
        )
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    page.call("Emulation.clearDeviceMetricsOverride")


def test_a_capture_has_no_filters(page: Page, tmp_path: Path) -> None:
    profile = device_profile_of(cpu=[Sample("main;load", _S, count=100, first_s=0)])
    path = tmp_path / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path, "#service=train")
    assert page.value("document.getElementById('filters').hidden")
    assert not page.value("document.getElementById('thread-choice').hidden")
    assert "1.000 s of wall time summed over 1 thread" in page.text("whole")


@pytest.mark.parametrize("width", [1000, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(page: Page, report: Path, width: int, scheme: str) -> None:
    with window(page, width, scheme):
        page.open(report)
        assert misplaced(page) == []
        assert hard_to_read(page) == []
        assert page.complaints == []
