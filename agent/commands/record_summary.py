# SPDX-License-Identifier: Apache-2.0
"""What is said of a recording at its end, of which all is in its profile."""

from __future__ import annotations

from collections.abc import Iterator

from aiflame.agent.commands.record_devices import device_lines
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.accounts import disagreement
from aiflame.agent.reports.facts import (
    complete_share,
    complete_words,
    counted,
    is_asked_for,
    loss_scope,
    missing_line,
    truncated_lines,
)
from aiflame.agent.reports.words import duration

# Less time in truncated stacks is not worth another recording.
_MANY_TRUNCATED = 0.01


def sample_lines(profile: Profile) -> Iterator[str]:
    """Yields what was recorded."""
    recording = profile.recording
    on_cpu = profile.samples["klass"] == 0
    ns = profile.samples["ns"]
    samples = int(profile.samples["count"][on_cpu].sum())
    yield (
        f"{duration(recording.duration_ns)}: {samples:,} CPU samples,"
        f" {duration(int(ns[on_cpu].sum()))} on CPU,"
        f" {duration(int(ns[~on_cpu].sum()))} off CPU,"
        f" {counted(len(profile.threads), 'thread')},"
        f" {counted(len(profile.stacks), 'distinct stack')}."
    )
    if not len(profile.samples):
        return
    yield f"Complete stacks: {complete_words(profile)}."
    yield from truncated_lines(profile)


def again_line(profile: Profile, *, were_tables_late: bool) -> str:
    """Returns what a second recording would have, "" for nothing.

    Args:
        profile: What was recorded.
        were_tables_late: Unwind tables had to be made meanwhile.
    """
    complete, whole = complete_share(profile)
    if not were_tables_late or whole - complete < _MANY_TRUNCATED * whole:
        return ""
    return "The tables that came late are kept: a second recording has them from its start."


def loss_lines(profile: Profile) -> Iterator[str]:
    """Yields what is missing, and what devices told."""
    if missing := missing_line(profile):
        yield f"{missing}."
    if differs := disagreement(profile):
        yield f"{differs}."
    for loss in profile.losses:
        word = "left out" if is_asked_for(loss) else "lost"
        scope = loss_scope(profile.recording)
        yield f"{word}: {loss.name} {loss.count:,}{scope}: {loss.meaning}"
    if all(map(is_asked_for, profile.losses)):
        yield "0 lost."
    yield from device_lines(profile)
    if not len(profile.samples):
        yield "No samples were captured: was the target idle, or gone?"
