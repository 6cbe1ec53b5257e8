# SPDX-License-Identifier: Apache-2.0
"""What `aiflame doctor --agent` says of a configuration and of what a container hides."""

from __future__ import annotations

import errno
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiflame.agent import rights
from aiflame.agent.doctor import agent
from aiflame.agent.doctor.base import Check, Context, Finding, Status, run_checks
from aiflame.agent.doctor.rights import COSTS
from aiflame.agent.errors import EnvironmentUnfit, UsageError
from aiflame.agent.fleet import host_checks
from aiflame.agent.fleet.host_checks import CgroupLayout
from aiflame.agent.fleet.kubelet import Kubelet
from aiflame.agent.fleet.pods import KubeletError, PodList
from aiflame.agent.rights import Capability
from deployment import capabilities


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.os, "environ", {})


@pytest.fixture
def listening_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def _context(folder: Path, text: str) -> Context:
    path = folder / "agent.toml"
    path.write_text(f'directory = "{folder}/agent"\n{text}\n')
    return Context(config_path=path)


def test_each_capability_of_the_manifest_has_a_line_where_it_is_missing() -> None:
    others = {Capability.SYS_RESOURCE, Capability.SYS_ADMIN}
    told = {*rights.REQUIRED, *COSTS, *agent.CHILD_RIGHTS, *others}
    assert {one.name for one in told} == set(capabilities())


def test_rights_of_children_that_are_missing_are_named_with_where_to_add_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rights, "missing", lambda _: [Capability.SETUID, Capability.KILL])
    finding = agent.child_rights(Context())
    assert finding.status is Status.WARN
    assert "sandbox_incomplete" in finding.text
    assert "add SETUID, KILL to capabilities.add" in (finding.cure or "")
    monkeypatch.setattr(rights, "missing", lambda _: [])
    assert agent.child_rights(Context()).status is Status.OK


def test_configuration_that_the_agent_refuses_fails_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such setting"):
        agent.config(_context(tmp_path, "frequency = 19"))
    with pytest.raises(UsageError, match="no such directory") as refusal:
        agent.config(
            _context(tmp_path, f'[sinks.captures]\ndirectory = "{tmp_path}/none/captures"')
        )
    assert str(refusal.value.hint).startswith("mkdir")
    with pytest.raises(UsageError, match="cannot read"):
        agent.config(Context(config_path=tmp_path / "no.toml"))


def test_secret_over_plain_http_to_another_host_fails(tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("s3cret")
    text = f'[sinks.otlp]\nurl = "http://10.0.0.1:4318"\ntoken_file = "{tmp_path}/token"'
    with pytest.raises(UsageError, match="TLS") as refusal:
        agent.config(_context(tmp_path, text))
    assert "s3cret" not in str(refusal.value)


def test_configuration_says_which_sinks_there_are(tmp_path: Path) -> None:
    finding = agent.config(_context(tmp_path, '[sinks.pyroscope]\nurl = "http://127.0.0.1:4"'))
    assert (finding.status, "pyroscope" in finding.text) == (Status.OK, True)
    finding = agent.config(_context(tmp_path, ""))
    assert (finding.status, "no sink" in finding.text) == (Status.WARN, True)


def test_checks_of_a_configuration_that_is_wrong_are_not_tried(tmp_path: Path) -> None:
    table = (
        Check("agent.config", agent.config, needs=()),
        Check("agent.directory", agent.directory, needs=("agent.config",)),
    )
    found = [one.finding.status for one in run_checks(table, _context(tmp_path, "x = 1"), ())]
    assert found == [Status.FAIL, Status.SKIP]
    assert not (tmp_path / "agent").exists()


def test_room_is_wanted_for_what_is_kept_and_for_each_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'keep_size = "2GB"\nspool_size = "1GB"\n[sinks.otlp]\nurl = "http://127.0.0.1:4"'
    free = SimpleNamespace(free=2 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    finding = agent.directory(_context(tmp_path, text))
    assert finding.status is Status.WARN
    assert "2,000 MB free" in finding.text
    assert "3,000 MB" in finding.text
    free.free = 3 * 10**9
    assert agent.directory(_context(tmp_path, text)).status is Status.OK


def test_directory_that_others_may_write_to_is_refused_as_the_agent_does(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent").chmod(0o777)
    with pytest.raises(EnvironmentUnfit, match="others may write") as refusal:
        agent.directory(_context(tmp_path, ""))
    assert "chmod 700" in str(refusal.value.hint)


def test_captures_are_tried_where_they_are_to_go(tmp_path: Path) -> None:
    assert agent.captures(_context(tmp_path, "")).status is Status.SKIP
    (tmp_path / "captures").mkdir()
    context = _context(tmp_path, f'[sinks.captures]\ndirectory = "{tmp_path}/captures"')
    assert agent.captures(context).status is Status.OK
    assert not list((tmp_path / "captures").iterdir())
    (tmp_path / "captures").rmdir()
    assert agent.captures(context).status is Status.OK  # the agent makes it
    context = _context(tmp_path, f'[sinks.captures]\ndirectory = "{tmp_path}/none/captures"')
    assert agent.captures(context).status is Status.WARN


def test_back_end_that_does_not_answer_is_named(tmp_path: Path, listening_port: int) -> None:
    assert agent.back_ends(_context(tmp_path, "")).status is Status.SKIP
    text = f'[sinks.otlp]\nurl = "http://127.0.0.1:{listening_port}"'
    assert agent.back_ends(_context(tmp_path, text)).status is Status.OK
    with socket.socket() as closed:  # bound, and not listening: nobody else gets the port
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        text += f'\n[sinks.pyroscope]\nurl = "{url}"'
        finding = agent.back_ends(_context(tmp_path, text))
    assert finding.status is Status.WARN
    assert finding.text == f"pyroscope: {url} cannot be reached: Connection refused"


def test_back_end_of_an_impossible_name_is_named(tmp_path: Path) -> None:
    finding = agent.back_ends(_context(tmp_path, '[sinks.otlp]\nurl = "http://no..host"'))
    assert finding.status is Status.WARN
    assert finding.text.startswith("otlp: http://no..host cannot be reached: ")


def test_back_ends_are_asked_as_their_sinks_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN URLs without a port
    asked = []

    def refuse(address: tuple[str, int], _: float) -> None:
        asked.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for kind, url in [
        *(("clickhouse", "http://127.0.0.1"), ("clickhouse", "https://ch/proxy")),
        *(("otlp", "http://[::1]"), ("pyroscope", "https://p")),
    ]:
        text = f'[sinks.{kind}]\nurl = "{url}"'
        assert agent.back_ends(_context(tmp_path, text)).status is Status.WARN
    # THEN it is the port of that back-end's kind
    assert asked == [("127.0.0.1", 8123), ("ch", 8443), ("::1", 80), ("p", 443)]


def test_certificates_that_cannot_be_read_are_told_before_an_agent_starts(
    tmp_path: Path, listening_port: int
) -> None:
    files = f'cert_file = "{tmp_path}/cert.pem"\nkey_file = "{tmp_path}/key.pem"'
    text = f'[sinks.clickhouse]\nurl = "https://127.0.0.1:{listening_port}"\n{files}'
    finding = agent.back_ends(_context(tmp_path, text))
    assert finding.status is Status.WARN
    assert f"{tmp_path}/cert.pem and {tmp_path}/key.pem: no certificate and key" in finding.text


def test_kubelet_is_asked_only_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agent.kubelet(_context(tmp_path, "")).status is Status.SKIP
    # Nothing listens on port 1 of this host, and there is no token besides.
    text = f'kubelet = "127.0.0.1"\nkubelet_port = 1\nkubelet_token_file = "{tmp_path}/token"'
    text += "\nkubelet_skip_verify = true"
    finding = agent.kubelet(_context(tmp_path, text))
    assert finding.status is Status.WARN
    assert f"no token in {tmp_path}/token" in finding.text
    monkeypatch.setattr(Kubelet, "fetch", lambda _: PodList())
    assert agent.kubelet(_context(tmp_path, text)).status is Status.OK

    def refuse(_: Kubelet) -> PodList:
        raise KubeletError("the kubelet answered 403: needs `get` of `nodes/pods`")

    monkeypatch.setattr(Kubelet, "fetch", refuse)
    finding = agent.kubelet(_context(tmp_path, text))
    assert "403" in finding.text
    assert "rbac.yaml" in (finding.cure or "")


def test_names_of_containers_that_only_the_host_has_are_told_with_their_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def directories(root: Path) -> list[Path]:
        base = tmp_path / ("host" if root == agent._HOST_ROOT else "here")
        return [(base if base.name == "here" else root) / "var/lib/docker/containers"]

    host_root = tmp_path / "host"
    monkeypatch.setattr(agent, "_HOST_ROOT", host_root)
    monkeypatch.setattr(agent, "engine_directories", directories)
    assert agent.engines(Context()).status is Status.OK
    (host_root / "var/lib/docker/containers").mkdir(parents=True)
    finding = agent.engines(Context())
    assert finding.status is Status.WARN
    assert "-v /var/lib/docker/containers:/var/lib/docker/containers:ro" in (finding.cure or "")


def test_names_of_containers_are_said_to_be_here_where_the_host_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "containers"

    def directories(root: Path) -> list[Path]:
        if root == agent._HOST_ROOT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return [here]

    monkeypatch.setattr(agent, "engine_directories", directories)
    assert agent.engines(Context()).status is Status.SKIP
    here.mkdir()
    finding = agent.engines(Context())
    assert (finding.status, str(here) in finding.text) == (Status.OK, True)


@pytest.mark.parametrize(
    ("layout", "note", "status", "cure"),
    [
        (CgroupLayout.UNIFIED, "", Status.OK, ""),
        (CgroupLayout.HYBRID, "", Status.WARN, "systemd.unified_cgroup_hierarchy=1"),
        (CgroupLayout.LEGACY, "", Status.WARN, "/sys/fs/cgroup"),
        (CgroupLayout.UNIFIED, "a namespace of its own", Status.WARN, "--cgroupns=host"),
    ],
)
def test_cgroups_that_cost_labels_are_a_limit(
    monkeypatch: pytest.MonkeyPatch,
    layout: CgroupLayout,
    note: str,
    status: Status,
    cure: str,
) -> None:
    monkeypatch.setattr(agent, "cgroup_layout", lambda: layout)
    monkeypatch.setattr(agent, "cgroup_namespace_note", lambda: note)
    monkeypatch.setattr(agent, "cgroup2_mounts", lambda: [Path("/sys/fs/cgroup")])
    finding = agent.cgroups(Context())
    assert finding.status is status
    assert cure in (finding.cure or "")


def test_pid_namespace_fails_with_the_words_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "is_host_pid_namespace", lambda: False)
    (result,) = run_checks(
        [Check("os.pid_namespace", agent.pid_namespace, needs=())], Context(), ()
    )
    finding: Finding = result.finding
    assert finding.status is Status.FAIL
    assert re.search(r"take other processes", finding.text)
    assert "hostPID: true" in (finding.cure or "")
