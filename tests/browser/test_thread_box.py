# SPDX-License-Identifier: Apache-2.0
"""The page's list of threads in a browser, where there are too many to read."""

from __future__ import annotations

from pathlib import Path

from aiflame.agent.model.profile import Thread
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from profiles import MS, PROCESSES, Sample, profile_of


def _opened(page: Page, folder: Path, workers: int) -> None:
    """A server with workers, each of which has a millisecond more than the one before."""
    threads = tuple(Thread(0, 100 + i, f"worker-{i}", 0, 0) for i in range(workers))
    threads += (Thread(1, 200, "client", 0, 0),)
    samples = [Sample("serve", (1 + i) * MS, thread=i) for i in range(len(threads))]
    profile = profile_of(*samples, processes=PROCESSES, threads=threads)
    path = folder / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)


def _listed(page: Page) -> list[str]:
    found: list[str] = page.value(
        "[...document.querySelectorAll('#threads option')].map((o) => o.textContent)"
    )
    return found


def _find(page: Page, text: str) -> None:
    page.value("document.getElementById('thread-search').select()")
    page.type(text)


def test_a_search_finds_a_thread(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, 40)
    assert len(_listed(page)) == 44
    _find(page, "ER-37")
    assert _listed(page) == ["all", "worker-37 (137)"]
    # WHEN Enter is pressed, THEN the page is of that thread
    page.press("Enter")
    assert page.text("whole").startswith("100 % = 38.000 ms of wall time summed over 1 thread")
    assert page.value("location.hash") == "#threads=t37"
    # The chosen one stays in the list, and a name of a process finds all its threads.
    _find(page, "client")
    assert _listed(page) == ["all", "worker-37 (137)", "all of client (200)", "client (200)"]
    assert page.value("document.getElementById('threads').value") == "t37"
    page.press("Escape")
    assert len(_listed(page)) == 44
    # Escape has cleared the search for threads, and nothing else.
    assert page.value("location.hash") == "#threads=t37"
    assert page.complaints == []


def test_few_threads_need_no_search(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, 3)
    assert page.value("document.getElementById('thread-search').hidden")
