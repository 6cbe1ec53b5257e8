# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of labels, from its keys to the parts that are sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet import labelling
from aiflame.agent.fleet.batches import batches_of
from aiflame.agent.fleet.config import AgentConfig, load
from aiflame.agent.fleet.labelling import Labelling
from aiflame.agent.fleet.sinks import SINKS, sink_module
from profiles import process, small_profile


def _config(**flags: object) -> AgentConfig:
    return load(None, flags, {})


def test_rules_say_what_is_sent() -> None:
    # GIVEN a host whose web server is left out
    config = _config(exclude="unit=nginx.service", node="n")
    nginx = replace(process(7, "nginx"), cgroup="/system.slice/nginx.service")
    other = replace(process(8, "job"), cgroup="/system.slice/job.service")
    # WHEN processes are labelled THEN it has none, and the others are told by their units
    left, labels = Labelling(config.agent).of([nginx, other])
    assert left is None
    assert labels is not None and (labels.service, labels.node) == ("job", "n")


@pytest.mark.parametrize(
    ("path", "service"),
    [
        ("/usr/bin/job", "job"),
        ("/usr/bin/job (deleted)", "job"),  # an update has replaced it
        ("/memfd:sealed-91173221a7ea (deleted)", "runc:[2:INIT]"),
    ],
)
def test_a_program_is_called_as_people_know_it(path: str, service: str) -> None:
    one = replace(process(7, "runc:[2:INIT]"), cgroup="/", executable=path)
    (labels,) = Labelling(_config().agent).of([one])
    assert labels is not None and labels.service == service


def test_parts_of_a_labelled_host_are_all_of_it() -> None:
    profile = small_profile()
    labels = Labelling(_config().agent).of(profile.processes)
    parts = [*batches_of(profile, labels)]
    assert sum(int(p.profile.samples["ns"].sum()) for p in parts) == profile.samples["ns"].sum()


def test_that_rules_are_gone_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # GIVEN a host with one cgroup, and a configuration that leaves it out
    group = tmp_path / "system.slice" / "nginx.service"
    group.mkdir(parents=True)
    monkeypatch.setattr(labelling, "cgroup2_mounts", lambda: [tmp_path])
    before = Labelling(_config(exclude="unit=nginx.service").agent)
    assert before.newly_left_out() == {group.stat().st_ino}
    # WHEN another one has no rules THEN the collector hears that, once
    after = Labelling(_config().agent)
    assert after.newly_left_out() == set()
    monkeypatch.setattr(labelling, "_LOOK_S", 0)
    assert after.newly_left_out() is None


@pytest.mark.parametrize("rule", ["", "nginx", "colour=red", "=x"])
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(UsageError):
        _config(include=["unit=a", rule or "unit"])


@pytest.mark.parametrize("name", SINKS)
def test_each_sink_can_be_made(name: str, tmp_path: Path) -> None:
    # GIVEN the keys that a sink has to have
    where = {"directory": str(tmp_path)} if name == "captures" else {"url": "http://127.0.0.1:1"}
    flags = {f"sinks.{name}.{key}": value for key, value in where.items()}
    settings = load(None, flags, {}).sinks[name]
    # THEN it is made of them, and says where it sends
    assert sink_module(name).make(settings, "n") is not None
    assert next(iter(where.values())) in sink_module(name).describe(settings)


def test_a_password_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    flags = {
        "sinks.clickhouse.url": "http://clickhouse.example:8123",
        "sinks.clickhouse.password_file": str(password),
    }
    settings = load(None, flags, {}).sinks["clickhouse"]
    with pytest.raises(UsageError, match="plain text"):
        sink_module("clickhouse").make(settings, "n")
