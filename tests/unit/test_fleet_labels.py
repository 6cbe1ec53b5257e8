# SPDX-License-Identifier: Apache-2.0
"""Whom processes belong to, and that nobody passes for another."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from aiflame.agent.fleet.labels import KEPT_S, Labeller, LabelOptions
from aiflame.agent.fleet.pods import Pod, PodContainer, PodList
from aiflame.agent.fleet.selection import Selection
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Process
from aiflame.agent.processes.container_names import EngineFacts
from hypothesis import given
from hypothesis import strategies as st

_ID, _OTHER_ID = "0123456789abcdef" * 4, "fedcba9876543210" * 4
_UID = "0f9cdd5e-8d1c-4d5a-9d5f-6a4b1ad0c9ab"
_POD_PATH = f"/kubepods.slice/kubepods-pod{_UID.replace('-', '_')}.slice"
_KUBE = f"{_POD_PATH}/cri-containerd-{_ID}.scope"
_DOCKER = f"/system.slice/docker-{_ID}.scope"
_USER = "/user.slice/user-1000.slice/user@1000.service"
_POD = Pod(
    "prod",
    "shop-7d9f8b6c5d-x2x4z",
    _UID,
    "node-1",
    "shop",
    "Deployment",
    (("team", "search"), ("tier", "front")),
)


def _process(cgroup: str, executable: str = "/usr/bin/app", pid: int = 100) -> Process:
    return Process(pid, 1, "app", executable, "", cgroup, "", 0, None)


class _Pods:
    def __init__(self, *containers: tuple[str, PodContainer]) -> None:
        self.pods = PodList(dict(containers), {c.pod.uid: c.pod for _, c in containers})
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1


class _Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class _Engine:
    """Files of engines, and how often they were read."""

    def __init__(self, **facts: EngineFacts) -> None:
        self.facts = facts
        self.reads: list[str] = []

    def __call__(self, ids: Iterable[str]) -> dict[str, EngineFacts]:
        wanted = [*ids]
        self.reads += wanted
        return {key: self.facts[key] for key in wanted if key in self.facts}


def _labeller(
    pods: _Pods | None = None,
    engine: _Engine | None = None,
    clock: _Clock | None = None,
    *extra: str,
) -> Labeller:
    options = LabelOptions("node-1", extra)
    return Labeller(options, pods, engine or _Engine(), clock or _Clock())


def _labels(labeller: Labeller, cgroup: str, executable: str = "/usr/bin/app") -> Labels:
    (found,) = labeller.of([_process(cgroup, executable)])
    return found


def test_a_container_of_a_pod() -> None:
    found = PodContainer(_POD, "web", "registry:5000/shop:1.7", "", "")
    labels = _labels(_labeller(_Pods((_ID, found)), None, None, "team", "absent"), _KUBE)
    assert labels == Labels(
        service="shop",
        container_id=_ID,
        container="web",
        engine="containerd",
        node="node-1",
        namespace="prod",
        pod="shop-7d9f8b6c5d-x2x4z",
        pod_uid=_UID,
        workload="shop",
        workload_kind="Deployment",
        version="1.7",
        extra=(("team", "search"),),
    )


@pytest.mark.parametrize(
    ("tags", "annotations", "workload", "service"),
    [
        ({"app": "b", "app.kubernetes.io/name": "a"}, {"aiflame/service": "z"}, "w", "z"),
        ({"app": "b", "app.kubernetes.io/name": "a"}, {}, "w", "a"),
        ({"app": "b"}, {}, "w", "b"),
        ({}, {}, "w", "w"),
        ({}, {}, "", "web"),
    ],
)
def test_what_a_pod_s_service_is_called(
    tags: dict[str, str], annotations: dict[str, str], workload: str, service: str
) -> None:
    pod = Pod("prod", "p", _UID, "n", workload, "", tuple(tags.items()), tuple(annotations.items()))
    found = PodContainer(pod, "web", "", "", "")
    assert _labels(_labeller(_Pods((_ID, found))), _KUBE).service == service


@pytest.mark.parametrize(
    ("tag", "image", "digest", "version"),
    [
        ("2.0", "shop:1.7", "x@sha256:" + "ab" * 32, "2.0"),
        ("", "registry:5000/shop:1.7", "x@sha256:" + "ab" * 32, "1.7"),
        ("", "registry:5000/shop", "x@sha256:" + "ab" * 32, "abababababab"),
        ("", "shop@sha256:" + "cd" * 32, "", "cdcdcdcdcdcd"),
        ("", "sha256:" + "ef" * 32, "", "efefefefefef"),
        ("", "shop", "", ""),
    ],
)
def test_versions(tag: str, image: str, digest: str, version: str) -> None:
    tags = (("app.kubernetes.io/version", tag),) if tag else ()
    pod = Pod("prod", "p", _UID, labels=tags)
    found = PodContainer(pod, "web", image, digest, "")
    assert _labels(_labeller(_Pods((_ID, found))), _KUBE).version == version


def test_containers_of_engines() -> None:
    compose = (("com.docker.compose.service", "web"), ("team", "search"))
    engine = _Engine(
        **{_ID: EngineFacts("shop-web-1", "nginx:1.25", compose), _OTHER_ID: EngineFacts("db")}
    )
    labeller = _labeller(None, engine, None, "team")
    assert _labels(labeller, f"{_DOCKER}/init") == Labels(
        service="web",
        container_id=_ID,
        container="shop-web-1",
        engine="docker",
        node="node-1",
        version="1.25",
        extra=(("team", "search"),),
    )
    podman = _labels(labeller, f"/machine.slice/libpod-{_OTHER_ID}.scope/container")
    assert (podman.service, podman.container, podman.engine) == ("db", "db", "podman")
    # Each was read once.
    assert sorted(engine.reads) == [_ID, _OTHER_ID]


@pytest.mark.parametrize(
    ("path", "service", "unit"),
    [
        ("/system.slice/nginx.service", "nginx", "nginx.service"),
        ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1", "getty@tty1.service"),
        ("/init.scope", "init", "init.scope"),
        ("/podruntime/kubelet", "kubelet", "kubelet"),
        ("/", "app", ""),
        ("", "app", ""),
        (f"{_USER}/app.slice/web.service", "user-1000/web", "user-1000.slice"),
        ("/user.slice/user-1000.slice/session-3.scope", "user-1000/app", "user-1000.slice"),
        ("/lxc.payload.web/system.slice/cron.service", "web", ""),
        ("/machine.slice/machine-web.scope/payload/system.slice/a.service", "web", ""),
        ("/docker/buildkit/k3x2p9qk8j", "buildkit", ""),
        # As seen from another cgroup namespace.
        ("/../../system.slice/nginx.service", "nginx", "nginx.service"),
        ("/../user.slice/user-1000.slice/session-3.scope", "user-1000/app", "user-1000.slice"),
    ],
)
def test_outside_of_containers_with_ids(path: str, service: str, unit: str) -> None:
    labels = _labels(_labeller(), path)
    assert (labels.service, labels.unit, labels.container_id) == (service, unit, "")


@pytest.mark.parametrize(
    ("unit", "service", "label"),
    [
        ("run-u123.service", "run", "run-*.service"),
        ("run-p12-i345.scope", "run", "run-*.scope"),
        (f"run-r{'0f' * 16}.scope", "run", "run-*.scope"),
        (f"run-{'0f' * 16}.service", "run", "run-*.service"),
        ("session-12.scope", "session", "session-*.scope"),
        ("session-c2.scope", "session", "session-*.scope"),
        ("user@1000.service", "user", "user-*.service"),
        (f"libpod-conmon-{_ID}.scope", "libpod-conmon", "libpod-conmon-*.scope"),
        (f"crio-conmon-{_ID}.scope", "crio-conmon", "crio-conmon-*.scope"),
        (f"vte-spawn-{_UID}.scope", "vte-spawn", "vte-spawn-*.scope"),
        ("podman-4711.scope", "podman", "podman-*.scope"),
        ("app-gnome-firefox-4711.scope", "app-gnome-firefox", "app-gnome-firefox-*.scope"),
        ("systemd-coredump@12-3456-0.service", "systemd-coredump", "systemd-coredump-*.service"),
        ("sshd@5-10.0.0.1:22-10.0.0.2:4242.service", "sshd", "sshd-*.service"),
        ("dbus-:1.23-org.freedesktop.problems@0.service", "org.freedesktop.problems",
         "org.freedesktop.problems-*.service"),
        # These have names that last.
        ("postgresql@15-main.service", "postgresql@15-main", "postgresql@15-main.service"),
        ("redis@6379.service", "redis@6379", "redis@6379.service"),
        ("run-backup.service", "run-backup", "run-backup.service"),
        ("apt-daily.service", "apt-daily", "apt-daily.service"),
    ],
)  # fmt: skip
def test_units_that_never_come_again_are_one_service(unit: str, service: str, label: str) -> None:
    (subject,) = _labeller().subjects([_process(f"/system.slice/{unit}")])
    assert (subject.labels.service, subject.labels.unit) == (service, label)
    # Rules find them under their own names.
    assert Selection.parse([f"unit={unit}"], []).takes(subject, "")


def test_a_user_s_transient_units_are_one_service() -> None:
    units = [f"{_USER}/app.slice/run-u{number}.service" for number in range(100)]
    labeller = _labeller()
    assert {_labels(labeller, unit).service for unit in units} == {"user-1000/run"}


def test_kernel_threads_are_one_service() -> None:
    labels = _labeller().of([_process("/", "", 2), Process(9, 2, "kswapd0", "", "", "/", "", 0, 0)])
    assert [each.service for each in labels] == ["kernel threads"] * 2


@pytest.mark.parametrize(
    ("path", "service", "container_id"),
    [
        # In a container: it belongs to the outermost.
        (f"/docker/{_OTHER_ID}/docker/{_ID}", "mine", _OTHER_ID),
        (f"/system.slice/docker-{_OTHER_ID}.scope{_KUBE}", "mine", _OTHER_ID),
        (f"/system.slice/docker-{_OTHER_ID}.scope/nginx.service", "mine", _OTHER_ID),
        (f"/kubepods/burstable/pod{'0f' * 16}/{_OTHER_ID}{_KUBE}", "unknown-container", _OTHER_ID),
        (f"/kubepods/pod{'0f' * 16}/{_OTHER_ID}/../../pod{_UID}/{_ID}", "unknown-container",
         _OTHER_ID),
        # In a service that does not run containers.
        (f"/system.slice/evil.service/docker-{_ID}.scope", "evil", ""),
        (f"/system.slice/evil.service{_KUBE}", "evil", ""),
        ("/system.slice/evil.service/nginx.service", "evil", ""),
        # In a user's cgroups.
        (f"{_USER}/libpod-{_ID}.scope", "user-1000/unknown-container", ""),
        (f"{_USER}{_KUBE}", "user-1000/unknown-container", ""),
        (f"{_USER}/nginx.service", "user-1000/nginx", ""),
        (f"{_USER}/../../../docker/{_ID}", "user-1000/unknown-container", ""),
        # In services of engines, it is theirs.
        (f"/system.slice/containerd.service/kubepods-pod{_UID}.slice:cri-containerd:{_ID}",
         "victim", _ID),
    ],
)  # fmt: skip
def test_a_name_of_a_cgroup_makes_nobody_another(
    path: str, service: str, container_id: str
) -> None:
    # GIVEN a container of somebody else, which runs
    engine = _Engine(**{_ID: EngineFacts("victim"), _OTHER_ID: EngineFacts("mine")})
    labeller = _labeller(None, engine)
    assert _labels(labeller, _DOCKER).service == "victim"
    # WHEN a process is in a cgroup that claims to be that one
    labels = _labels(labeller, path)
    # THEN it belongs to whoever could make such a cgroup
    assert (labels.service, labels.container_id) == (service, container_id)


_QUADLET = f"/system.slice/web.service/libpod-payload-{_ID}"


@pytest.mark.parametrize(
    ("path", "roots", "names", "service"),
    [
        (_QUADLET, "/system.slice/web.service", [_ID], "victim"),
        (f"{_QUADLET}/container", "/system.slice/web.service", [_ID], "victim"),
        # The service's cgroup is delegated: it makes cgroups of any name.
        (_QUADLET, "/system.slice", [_ID], "web"),
        (f"/system.slice/web.service/x/libpod-payload-{_ID}", "/system.slice/web.service", [_ID],
         "web"),
        # No engine of root's knows it.
        (_QUADLET, "/system.slice/web.service", [], "web"),
    ],
)  # fmt: skip
def test_a_container_below_a_service_is_believed_where_root_made_it(
    path: str, roots: str, names: list[str], service: str
) -> None:
    facts = _Engine(**dict.fromkeys(names, EngineFacts("victim")))
    there = {roots}
    labeller = Labeller(
        LabelOptions("n"), None, facts, _Clock(), is_roots=lambda cgroup: cgroup in there
    )
    assert _labels(labeller, path).service == service
    # AND once it is gone it is still known
    there.clear()
    assert _labels(labeller, path).service == service
    # AND nobody else is it
    evil = _labels(labeller, f"/system.slice/evil.service/libpod-payload-{_ID}")
    assert (evil.service, evil.container_id) == ("evil", "")


_NODE = f"/system.slice/docker-{_OTHER_ID}.scope"
_IN_NODE = f"{_NODE}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{_UID}.slice"
_OF_KIND = (("io.x-k8s.kind.cluster", "kind"),)
_TOLD = PodContainer(_POD, "web", "", "", "")
_THIRD_ID = "abcdef0123456789" * 4


@pytest.mark.parametrize(
    ("path", "labels", "pod"),
    [
        (f"{_IN_NODE}/cri-containerd-{_ID}.scope", _OF_KIND, _POD.name),
        (f"{_NODE}/kubelet/kubepods/pod{_UID}/{_ID}/init", _OF_KIND, _POD.name),
        # No node: whoever is in it may call a cgroup after any pod.
        (f"{_IN_NODE}/cri-containerd-{_ID}.scope", (), ""),
        # In another container of the node, or in a service of it, or beside what the kubelet runs.
        (f"{_IN_NODE}/cri-containerd-{_THIRD_ID}.scope/kubepods/{_ID}", _OF_KIND, ""),
        (f"{_NODE}/system.slice/evil.service/kubepods/{_ID}", _OF_KIND, ""),
        (f"{_NODE}/system.slice/cri-containerd-{_ID}.scope", _OF_KIND, ""),
        # The kubelet has told of no such container.
        (f"{_IN_NODE}/cri-containerd-{_THIRD_ID}.scope", _OF_KIND, ""),
    ],
)
def test_pods_in_a_container_that_is_a_node(
    path: str, labels: tuple[tuple[str, str], ...], pod: str
) -> None:
    engine = _Engine(**{_OTHER_ID: EngineFacts("kind-control-plane", "", labels)})
    found = _labels(_labeller(_Pods((_ID, _TOLD)), engine), path)
    assert found.pod == pod
    assert found.container_id == (_ID if pod else _OTHER_ID)
    assert found.service == ("shop" if pod else "kind-control-plane")


def test_an_image_with_the_labels_of_a_node_takes_no_pods_name() -> None:
    # GIVEN a host whose own kubelet runs pods, and a container of an image that says it is a node
    engine = _Engine(**{_OTHER_ID: EngineFacts("evil", "", _OF_KIND)})
    labeller = _labeller(_Pods((_ID, _TOLD), (_THIRD_ID, _TOLD)), engine)
    claim = f"{_IN_NODE}/cri-containerd-{_ID}.scope"
    # WHEN any pod of the host's is seen, in the same window or later
    paths = [claim, f"{_POD_PATH}/cri-containerd-{_THIRD_ID}.scope"]
    found = labeller.of([_process(path) for path in paths])
    # THEN the container is itself
    assert [each.service for each in found] == ["evil", "shop"]
    assert _labels(labeller, claim).pod == ""


def test_rootless_containers_have_their_ids() -> None:
    path = f"{_USER}/user.slice/libpod-{_ID}.scope/container"
    labels = _labels(_labeller(), path)
    assert (labels.service, labels.container_id) == ("user-1000/unknown-container", _ID)
    assert (labels.engine, labels.unit) == ("podman", "user-1000.slice")


class _Rootless:
    """What users' engines tell, by user and container."""

    def __init__(self, **names: str) -> None:
        self.names = names

    def __call__(self, uid: int, ids: Iterable[str]) -> dict[str, EngineFacts]:
        names = {key: self.names.get(f"u{uid}_{key[0]}", "") for key in ids}
        return {key: EngineFacts(name, "web:1.2") for key, name in names.items() if name}


def _of_rootless(rootless: _Rootless) -> Labeller:
    return Labeller(LabelOptions("node-1"), None, _Engine(), _Clock(), rootless_facts=rootless)


def test_rootless_containers_have_names_below_their_users() -> None:
    # GIVEN two users, each with a container of the same id; one has a name
    labeller = _of_rootless(_Rootless(u1000_a="web"))
    mine = _labels(labeller, f"{_USER}/user.slice/libpod-{'a' * 64}.scope/container")
    others = _labels(labeller, f"/user.slice/user-7.slice/docker-{'a' * 64}.scope")
    # THEN the name is of that user alone, and cannot pass for one of root's
    assert mine == Labels(
        service="user-1000/web",
        container_id="a" * 64,
        container="user-1000/web",
        engine="podman",
        node="node-1",
        unit="user-1000.slice",
        version="1.2",
    )
    assert (others.service, others.container) == ("user-7/unknown-container", "")
    # AND it is known by whoever learns it from the agent
    told = _of_rootless(_Rootless())
    told.learn(labeller.known)
    assert _labels(told, f"{_USER}/libpod-{'a' * 64}.scope").container == "user-1000/web"


def test_a_user_does_not_name_containers_of_root() -> None:
    # GIVEN a container of root's, and a user whose files name one of that id
    rootless = _Rootless(u1000_a="mine")
    engine = _Engine(**{"a" * 64: EngineFacts("victim")})
    labeller = Labeller(LabelOptions("node-1"), None, engine, _Clock(), rootless_facts=rootless)
    roots = f"/docker/{'a' * 64}"
    assert _labels(labeller, f"{_USER}/libpod-{'a' * 64}.scope").container == "user-1000/mine"
    assert _labels(labeller, roots).container == "victim"
    # THEN that user has no claim to its id any more
    claimed = _labels(labeller, f"{_USER}/libpod-{'a' * 64}.scope")
    assert (claimed.container_id, claimed.container) == ("", "")


def test_a_user_with_many_cgroups_forgets_nobodys_containers() -> None:
    labeller = _labeller(None, _Engine(**{_OTHER_ID: EngineFacts("db")}))
    assert _labels(labeller, f"/docker/{_OTHER_ID}").service == "db"
    # WHEN a user makes cgroups like those of containers
    claimed = {_labels(labeller, f"{_USER}/libpod-{n:064x}.scope") for n in range(10_000)}
    # THEN back-ends get no series for each, and others' names stay
    assert len(claimed) == 257
    assert labeller.unresolved == 256
    assert [*labeller.known] == [_OTHER_ID]


def test_labels_that_come_after_the_name_of_a_container() -> None:
    engine, clock = _Engine(**{_ID: EngineFacts("web", may_have_labels=True)}), _Clock()
    labeller = _labeller(None, engine, clock, "team")
    assert _labels(labeller, f"/libpod_parent/libpod-{_ID}").service == "web"
    # WHEN its engine has written them
    engine.facts = {_ID: EngineFacts("web", "", (("team", "a"),))}
    clock.now_s += 1
    # THEN they are known, to rules as well, and it is not asked again
    assert _labels(labeller, f"/libpod_parent/libpod-{_ID}").extra == (("team", "a"),)
    assert labeller.of_group(f"/libpod_parent/libpod-{_ID}").tags == (("team", "a"),)
    clock.now_s += 6
    labeller.expect([f"/libpod_parent/libpod-{_ID}"])
    assert engine.reads == [_ID] * 2


def test_labels_that_never_come_are_not_asked_for_all_day() -> None:
    engine, clock = _Engine(**{_ID: EngineFacts("web", may_have_labels=True)}), _Clock()
    labeller = _labeller(None, engine, clock)
    for _ in range(1000):
        assert _labels(labeller, f"/libpod_parent/libpod-{_ID}").service == "web"
        clock.now_s += 6
    assert len(engine.reads) < 20
    # AND not each time in a moment
    engine.reads.clear()
    other = _labeller(None, engine, _Clock())
    for _ in range(100):
        _labels(other, f"/libpod_parent/libpod-{_ID}")
    assert engine.reads == [_ID]


def test_an_unknown_container_has_its_id_until_the_kubelet_tells() -> None:
    pods = _Pods()
    labeller = _labeller(pods)
    # GIVEN a container of which the kubelet has not told yet
    labels = _labels(labeller, _KUBE)
    assert labels == Labels(
        service="unknown-container",
        container_id=_ID,
        engine="containerd",
        node="node-1",
        pod_uid=_UID,
    )
    assert (pods.asked, labeller.unresolved) == (1, 1)
    # WHEN it does
    pods.pods = _Pods((_ID, PodContainer(_POD, "web", "", "", ""))).pods
    # THEN the next labels are whole
    assert _labels(labeller, _KUBE).pod == _POD.name
    assert (pods.asked, labeller.unresolved) == (1, 0)


def test_one_that_the_kubelet_never_tells_is_not_asked_for_all_day() -> None:
    pods, clock = _Pods(), _Clock()
    labeller = _labeller(pods, None, clock)
    for _ in range(1000):
        _labels(labeller, _KUBE)
        clock.now_s += 1
    assert pods.asked < 100


def test_a_sandbox_is_of_its_pod() -> None:
    pods = _Pods((_OTHER_ID, PodContainer(_POD, "web", "shop:1", "", "")))
    labels = _labels(_labeller(pods), _KUBE, "/pause")
    assert (labels.namespace, labels.pod, labels.container) == ("prod", _POD.name, "pause")
    assert labels.container_id == _ID


def test_what_is_not_known_of_a_pod_is_said() -> None:
    pods, clock = _Pods(), _Clock()
    labeller = _labeller(pods, None, clock)
    # GIVEN a container of which the kubelet has told nothing, for a minute and longer
    assert "namespace" in labeller.of_group(_KUBE).unknown
    assert labeller.of_group(_KUBE).is_awaited
    clock.now_s += 61
    found = labeller.of_group(_KUBE)
    assert "namespace" in found.unknown and not found.is_awaited
    # WHEN it tells soon of the pod of another, whose containers are not in its status yet
    labeller = _labeller(pods, None, clock)
    labeller.expect([_KUBE])
    pods.pods = PodList({}, {_UID: _POD})
    found = labeller.of_group(_KUBE)
    # THEN the container alone is unknown, but for the sandbox
    assert (found.labels.namespace, found.unknown) == ("prod", {"container", "version"})
    (sandbox,) = labeller.subjects([_process(_KUBE, "/pause")])
    assert sandbox.unknown == set()
    # AND nothing is, once it has told that again for a while: another sandbox, or once it tells
    clock.now_s += 61
    pods.pods = PodList({}, {_UID: _POD})
    assert labeller.of_group(_KUBE).unknown == set()
    of_others = (_DOCKER, "/system.slice/nginx.service", f"{_USER}/x.service", "/")
    assert all(labeller.of_group(path).unknown == set() for path in of_others)


def test_that_the_kubelet_has_told_of_a_pod_is_seen_at_once() -> None:
    pods = _Pods()
    labeller = _labeller(pods)
    labeller.expect([_KUBE, _DOCKER])
    for found, learnt in (
        (PodList({}, {"another": _POD}), set()),
        (PodList({}, {_UID: _POD}), {_KUBE}),
        (PodList({_OTHER_ID: PodContainer(_POD, "", "", "", "")}, {_UID: _POD}), set()),
        (PodList({_ID: PodContainer(_POD, "web", "", "", "")}, {_UID: _POD}), {_KUBE}),
        (PodList({_ID: PodContainer(_POD, "web", "", "", "")}, {_UID: _POD}), set()),
    ):
        pods.pods = found
        labeller.expect([_DOCKER])
        assert labeller.take_learnt() == learnt
    assert _labels(labeller, _KUBE).container == "web"


def test_labels_outlive_the_container() -> None:
    clock, pods = _Clock(), _Pods((_ID, PodContainer(_POD, "web", "", "", "")))
    labeller = _labeller(pods, None, clock)
    _labels(labeller, _KUBE)
    # GIVEN a pod that the kubelet tells no more
    pods.pods = PodList()
    # THEN what comes late has its labels
    clock.now_s += KEPT_S
    assert _labels(labeller, _KUBE).pod == _POD.name
    clock.now_s += KEPT_S
    assert _labels(labeller, _KUBE).pod == _POD.name
    # AND they are forgotten once nobody has asked for ten minutes
    clock.now_s += KEPT_S + 1
    _labels(labeller, "/")
    assert _labels(labeller, _KUBE).pod == ""


def test_what_is_kept_of_containers_is_bounded() -> None:
    labeller = _labeller()
    for number in range(9000):
        _labels(labeller, f"/docker/{number:064x}")
    assert labeller.unresolved == 8192


def test_files_of_engines_are_not_read_for_each_window() -> None:
    engine, clock = _Engine(), _Clock()
    labeller = _labeller(None, engine, clock)
    for _ in range(100):
        _labels(labeller, _DOCKER)
    assert engine.reads == [_ID]
    clock.now_s += 5
    _labels(labeller, _DOCKER)
    assert engine.reads == [_ID, _ID]


def test_a_user_cannot_make_services_without_end() -> None:
    labeller = _labeller()
    path = f"{_USER}/app.slice/unit%d.service"
    users = {_labels(labeller, path % number).service for number in range(5000)}
    programs = {_labels(labeller, "/", f"/opt/x{number}").service for number in range(5000)}
    assert (len(users), len(programs)) == (65, 257)
    # AND the others are known as whose they are
    assert "user-1000" in users and "other" in programs
    assert _labels(labeller, "/system.slice/nginx.service").service == "nginx"


def test_names_come_back_once_others_are_not_used() -> None:
    clock = _Clock()
    labeller = _labeller(None, None, clock)
    for number in range(100):
        _labels(labeller, f"{_USER}/unit{number}.service")
    assert _labels(labeller, f"{_USER}/late.service").service == "user-1000"
    clock.now_s += KEPT_S + 1
    assert _labels(labeller, f"{_USER}/late.service").service == "user-1000/late"


def test_labels_of_a_pod_do_not_pass_for_ours() -> None:
    names = (
        *("namespace", "pod", "service", "container_id", "container-id", "node", "job"),
        *("k8s.pod.name", "service.name", "Service_Name", "__name__", "host.name"),
        *("a b", 'x"y', "line\nbreak", "é", ""),
    )
    tags = dict.fromkeys(names, "evil")
    pod = Pod("prod", "p", _UID, labels=(*tags.items(), ("team", "search")))
    found = PodContainer(pod, "web", "", "", "")
    labels = _labels(_labeller(_Pods((_ID, found)), None, None, "*"), _KUBE)
    assert labels.extra == (("team", "search"),)


def test_extra_labels_are_bounded() -> None:
    tags = tuple((f"label{number:04}", "x" * 5000) for number in range(1000))
    engine = _Engine(**{_ID: EngineFacts("web", "", tags)})
    labels = _labels(_labeller(None, engine, None, "label*"), _DOCKER)
    assert len(labels.extra) == 16
    assert {len(value) for _, value in labels.extra} == {128}


_TEXTS = st.text(st.characters(), max_size=600)


@given(_TEXTS, _TEXTS, _TEXTS)
def test_any_text_becomes_one_that_back_ends_take(name: str, value: str, executable: str) -> None:
    engine = _Engine(**{_ID: EngineFacts(name, value, (("team", value),))})
    labeller = _labeller(None, engine, None, "*")
    found = PodContainer(Pod(name, value, name, value, value, name), value, value, value, value)
    of_pod = _labeller(_Pods((_ID, found)), None, None, "*")
    for labels in (
        _labels(labeller, _DOCKER, executable),
        _labels(of_pod, _KUBE, executable),
        _labels(labeller, "/", executable),
        _labels(labeller, f"{_USER}/x", executable),
        _labels(labeller, f"/lxc.payload.{name}"),
    ):
        assert labels.service
        texts = [getattr(labels, field) for field in Labels.__slots__ if field != "extra"]
        texts += [word for pair in labels.extra for word in pair]
        assert all(text.isprintable() and len(text) <= 253 for text in texts)
