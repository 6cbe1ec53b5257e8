# SPDX-License-Identifier: Apache-2.0
"""Several runs of pytest that work off the same modules, each module in one of them.

`--share-modules FOLDER`: a run takes modules in its own order, leaves out what another run has
taken, and ends when none is left. So all runs end at about the same time, whatever the machine and
the choice of tests. A module stays whole, since its fixtures are recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest


class SharedModules:
    """Replaces pytest's own loop over the tests (_pytest/main.py) by one that takes modules.

    Args:
        folder: Has an empty file for each module that was taken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def _takes(self, module: Path) -> bool:
        """Takes a module, unless another run has."""
        if module in self._own:
            return True  # fixtures of a whole session may tear a module's tests apart
        try:
            (self._folder / str(module.with_suffix("")).replace("/", ":")).touch(exist_ok=False)
        except FileExistsError:
            return False
        self._own.add(module)
        return True

    def _items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """Yields the tests of modules that were taken; the next is taken when one is at its end."""
        for module, items in groupby(session.items, lambda item: item.path):
            if self._takes(module.relative_to(session.config.rootpath)):
                yield from items

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs tests until no module is left, some test ends the run, or all are only listed."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own says so
        left = self._items(session)
        item = next(left, None)
        while item is not None:
            # What a module has made is put away by its last test, which is told what comes next.
            following = next(left, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True
