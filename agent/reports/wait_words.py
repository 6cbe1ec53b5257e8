# SPDX-License-Identifier: Apache-2.0
"""What the functions and lines of a table waited for, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports.base import View
from aiflame.agent.reports.causes import CAUSES
from aiflame.agent.reports.distinct import distinct
from aiflame.agent.reports.own_code import Rank, ranks, waited_in
from aiflame.agent.reports.words import showable

I64 = npt.NDArray[np.int64]

# A cell has room for two reasons; those under a tenth of the row's time explain nothing.
_REASONS_NAMED = 2
_LEAST_SHARE = 0.1

# Causes of what was blocked, then the other classes.
_REASONS = len(CAUSES) + len(SampleClass)


class WaitWords:
    """What waits of a profile were for, and which function of the kernel or libc they were in."""

    def __init__(self, profile: Profile, view: View, causes: npt.NDArray[np.uint8]) -> None:
        klass = profile.samples["klass"]
        # Of waits whose time is in later seconds, a time range may have the number alone.
        is_wait = view.selects(klass) & (klass != SampleClass.ON_CPU) & (profile.samples["ns"] > 0)
        samples = profile.samples[is_wait]
        self._profile = profile
        self._stack = samples["stack"].astype(np.int64)
        self._ns = samples["ns"].astype(np.int64)
        is_blocked = samples["klass"] == SampleClass.BLOCKED
        self._reason = np.where(
            is_blocked, causes[self._stack], len(CAUSES) + samples["klass"].astype(np.int64)
        )
        self._function = np.where(is_blocked, _waiting_functions(profile)[self._stack], -1)

    def by_key(self, key: I64, self_ns: I64) -> Sequence[str]:
        """Return what each row of a table waited for, as "97 % lock (futex_wait_queue)".

        Args:
            key: The row that waits in each stack are charged to, -1 for none; shape (stacks,).
            self_ns: All self time of each row; shape (rows,).
        """
        row = key[self._stack]
        is_charged = row >= 0
        functions = len(self._profile.functions) + 1  # the last stands for none
        keys = (row * _REASONS + self._reason) * functions + self._function % functions
        limit = max(1, len(self_ns)) * _REASONS * functions
        keys, index = distinct(keys[is_charged], limit)
        ns = np.zeros(len(keys), np.int64)
        np.add.at(ns, index, self._ns[is_charged])
        found: list[list[str]] = [[] for _ in self_ns]
        for i in np.lexsort((keys, -ns)).tolist():
            at, reason = divmod(int(keys[i]) // functions, _REASONS)
            function = int(keys[i]) % functions
            if len(found[at]) < _REASONS_NAMED and ns[i] >= _LEAST_SHARE * self_ns[at]:
                share = f"{100 * int(ns[i]) / int(self_ns[at]):.0f} %"
                found[at].append(f"{share} {self._words(reason, function)}")
        return [", ".join(words) for words in found]

    def _words(self, reason: int, function: int) -> str:
        if reason >= len(CAUSES):
            return SampleClass(reason - len(CAUSES)).label
        if function == len(self._profile.functions):
            return CAUSES[reason]
        # Without what compilers add: do_pselect.constprop.0
        name = self._profile.functions[function].name.partition(".")[0]
        return f"{CAUSES[reason]} ({showable(name)})"


def _waiting_functions(profile: Profile) -> I64:
    """Return the kernel's or library's function that waits in each stack, -1 for none."""
    frame = waited_in(profile)
    function = np.append(profile.frames["function"].astype(np.int64), -1)[frame]
    rank = np.append(ranks(profile), Rank.OWN)[function]
    return np.where(rank <= Rank.LIBRARY, function, -1)
