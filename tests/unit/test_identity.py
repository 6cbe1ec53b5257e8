# SPDX-License-Identifier: Apache-2.0
"""What the path of a cgroup tells, also of one whose owner chose it to be misread."""

from __future__ import annotations

import pytest
from aiflame.agent.processes.identity import (
    CgroupPaths,
    Engine,
    cgroup_paths,
    identity_of,
)
from hypothesis import given
from hypothesis import strategies as st

_ID = "0123456789abcdef" * 4
_OTHER_ID = "fedcba9876543210" * 4
_UID = "0f9cdd5e-8d1c-4d5a-9d5f-6a4b1ad0c9ab"
_UID_ = _UID.replace("-", "_")
_HASH = "5d41402abc4b2a76b9719d911017c592"
_OTHER_HASH = _HASH[::-1]
_BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{_UID_}.slice"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/user.slice/user-1000.slice\n", "/user.slice/user-1000.slice"),
        ("0::/\n", "/"),
        # v1 alone
        (
            f"12:pids:/docker/{_ID}\n11:memory:/docker/{_ID}\n1:name=systemd:/docker/{_ID}/init\n",
            f"/docker/{_ID}/init",
        ),
        ("4:memory:/a/b/c/d\n1:name=systemd:/system.slice/x.service\n", "/system.slice/x.service"),
        ("4:memory:/a\n3:cpu:/a/b\n1:name=systemd:/\n", "/a/b"),
        # Hybrid: v2 is mounted, but only v1 groups the processes.
        (f"3:cpu,cpuacct:/docker/{_ID}\n1:name=systemd:/\n0::/\n", f"/docker/{_ID}"),
        # Hybrid, and the engine groups by v1 alone: by v2 its containers are in its own unit.
        (
            f"3:cpu:/docker/{_ID}\n1:name=systemd:/docker/{_ID}\n"
            "0::/system.slice/containerd.service\n",
            f"/docker/{_ID}",
        ),
        # Hybrid, where both do.
        ("3:cpu:/a/deeper/one\n0::/system.slice/x.service\n", "/system.slice/x.service"),
        (f"3:cpu:/docker/{_ID}/a/b\n0::/docker/{_ID}\n", f"/docker/{_ID}"),
        # A path may hold colons.
        ("0::/machine.slice/a:b:c\n", "/machine.slice/a:b:c"),
        ("0::/odd\x0cname\n", "/odd\x0cname"),
        ("", ""),
        ("garbage\n", ""),
        ("0::\n", ""),
        ("0::relative\n", ""),
    ],
)
def test_the_path_that_tells_most(text: str, path: str) -> None:
    assert cgroup_paths(text.split("\n")).telling == path


def test_paths_of_both_versions() -> None:
    lines = ["3:cpu,cpuacct:/a", "1:name=systemd:/b:c", "0::/d", "no line"]
    assert cgroup_paths(lines) == CgroupPaths("/d", {"cpu,cpuacct": "/a", "name=systemd": "/b:c"})


@pytest.mark.parametrize(
    ("path", "engine"),
    [
        # systemd's driver: kubelet (also without a class of service), docker, podman, nerdctl
        (f"{_BURSTABLE}/cri-containerd-{_ID}.scope", Engine.CONTAINERD),
        (f"/kubepods.slice/kubepods-pod{_UID_}.slice/crio-{_ID}.scope/container", Engine.CRI_O),
        (f"/system.slice/docker-{_ID}.scope", Engine.DOCKER),
        (f"/system.slice/docker-{_ID}.scope/init.scope", Engine.DOCKER),
        (f"/machine.slice/libpod-{_ID}.scope/container", Engine.PODMAN),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{_ID}.scope",
         Engine.PODMAN),
        (f"/system.slice/web.service/libpod-payload-{_ID}", Engine.PODMAN),
        (f"/system.slice/nerdctl-{_ID}.scope", Engine.CONTAINERD),
        # cgroupfs' driver
        (f"/docker/{_ID}", Engine.DOCKER),
        (f"/docker/{_ID}/kubelet", Engine.DOCKER),
        (f"/libpod_parent/libpod-{_ID}", Engine.PODMAN),
        (f"/kubepods/besteffort/pod{_UID}/crio-{_ID}", Engine.CRI_O),
        (f"/kubepods/burstable/pod{_UID}/{_ID}", None),
        (f"/ecs/{_HASH}/{_ID}", None),
        # A pod of podman's, which has 64 digits as containers have.
        (f"/libpod_parent/{_OTHER_ID}/libpod-{_ID}", Engine.PODMAN),
        # kind with systemd's driver: a node is a container, and has pods.
        (f"/system.slice/docker-{_OTHER_ID}.scope/kubelet.slice/kubelet-kubepods.slice/"
         f"kubelet-kubepods-pod{_UID_}.slice/cri-containerd-{_ID}.scope", Engine.CONTAINERD),
        # docker in docker, and a container of BuildKit's beside it.
        (f"/docker/{_ID}/docker/buildkit/k3x2p9qk8", Engine.DOCKER),
        # The one driver met names that were made for the other.
        (f"/system.slice/containerd.service/kubepods-pod{_UID_}.slice:cri-containerd:{_ID}",
         Engine.CONTAINERD),
        (f"/anything/of-somebody-{_ID}.scope", None),
        # The innermost one: a container in a container.
        (f"/docker/{_OTHER_ID}/docker/{_ID}", Engine.DOCKER),
        (f"/docker/{_OTHER_ID}/{_ID}", None),
        (f"/docker/{_OTHER_ID}/kubelet/kubepods/besteffort/pod{_UID}/{_ID}", None),
        # Its last process is ending, and it is removed already.
        (f"/system.slice/docker-{_ID}.scope (deleted)", Engine.DOCKER),
        # Seen from another cgroup namespace.
        (f"/../../docker-{_ID}.scope", Engine.DOCKER),
    ],
)  # fmt: skip
def test_containers_with_ids(path: str, engine: Engine | None) -> None:
    identity = identity_of(path)
    assert identity.container_id == _ID
    container = next(each for each in identity.containers if each.id == _ID)
    assert (container.engine, container.name) == (engine, "")


@pytest.mark.parametrize(
    ("path", "name", "engine"),
    [
        ("/docker/buildkit/k3x2p9qk8j", "buildkit", Engine.DOCKER),
        ("/lxc.payload.web", "web", Engine.LXC),
        ("/lxc.payload.web/system.slice/cron.service", "web", Engine.LXC),
        ("/lxc/web", "web", Engine.LXC),
        ("/lxc.payload/web/init.scope", "web", Engine.LXC),
        ("/machine.slice/machine-web.scope/payload", "web", Engine.NSPAWN),
        (r"/machine.slice/machine-my\x2dbox.scope/payload/init.scope", "my-box", Engine.NSPAWN),
        ("/machine.slice/systemd-nspawn@web.service/payload", "web", Engine.NSPAWN),
    ],
)
def test_containers_with_names(path: str, name: str, engine: Engine) -> None:
    (container,) = identity_of(path).containers
    assert (container.id, container.name, container.engine) == ("", name, engine)
    assert identity_of(path).container_id == ""


@pytest.mark.parametrize(
    "path",
    [
        "/user.slice/user-1000.slice/session-2.scope",
        f"/machine.slice/libpod-conmon-{_ID}.scope",
        f"/system.slice/crio-conmon-{_ID}.scope",
        f"/user.slice/vte-spawn-{_UID}.scope",
        f"/system.slice/run-r{_HASH}.scope",
        f"/process_api/{_HASH}",
        f"/libpod_parent/{_ID}/conmon",
        f"/ecs/{_HASH}",
        f"/ecs/{_OTHER_HASH}/{_HASH}-1234567890",
        f"/{_HASH}-12345678901",
        "/podruntime/kubelet",
        "/lxc.monitor.web",
        "/lxc.monitor/web",
        "/lxc",
        "/lxc.payload.",
        # A virtual machine, and the process that watches over a container.
        r"/machine.slice/machine-qemu\x2d1\x2dvm.scope/libvirt/emulator",
        "/machine.slice/systemd-nspawn@web.service/supervisor",
        r"/machine.slice/machine-a\x0ab.scope/payload",
        f"/docker/{_ID[:63]}",
        f"/docker/{_ID}0",
        f"/docker/{_ID.upper()}",
        f"/x{_ID}",
        f"/{_ID}\n",
        "/lxc/..",
        "/..",
        "/",
        "",
    ],
)
def test_no_containers(path: str) -> None:
    assert identity_of(path).containers == ()


def test_a_container_on_fargate() -> None:
    task, container_id = f"/ecs/{_HASH}", f"{_HASH}-2495160603"
    (container,) = identity_of(f"{task}/{container_id}").containers
    assert (container.id, container.engine) == (container_id, None)
    assert container.path == f"{task}/{container_id}"


def test_a_container_has_the_outermost_group_of_its_id() -> None:
    outer = f"/system.slice/docker-{_OTHER_ID}.scope"
    inner = f"{outer}/kubepods/besteffort/pod{_UID}/{_ID}"
    found = identity_of(f"{inner}/again/{_ID}/deep").containers
    assert [(c.id, c.path) for c in found] == [(_OTHER_ID, outer), (_ID, inner)]


@pytest.mark.parametrize(
    ("path", "units"),
    [
        ("/system.slice/nginx.service", ["nginx.service"]),
        ("/podruntime/kubelet", ["kubelet"]),
        ("/podruntime/kubelet/below", ["kubelet"]),
        ("/system/apid", ["apid"]),
        ("/user.slice/podruntime/kubelet", []),
        ("/system.slice/system-getty.slice/getty@tty1.service", ["getty@tty1.service"]),
        ("/init.scope", ["init.scope"]),
        ("/user.slice/user-1000.slice/session-2.scope", ["session-2.scope"]),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/web.service/below",
            ["user@1000.service", "web.service"],
        ),
        (
            f"/system.slice/docker-{_ID}.scope/system.slice/nginx.service",
            [f"docker-{_ID}.scope", "nginx.service"],
        ),
        # The kernel has files called cpu.*, so systemd escapes this name.
        ("/system.slice/_cpu.service", ["cpu.service"]),
        ("/system.slice/nginx.service (deleted)", ["nginx.service"]),
        ("/system.slice/not a unit.service", []),
        ("/system.slice/nginx.service\n", []),
        (f"/system.slice/{'x' * 248}.service", []),
        ("/system.slice/.service", []),
        ("/system.slice", []),
        ("/a.mount", []),
    ],
)
def test_units(path: str, units: list[str]) -> None:
    assert [unit.name for unit in identity_of(path).units] == units


def test_a_unit_has_the_path_of_its_own_group() -> None:
    manager, unit = identity_of("/user.slice/user@1.service/a.slice/_cpu.service/b/c").units
    assert manager.path == "/user.slice/user@1.service"
    assert unit.path == "/user.slice/user@1.service/a.slice/_cpu.service"


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"{_BURSTABLE}/cri-containerd-{_ID}.scope", _UID),
        (f"/kubepods.slice/kubepods-pod{_UID_}.slice/cri-containerd-{_ID}.scope", _UID),
        (f"/kubepods/besteffort/pod{_UID}/{_ID}", _UID),
        (f"/system.slice/containerd.service/kubepods-pod{_UID_}.slice:cri-containerd:{_ID}", _UID),
        (f"/kubepods/pod{_HASH}/{_ID}", _HASH),
        (f"/kubepods.slice/kubepods-pod{_HASH}.slice/crio-{_ID}.scope", _HASH),
        (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{_UID_}.slice", _UID),
        (f"/machine.slice/machine-libpod_pod_{_ID}.slice/libpod-{_OTHER_ID}.scope", ""),
        (f"/kubepods/pod{_UID}0/{_ID}", ""),
        (f"/tripod{_UID}", ""),
        ("/kubepods/burstable", ""),
    ],
)
def test_pods(path: str, uid: str) -> None:
    assert identity_of(path).pod_uid == uid


_PIECES = st.sampled_from(
    ["/", "..", "/../", ":", "-", ".scope", ".service", "docker", "pod", "lxc", "lxc.payload.",
     "payload", "machine-", "\\x2f", "\n", "\x1b[2J", "\udc80", _ID, _UID, " (deleted)"]
)  # fmt: skip


@given(st.lists(st.one_of(_PIECES, st.text(max_size=5)), max_size=30).map("".join))
def test_any_path_is_taken_for_what_it_says_and_no_more(path: str) -> None:
    identity = identity_of(path)
    for group in (*identity.containers, *identity.units):
        # What is recorded is a group on the path, never one next to it.
        assert path.startswith(group.path)
        assert not group.path.endswith("/..")
    assert len(identity.container_id) in (0, *range(34, 44), 64)
    assert "\n" not in identity.pod_uid + "".join(unit.name for unit in identity.units)


def test_deep_paths_are_not_followed_to_their_ends() -> None:
    nested = "/a.scope" * 31 + f"/{_ID}"
    assert identity_of(nested).container_id == _ID
    assert identity_of(f"/a.scope{nested}").container_id == ""
    assert len(identity_of("/a.scope" * 100_000).units) == 32
