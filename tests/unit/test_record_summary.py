# SPDX-License-Identifier: Apache-2.0
"""What is said of a recording at its end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from aiflame.agent.commands.record_summary import again_line, loss_lines
from aiflame.agent.model.profile import LOSSES_FACT, OF_HOST, Loss, StopReason
from profiles import MS, Sample, profile_of, small_profile

_SAMPLE = Sample("main", 10 * MS)


def test_what_was_asked_for_is_no_loss() -> None:
    asked, lost = Loss("excluded", 17, "of cgroups"), Loss("stack_lost", 3, "events")
    said = [*loss_lines(profile_of(_SAMPLE, losses=(asked,)))]
    assert said[:2] == ["left out: excluded 17: of cgroups", "0 lost."]
    both = [*loss_lines(profile_of(_SAMPLE, losses=(asked, lost)))]
    assert both[:2] == ["left out: excluded 17: of cgroups", "lost: stack_lost 3: events"]
    assert "0 lost." not in both
    assert next(loss_lines(profile_of(_SAMPLE))) == "0 lost."


def test_losses_of_a_host_are_not_told_as_those_of_a_container() -> None:
    profile = profile_of(_SAMPLE, losses=(Loss("stack_lost", 3, "events"),))
    recording = replace(profile.recording, facts=((LOSSES_FACT, OF_HOST),))
    said = [*loss_lines(replace(profile, recording=recording))]
    assert said[0] == "lost: stack_lost 3 on the whole host: events"


def test_a_second_recording_is_proposed_where_tables_came_late_for_many_stacks() -> None:
    profile = small_profile()  # 4.6 % of its time is in truncated stacks
    assert "second recording" in again_line(profile, were_tables_late=True)
    assert again_line(profile, were_tables_late=False) == ""
    ends = np.full(len(profile.stacks), StopReason.ROOTED, np.uint8)
    complete = replace(profile, stacks=replace(profile.stacks, ends=ends))
    assert again_line(complete, were_tables_late=True) == ""
