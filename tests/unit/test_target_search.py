# SPDX-License-Identifier: Apache-2.0
"""Containers, units and names of processes that are looked for in a /proc of files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent import kernelfs
from aiflame.agent.errors import UsageError
from aiflame.agent.kernel import abi, checks
from aiflame.agent.processes import container_names, procfs, target_search, targets

_WEB = "4f2a9c" + "0" * 58
_DB = "4f2b" + "1" * 60
_DOCKER_WEB = f"/system.slice/docker-{_WEB}.scope"
_DOCKER_DB = f"/system.slice/docker-{_DB}.scope"


class _Machine:
    """A machine whose files are in a folder; `unified` is its cgroup v2."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unified = root / "cgroup"
        self.executables: dict[int, str] = {}
        self.write("proc/self/mounts", f"cgroup2 {self.unified} cgroup2 rw 0 0\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def process(
        self,
        pid: int,
        cgroup: str,
        comm: str = "any",
        exe: str = "",
        state: str = "S",
        inner: int = 0,
    ) -> None:
        """Adds a process; `cgroup` is a path of v2, or the lines of the file."""
        lines = cgroup if ":" in cgroup.partition("/")[0] else f"0::{cgroup}\n"
        self.write(f"proc/{pid}/cgroup", lines)
        self.write(f"proc/{pid}/comm", f"{comm}\n")
        self.write(f"proc/{pid}/status", f"State:\t{state}\nNSpid:\t{pid}\t{inner or pid}\n")
        self.executables[pid] = exe
        if lines.startswith("0::"):
            for group in (Path(lines[4:-1]), *Path(lines[4:-1]).parents):
                self.write(f"cgroup/{group}/cgroup.controllers", "")

    def docker_name(self, container_id: str, name: str) -> None:
        path = f"var/lib/docker/containers/{container_id}/config.v2.json"
        self.write(path, json.dumps({"Name": f"/{name}"}))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Machine:
    made = _Machine(tmp_path)
    read = kernelfs.read_text

    def read_text(path: str | Path, limit: int = 65536) -> str:
        return read(tmp_path / str(path).lstrip("/"), limit)

    def process_ids() -> list[int]:
        return sorted(int(p.name) for p in (tmp_path / "proc").iterdir() if p.name.isdigit())

    monkeypatch.setattr(kernelfs, "read_text", read_text)
    monkeypatch.setattr(procfs, "process_ids", process_ids)
    monkeypatch.setattr(procfs, "executable", lambda pid: made.executables[pid])
    monkeypatch.setattr(
        target_search, "names_of", lambda ids: container_names.names_of(ids, tmp_path)
    )
    monkeypatch.setattr(checks, "_INITIAL_PID_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)
    return made


def _refused(find: Callable[[str], object], wanted: str) -> tuple[str, list[str]]:
    with pytest.raises(UsageError) as error:
        find(wanted)
    return str(error.value), (error.value.hint or "").split("\n  ")


@pytest.mark.parametrize("wanted", [_WEB, _WEB[:6], _WEB[:12], "web"])
def test_a_container_by_its_id_or_its_name(machine: _Machine, wanted: str) -> None:
    machine.process(10, _DOCKER_WEB)
    machine.process(11, f"{_DOCKER_WEB}/init")
    machine.process(12, _DOCKER_DB)
    machine.process(13, "/system.slice/docker.service")
    machine.docker_name(_WEB, "web")
    target = targets.target_of_container(wanted)
    assert target.filter is abi.Filter.CGROUP
    assert target.cgroup == machine.unified / _DOCKER_WEB[1:]
    assert target.words == "container web (docker, 4f2a9c000000)"
    assert target.file_stem == "container-web"
    assert (target.pids, target.note, target.follows_children) == ((), "", False)


def test_a_container_without_a_name(machine: _Machine) -> None:
    machine.process(10, f"/kubepods/besteffort/podx/{_WEB}")
    target = targets.target_of_container("4f2a")
    assert target.words == "container 4f2a9c000000"
    assert target.file_stem == "container-4f2a9c000000"
    assert target.cgroup == machine.unified / f"kubepods/besteffort/podx/{_WEB}"


def test_a_name_comes_before_the_beginning_of_an_id(machine: _Machine) -> None:
    machine.process(10, _DOCKER_WEB)
    machine.process(12, _DOCKER_DB)
    machine.docker_name(_WEB, "4f2b")
    assert targets.target_of_container("4f2b").cgroup == machine.unified / _DOCKER_WEB[1:]


def test_containers_that_the_path_names(machine: _Machine) -> None:
    machine.process(10, "/lxc.payload.web/init.scope")
    machine.process(11, "/machine.slice/machine-box.scope/payload/init.scope")
    assert targets.target_of_container("web").words == "container web (lxc)"
    target = targets.target_of_container("box")
    assert target.words == "container box (systemd-nspawn)"
    assert target.cgroup == machine.unified / "machine.slice/machine-box.scope/payload"


def test_a_container_that_holds_another_is_recorded_with_it(machine: _Machine) -> None:
    machine.process(10, f"/docker/{_WEB}/docker/{_DB}")
    outer, inner = targets.target_of_container(_WEB), targets.target_of_container(_DB)
    assert outer.cgroup == machine.unified / f"docker/{_WEB}"
    assert inner.cgroup == machine.unified / f"docker/{_WEB}/docker/{_DB}"


def test_a_container_that_is_not_there(machine: _Machine) -> None:
    # GIVEN a container whose first process has another number than the lowest
    machine.process(10, _DOCKER_WEB, "sidecar", inner=7)
    machine.process(11, _DOCKER_WEB, "nginx", inner=1)
    machine.process(12, f"/kubepods/podx/{_DB}", "evil\n\x1b[2J")
    machine.docker_name(_WEB, "web")
    message, listed = _refused(targets.target_of_container, "wbe")
    assert message == "no running container is wbe"
    assert listed == [
        "4f2a9c000000 docker web (nginx)",
        "4f2b11111111 (evil\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[2J)",
    ]


@pytest.mark.parametrize("wanted", ["4f2", "4F2A", "f2a9", "nothing", _WEB + "0", "\n"])
def test_what_is_no_containers(machine: _Machine, wanted: str) -> None:
    machine.process(10, _DOCKER_WEB)
    message, _ = _refused(targets.target_of_container, wanted)
    assert message.startswith("no running container is ")


def test_no_container_at_all(machine: _Machine) -> None:
    machine.process(10, "/system.slice/nginx.service")
    message, hint = _refused(targets.target_of_container, "web")
    assert message == "no running container is web"
    assert hint == ["none has a cgroup of its own here"]


def test_an_id_that_is_cut_too_short(machine: _Machine) -> None:
    machine.process(10, f"/docker/{_WEB}")
    machine.process(12, f"/docker/{_WEB[:-1]}1")
    message, listed = _refused(targets.target_of_container, "4f2a")
    assert message == "more than one container is 4f2a"
    assert len(listed) == 2


def test_two_engines_may_know_one_name(machine: _Machine) -> None:
    machine.process(10, _DOCKER_WEB)
    machine.process(12, f"/machine.slice/libpod-{_DB}.scope")
    machine.docker_name(_WEB, "web")
    storage = "var/lib/containers/storage/overlay-containers/containers.json"
    machine.write(storage, json.dumps([{"id": _DB, "names": ["web"]}]))
    message, listed = _refused(targets.target_of_container, "web")
    assert message == "more than one container is web"
    assert listed == ["4f2a9c000000 docker web (any)", "4f2b11111111 podman web (any)"]
    assert targets.target_of_container("4f2b").words == "container web (podman, 4f2b11111111)"


def test_a_cgroup_that_poses_as_a_container_is_not_taken_for_it(machine: _Machine) -> None:
    posing = f"/user.slice/user-1000.slice/user@1000.service/docker-{_WEB}.scope"
    machine.process(10, _DOCKER_WEB)
    machine.process(12, posing)
    message, listed = _refused(targets.target_of_container, _WEB)
    assert message == f"more than one cgroup is named after container {_WEB}"
    assert listed == [
        f"aiflame record --cgroup {_DOCKER_WEB}",
        f"aiflame record --cgroup {posing}",
    ]


def test_a_long_list_is_cut(machine: _Machine) -> None:
    for pid in range(1, 31):
        machine.process(pid, f"/docker/{pid:064x}")
    _, listed = _refused(targets.target_of_container, "x")
    assert len(listed) == 21
    assert listed[-1] == "and 10 more"


_V1 = f"3:cpu:/docker/{_WEB}\n1:name=systemd:/docker/{_WEB}\n"


@pytest.mark.parametrize(
    "unified", ["", "0::/\n", "0::/system.slice/containerd.service\n"], ids=["v1", "hybrid", "both"]
)
def test_where_v2_has_no_group_of_a_container(machine: _Machine, unified: str) -> None:
    machine.process(10, _V1 + unified)
    machine.process(11, _V1.replace("\n", "/init\n") + unified)
    machine.process(12, "1:name=systemd:/\n" + unified)
    machine.docker_name(_WEB, "web")
    target = targets.target_of_container("web")
    assert (target.filter, target.pids) == (abi.Filter.PIDS, (10, 11))
    assert target.follows_children
    assert target.words == "container web (docker, 4f2a9c000000): 2 processes and children"
    assert target.note.startswith("note: container web (docker, 4f2a9c000000) has no cgroup v2 ")


def test_where_v2_is_not_mounted(machine: _Machine) -> None:
    machine.process(10, _DOCKER_WEB)
    machine.write("proc/self/mounts", "")
    target = targets.target_of_container("4f2a")
    assert (target.filter, target.pids) == (abi.Filter.PIDS, (10,))
    assert target.words.endswith(": 1 process and children")


def test_paths_of_another_cgroup_namespace_are_not_looked_for_in_this_one(
    machine: _Machine,
) -> None:
    # GIVEN the processes of two cgroups above that in which this namespace begins
    machine.process(10, f"/../../docker-{_WEB}.scope")
    machine.process(11, "/../nginx.service")
    for group in (f"docker-{_WEB}.scope", "nginx.service"):
        machine.write(f"cgroup/{group}/cgroup.controllers", "")
    assert targets.target_of_container("4f2a").pids == (10,)
    assert targets.target_of_unit("nginx").pids == (11,)


@pytest.mark.parametrize("wanted", ["nginx", "nginx.service"])
def test_a_unit(machine: _Machine, wanted: str) -> None:
    machine.process(10, "/system.slice/nginx.service")
    machine.process(11, "/system.slice/nginx.service/worker")
    machine.process(12, "/system.slice/nginx2.service")
    target = targets.target_of_unit(wanted)
    assert target.filter is abi.Filter.CGROUP
    assert target.cgroup == machine.unified / "system.slice/nginx.service"
    assert target.words == "unit nginx.service"
    assert target.file_stem == "unit-nginx.service"


def test_a_unit_all_of_whose_processes_are_below_it(machine: _Machine) -> None:
    machine.process(10, f"/system.slice/web.service/libpod-payload-{_WEB}")
    target = targets.target_of_unit("web")
    assert target.cgroup == machine.unified / "system.slice/web.service"


def test_the_hosts_unit_comes_before_a_users_or_a_containers(machine: _Machine) -> None:
    machine.process(10, "/system.slice/sshd.service")
    machine.process(11, "/user.slice/user-1000.slice/user@1000.service/sshd.service")
    machine.process(12, f"/docker/{_WEB}/system.slice/sshd.service")
    machine.process(13, "/lxc.payload.box/system.slice/sshd.service")
    target = targets.target_of_unit("sshd")
    assert target.cgroup == machine.unified / "system.slice/sshd.service"


def test_a_users_unit(machine: _Machine) -> None:
    path = "/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service"
    machine.process(10, path)
    target = targets.target_of_unit("jupyter")
    assert target.cgroup == machine.unified / path[1:]
    assert target.words == f"unit jupyter.service ({path})"
    # That of the manager holds it, too.
    manager = targets.target_of_unit("user@1000")
    assert manager.words == "unit user@1000.service"


def test_two_users_may_have_one_unit_each(machine: _Machine) -> None:
    paths = [f"/user.slice/user@{uid}.service/app.slice/jupyter.service" for uid in (1000, 1001)]
    for pid, path in enumerate(paths, 10):
        machine.process(pid, path)
    message, listed = _refused(targets.target_of_unit, "jupyter")
    assert message == "more than one cgroup is named after unit jupyter"
    assert listed == [f"aiflame record --cgroup {path}" for path in paths]


def test_a_service_and_a_scope_of_one_name(machine: _Machine) -> None:
    machine.process(10, "1:name=systemd:/system.slice/a.service\n")
    machine.process(11, "1:name=systemd:/system.slice/a.scope\n")
    _, listed = _refused(targets.target_of_unit, "a")
    # On v1 there is no directory to be named.
    assert listed == ["aiflame record -p 10 -s", "aiflame record -p 11 -s"]
    target = targets.target_of_unit("a.scope")
    assert (target.filter, target.pids) == (abi.Filter.PIDS, (11,))
    assert target.words == "unit a.scope: 1 process and children"


def test_a_unit_that_is_not_there(machine: _Machine) -> None:
    machine.process(10, "/system.slice/nginx.service")
    machine.process(11, "/system.slice/nginx-exporter.service")
    machine.process(12, "/system.slice/cron.service")
    message, hint = _refused(targets.target_of_unit, "ngnix")
    assert message == "no unit ngnix has a process here"
    assert hint == ["there is nginx"]
    assert _refused(targets.target_of_unit, "exporter")[1] == ["there is nginx-exporter"]
    assert _refused(targets.target_of_unit, "ngnix.service")[1] == ["there is nginx"]
    assert _refused(targets.target_of_unit, "zzz")[1] == [
        "systemctl list-units --type=service,scope shows what runs"
    ]


def test_all_processes_of_a_name(machine: _Machine) -> None:
    machine.process(10, "/", "python3", "/usr/bin/python3.11")
    machine.process(11, "/", "MainThread", "/opt/venv/bin/python3")
    machine.process(12, "/", "python3.11", "/usr/bin/python3.11")
    machine.process(13, "/", "python3", "", state="Z")
    machine.process(14, "/", "server", "/usr/bin/python3 (deleted)")
    machine.process(15, "/", "Python3", "")
    machine.process(os.getpid(), "/", "python3", "/usr/bin/python3")
    target = targets.target_of_comm("python3")
    assert (target.filter, target.pids) == (abi.Filter.PIDS, (10, 11, 14))
    assert target.words == "comm python3 (3 processes)"
    assert target.file_stem == "python3-10"
    assert target.follows_children
    assert targets.target_of_comm("MainThread").words == "comm MainThread (pid 11)"


def test_a_name_that_no_process_has(machine: _Machine) -> None:
    machine.process(10, "/", "nginx", "/usr/sbin/nginx")
    machine.process(11, "/", "a-script-with-a", "/usr/bin/python3.11")
    machine.process(12, "/", "python3\x1b[2J", "")
    message, hint = _refused(targets.target_of_comm, "ngixn")
    assert message == "no process is called ngixn"
    assert hint == ["there is nginx"]
    assert _refused(targets.target_of_comm, "a-script-with-a-long-name")[1] == [
        "there is a-script-with-a"
    ]
    assert _refused(targets.target_of_comm, "python3")[1] == [
        "there is python3.11, python3\N{REPLACEMENT CHARACTER}[2J"
    ]
    assert _refused(targets.target_of_comm, "zzz")[1] == ["ps -eo pid,comm shows what runs"]


def test_a_process_that_ends_meanwhile_is_left_out(machine: _Machine) -> None:
    machine.process(10, _DOCKER_WEB)
    machine.executables[11] = ""
    (machine.root / "proc/11").mkdir()
    assert targets.target_of_container("4f2a").cgroup is not None
    assert "no process" in _refused(targets.target_of_comm, "web")[0]
