# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of labels, from its keys to the parts that are sent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet import labelling, labels
from aiflame.agent.fleet.batches import batches_of
from aiflame.agent.fleet.config import AgentConfig, load
from aiflame.agent.fleet.engine_watch import EngineWatch
from aiflame.agent.fleet.host_checks import CgroupLayout
from aiflame.agent.fleet.known_containers import keep, kept
from aiflame.agent.fleet.labelling import Labelling, LeftOut
from aiflame.agent.fleet.labels import KnownContainer, Labeller, NoPods, Subject
from aiflame.agent.fleet.pods import Pod, PodContainer, PodList
from aiflame.agent.fleet.selection import Selection, known_groups
from aiflame.agent.fleet.sinks import SINKS, sink_module
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.window import Window, rows_of
from aiflame.agent.processes.container_names import EngineFacts
from aiflame.agent.processes.identity import Identity, identity_of
from profiles import process, small_profile

_IN_CONTAINER = f"/docker/{'a' * 64}"
_IN_UNIT = "/system.slice/cron.service"


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
    monkeypatch.setattr(labelling, "cgroup_layout", lambda: CgroupLayout.UNIFIED)
    before = Labelling(_config(exclude="unit=nginx.service").agent)
    assert before.newly_left_out() == LeftOut(frozenset({group.stat().st_ino}))
    # WHEN another one has no rules THEN the collector hears that, once
    after = Labelling(_config().agent)
    assert after.newly_left_out() == LeftOut()
    monkeypatch.setattr(labelling, "_LOOK_S", 0)
    assert after.newly_left_out() is None


@pytest.mark.parametrize(
    ("rules", "is_left_out"),
    [
        ({"include": f"container_id={'a' * 64}"}, True),
        ({"include": "unit=nginx.service"}, True),
        ({"exclude": "unit=docker.service"}, False),
        ({"exclude": "engine=podman"}, True),
    ],
)
def test_where_v1_groups_processes_v2_leaves_out_containers_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rules: dict[str, str], is_left_out: bool
) -> None:
    # GIVEN a host whose processes may be in the root or an engine's unit by v2, whatever they are
    monkeypatch.setattr(labelling, "cgroup2_mounts", lambda: [tmp_path])
    monkeypatch.setattr(labelling, "cgroup_layout", lambda: CgroupLayout.HYBRID)
    (tmp_path / "system.slice" / "docker.service").mkdir(parents=True)
    container = tmp_path / "machine.slice" / f"libpod-{'b' * 64}.scope"
    container.mkdir(parents=True)
    # WHEN rules name some of them THEN the kernel leaves out none of these groups
    wanted = frozenset({container.stat().st_ino} if is_left_out else ())
    found = Labelling(_config(directory=str(tmp_path / "d"), **rules).agent).newly_left_out()
    assert found is not None and found.ids == wanted


@pytest.mark.parametrize("layout", [CgroupLayout.HYBRID, CgroupLayout.LEGACY])
@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({"exclude": f"container_id={'a' * 64}"}, {_IN_CONTAINER}),
        ({"exclude": "unit=cron.service"}, {_IN_UNIT}),
        ({"include": f"container_id={'a' * 64}"}, {_IN_UNIT, "/"}),
        ({"exclude": "unit=cron.service,process=cron"}, set()),
        ({}, set()),
    ],
)
def test_where_v1_groups_processes_they_are_left_out_by_their_paths(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    layout: CgroupLayout,
    rules: dict[str, str],
    wanted: set[str],
) -> None:
    # GIVEN a host whose kernel tells programs no ids of groups
    monkeypatch.setattr(labelling, "cgroup2_mounts", list)
    monkeypatch.setattr(labelling, "cgroup_layout", lambda: layout)
    made = Labelling(_config(directory=str(tmp_path / "d"), **rules).agent)
    assert made.newly_left_out() == LeftOut()
    # WHEN processes have been seen in some
    made.expect(_window(_IN_CONTAINER, _IN_UNIT, "/"))
    found = made.newly_left_out()
    # THEN it is said at once which of them are left out.
    assert found == (LeftOut(paths=frozenset(wanted)) if wanted else None)


_UID = "0f9cdd5e-8d1c-4d5a-9d5f-6a4b1ad0c9ab"
_IN_POD = f"/kubepods/burstable/pod{_UID}/{'b' * 64}"


class _Kubelet(NoPods):
    """What is told of pods; a test says what, and when."""

    made: list[_Kubelet]
    error = ""

    def __init__(self, _fetch: object) -> None:
        super().__init__()
        self.made.append(self)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def tell(self, namespace: str) -> None:
        pod = Pod(namespace, "web-1", _UID)
        self.pods = PodList({"b" * 64: PodContainer(pod, "app", "", "", "")}, {_UID: pod})


@pytest.fixture
def kubelets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[_Kubelet]:
    """Those that are asked, on a host with the cgroup of one pod's container."""
    _Kubelet.made = []
    monkeypatch.setattr(labelling, "PodWatch", _Kubelet)
    monkeypatch.setattr(labelling, "cgroup2_mounts", lambda: [tmp_path])
    monkeypatch.setattr(labelling, "cgroup_layout", lambda: CgroupLayout.UNIFIED)
    (tmp_path / _IN_POD.lstrip("/") / "init").mkdir(parents=True)
    return _Kubelet.made


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; the last is now."""
    times = [1000.0]

    def clock_s() -> float:
        return times[-1]

    monkeypatch.setattr("time.monotonic", clock_s)
    monkeypatch.setattr(labelling, "Labeller", partial(Labeller, clock_s=clock_s))
    return times


def _of_pod(tmp_path: Path, **rules: object) -> tuple[Labelling, set[int]]:
    """Returns who labels it, and the ids of its cgroup and the one below that."""
    directory = str(tmp_path / "d")
    config = _config(directory=directory, kubelet="127.0.0.1", **rules)
    group = tmp_path / _IN_POD.lstrip("/")
    return Labelling(config.agent), {path.stat().st_ino for path in (group, group / "init")}


@pytest.mark.parametrize("namespace", ["shop", "other"])
def test_the_start_of_a_pod_that_is_included_is_not_missing(
    tmp_path: Path, kubelets: list[_Kubelet], now_s: list[float], namespace: str
) -> None:
    one, groups = _of_pod(tmp_path, include="namespace=shop")
    # GIVEN a pod of which the kubelet has not told yet THEN it is recorded, and all else is not
    found = one.newly_left_out()
    assert found is not None and found.ids and not groups & found.ids
    # AND it is not sent
    process_of_pod = replace(process(7, "x"), cgroup=_IN_POD)
    assert one.of([process_of_pod]) == [None]
    assert [(loss.name, loss.count) for loss in one.losses] == [("pods_not_told", 1)]
    # WHEN it tells, three seconds later
    now_s.append(now_s[-1] + 3)
    kubelets[0].tell(namespace)
    # THEN it is sent or left out, at once, as the rules say
    found = one.newly_left_out()
    assert (found is not None and groups <= found.ids) == (namespace == "other")
    (labels,) = one.of([process_of_pod])
    assert (labels is not None) == (namespace == "shop")
    assert one.losses == ()


def test_a_pod_that_is_never_told_of_is_not_recorded_all_day(
    tmp_path: Path, kubelets: list[_Kubelet], now_s: list[float]
) -> None:
    one, groups = _of_pod(tmp_path, include="namespace=shop")
    found = one.newly_left_out()
    assert found is not None and not groups & found.ids
    now_s.append(now_s[-1] + 61)
    found = one.newly_left_out()
    assert found is not None and groups <= found.ids
    # WHEN the kubelet answers at last THEN it is recorded at once
    now_s.append(now_s[-1] + 3)
    kubelets[0].tell("shop")
    found = one.newly_left_out()
    assert found is not None and not groups & found.ids


def test_a_pod_is_decided_about_anew_when_the_kubelet_tells_otherwise(
    tmp_path: Path, kubelets: list[_Kubelet], now_s: list[float]
) -> None:
    one, groups = _of_pod(tmp_path, include="namespace=shop")
    # GIVEN a host that has cgroups of others besides, which are left out
    others = {*known_groups(tmp_path).values()} - groups
    # WHEN what the kubelet tells changes, stays, and changes THEN so does what is left out
    found = LeftOut()
    for namespace, is_out in (("shop", False), ("x", True), ("x", True), ("shop", False)) * 2:
        kubelets[0].tell(namespace)
        now_s.append(now_s[-1] + 10)
        found = one.newly_left_out() or found
        assert found.ids == others | (groups if is_out else set())


def test_looking_again_at_what_has_not_changed_costs_little(
    tmp_path: Path,
    kubelets: list[_Kubelet],
    now_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN pods and services that were looked at, more than paths are remembered of elsewhere
    one, groups = _of_pod(tmp_path, exclude="namespace=shop")
    for number in range(300):
        (tmp_path / "system.slice" / f"{number}.service").mkdir(parents=True)
        (tmp_path / f"kubepods/pod{number:08x}-8d1c-4d5a-9d5f-6a4b1ad0c9ab").mkdir()
    read: list[str] = []
    decided: list[Subject] = []
    leaves_out = Selection.leaves_out

    def counted_identity(path: str) -> Identity:
        read.append(path)
        return identity_of(path)

    def counted(selection: Selection, subject: Subject) -> bool:
        decided.append(subject)
        return leaves_out(selection, subject)

    monkeypatch.setattr(labels, "identity_of", counted_identity)
    monkeypatch.setattr(Selection, "leaves_out", counted)
    kubelets[0].tell("shop")
    assert one.newly_left_out() == LeftOut(frozenset(groups))
    assert len({*read}) == len(decided) > 600
    read.clear()
    decided.clear()
    # WHEN they are looked at again, also after the kubelet has told the same once more
    for _ in range(3):
        kubelets[0].tell("shop")
        now_s.append(now_s[-1] + 10)
        assert one.newly_left_out() is None
    # THEN no path is taken apart, and no rule asked
    assert (read, decided) == ([], [])
    # AND of one that is new, that one's alone
    (tmp_path / "system.slice" / "new.service").mkdir()
    now_s.append(now_s[-1] + 10)
    assert one.newly_left_out() is None
    assert {*read} == {"/system.slice/new.service"} and len(decided) == 1


@pytest.mark.parametrize("kubelet", ["silent", "none"])
def test_what_may_be_of_a_tenant_that_is_excluded_is_not_sent(
    tmp_path: Path, kubelets: list[_Kubelet], kubelet: str
) -> None:
    # GIVEN a tenant that is excluded, and nobody who tells which pods are the tenant's
    one, groups = _of_pod(tmp_path, exclude="namespace=shop")
    kubelets[0].error = "connection refused"
    if kubelet == "none":
        settings = _config(directory=str(tmp_path / "d"), exclude="namespace=shop").agent
        one.use(settings)
    # WHEN a stretch is labelled THEN pods are not sent, and all else is
    host = replace(process(8, "job"), cgroup="/system.slice/job.service")
    pod, labels = one.of([replace(process(7, "x"), cgroup=_IN_POD), host])
    assert pod is None and labels is not None
    # AND it is counted
    assert [(loss.name, loss.count) for loss in one.losses] == [("pods_not_known", 1)]
    found = one.newly_left_out()
    assert found is not None and not groups & found.ids


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
    password.touch(0o600)
    password.write_text("secret")
    flags = {
        "sinks.clickhouse.url": "http://clickhouse.example:8123",
        "sinks.clickhouse.password_file": str(password),
    }
    settings = load(None, flags, {}).sinks["clickhouse"]
    with pytest.raises(UsageError, match="plain text"):
        sink_module("clickhouse").check(settings)


def _window(*paths: str) -> Window:
    columns = {"cgroups": rows_of("cgroups", *((n, 0, n + 1, 0, 0, 0) for n in range(len(paths))))}
    return Window.of(0, 0, 1, columns, texts=("", *paths))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, EngineFacts]:
    """What engines tell; a test takes it away, as an engine does where a container ends."""
    told: dict[str, EngineFacts] = {}

    class Engines:
        def facts_of(self, ids: Iterable[str]) -> dict[str, EngineFacts]:
            return {key: told[key] for key in ids if key in told}

        def names_of(self, ids: Iterable[str]) -> dict[str, str]:
            return {key: facts.name for key, facts in self.facts_of(ids).items()}

    monkeypatch.setattr(labelling, "EngineWatch", Engines)
    return told


def test_another_configuration_forgets_no_container(
    tmp_path: Path, engine: dict[str, EngineFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a container and a pod that are gone, and were known while they ran
    started: list[int] = []
    gone, pod = "a" * 64, Pod("shop", "web-1", "0f9cdd5e-8d1c-4d5a-9d5f-6a4b1ad0c9ab")
    in_pod = f"/kubepods/burstable/pod{pod.uid}/{'b' * 64}"

    class Watch(NoPods):
        error = ""

        def __init__(self, _fetch: object) -> None:
            super().__init__()
            self.pods = PodList({"b" * 64: PodContainer(pod, "app", "", "", "")}, {pod.uid: pod})

        def start(self) -> None:
            started.append(1)

        def stop(self) -> None:
            started.clear()

    monkeypatch.setattr(labelling, "PodWatch", Watch)
    flags = {"directory": str(tmp_path), "kubelet": "127.0.0.1", "node": "n"}
    one = Labelling(_config(**flags).agent)
    engine[gone] = EngineFacts("web")
    one.expect(_window(f"/docker/{gone}", in_pod))
    engine.clear()
    # WHEN something else of the configuration changes, and then whom pods are asked of
    for more, watches in (
        ({"exclude": "unit=a"}, 1),
        ({"kubelet_port": 1}, 1),
        ({"kubelet": ""}, 0),
    ):
        one.use(_config(**{**flags, **more}).agent)
        processes = [replace(process(7, "x"), cgroup=path) for path in (f"/docker/{gone}", in_pod)]
        # THEN their names are known, and there is one who asks for pods, or none
        found = [each.container for each in one.of(processes) if each is not None]
        assert found == ["web", "app"]
        assert len(started) == watches


def test_names_of_containers_that_are_gone_outlive_the_process(
    tmp_path: Path, engine: dict[str, EngineFacts]
) -> None:
    gone = "a" * 64
    engine[gone] = EngineFacts("web", "nginx:1.25", (("team", "search"),))
    settings = _config(directory=str(tmp_path), pod_labels="team").agent
    Labelling(settings).expect(_window(f"/docker/{gone}"))
    engine.clear()
    assert (tmp_path / "containers.json").stat().st_mode & 0o777 == 0o600
    # WHEN another process labels what that one left
    one = replace(process(7, "x"), cgroup=f"/docker/{gone}")
    (labels,) = Labelling(settings).of([one])
    # THEN it has its name
    assert labels is not None
    assert (labels.container, labels.version, labels.extra) == (
        "web",
        "1.25",
        (("team", "search"),),
    )


def test_a_container_below_a_service_that_is_gone_outlives_the_process(
    tmp_path: Path, engine: dict[str, EngineFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a container of a service, as Quadlet makes it, that an agent has known while it ran
    group = f"/system.slice/quadlet.service/libpod-payload-{'a' * 64}"
    engine["a" * 64] = EngineFacts("web")
    settings = _config(directory=str(tmp_path)).agent
    monkeypatch.setattr(labelling, "is_roots", lambda *_: True)
    Labelling(settings).expect(_window(f"{group}/container"))
    engine.clear()
    monkeypatch.setattr(labelling, "is_roots", lambda *_: False)
    # WHEN another process labels what that one left THEN it has its name
    paths = (f"{group}/container", f"/system.slice/evil.service/libpod-payload-{'a' * 64}")
    found = Labelling(settings).of([replace(process(7, "x"), cgroup=path) for path in paths])
    # AND a service that makes up a cgroup of that name has not.
    assert [each.service for each in found if each is not None] == ["web", "evil"]


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
def test_whoever_may_make_a_cgroup_below_a_service_names_no_container(
    tmp_path: Path, engine: dict[str, EngineFacts], monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(labelling, "cgroup2_mounts", lambda: [tmp_path])
    engine["a" * 64] = EngineFacts("web")
    one = Labelling(_config(directory=str(tmp_path)).agent)
    # GIVEN the cgroup of a service in which root may make cgroups, and who else
    service = tmp_path / "system.slice" / "quadlet.service"
    service.mkdir(parents=True)
    service.chmod(mode)
    inside = f"/system.slice/quadlet.service/libpod-payload-{'a' * 64}"
    (labels,) = one.of([replace(process(7, "x"), cgroup=inside)])
    is_roots = mode == 0o755 and service.stat().st_uid == 0
    assert labels is not None and labels.service == ("web" if is_roots else "quadlet")


def test_a_container_has_its_new_name(tmp_path: Path, engine: dict[str, EngineFacts]) -> None:
    one = Labelling(_config(directory=str(tmp_path), exclude="container=old").agent)
    engine["a" * 64] = EngineFacts("old", "web:1", (("a", "b"),))
    processes = [replace(process(7, "x"), cgroup=f"/libpod_parent/libpod-{'a' * 64}")]
    assert one.of(processes) == [None]
    # WHEN its engine has written another THEN labels and rules go by that, and so does what is kept
    engine["a" * 64] = EngineFacts("new", "web:1", (), may_have_labels=True)
    (labels,) = one.of(processes)
    assert labels is not None and (labels.service, labels.container) == ("new", "new")
    one.expect(_window(processes[0].cgroup))
    facts = EngineFacts("new", "web:1", (("a", "b"),))
    assert kept(tmp_path) == {"a" * 64: KnownContainer(facts)}


def test_a_container_that_is_renamed_is_left_out_or_not_by_its_new_name(
    tmp_path: Path, engine: dict[str, EngineFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelling, "cgroup2_mounts", lambda: [tmp_path])
    monkeypatch.setattr(labelling, "cgroup_layout", lambda: CgroupLayout.UNIFIED)
    monkeypatch.setattr(labelling, "_LOOK_S", 0)
    group = tmp_path / "docker" / ("a" * 64)
    group.mkdir(parents=True)
    one = Labelling(_config(directory=str(tmp_path / "d"), exclude="container=debug-*").agent)
    is_out = LeftOut(frozenset({group.stat().st_ino}))
    for name, wanted in (("web", LeftOut()), ("debug-web", is_out), ("web", LeftOut())):
        engine["a" * 64] = EngineFacts(name)
        assert one.newly_left_out() == wanted
        assert one.newly_left_out() is None
    # AND where the container's cgroup is made anew
    engine["a" * 64] = EngineFacts("debug-web")
    found = one.newly_left_out()
    group.rename(tmp_path / "elsewhere")
    group.mkdir()
    assert (found, one.newly_left_out()) == (is_out, LeftOut(frozenset({group.stat().st_ino})))


def test_a_container_that_docker_renames_has_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelling, "EngineWatch", partial(EngineWatch, tmp_path))
    state = tmp_path / "var/lib/docker/containers" / ("a" * 64) / "config.v2.json"
    state.parent.mkdir(parents=True)

    def rename(name: str) -> None:
        new = state.with_suffix(".tmp")
        config = {"Image": "web:1", "Labels": {"team": "search"}}
        new.write_text(json.dumps({"Name": f"/{name}", "Config": config}))
        new.rename(state)

    # GIVEN a container that was there before the agent, and one rule about its name
    rename("old")
    settings = _config(directory=str(tmp_path), exclude="container=debug", pod_labels="team").agent
    one = Labelling(settings)
    container = [replace(process(7, "x"), cgroup=_IN_CONTAINER)]
    found = []
    # WHEN docker renames it THEN labels and rules go by that, and all else stays
    for name in ("old", "new", "newer", "debug", "old"):
        rename(name)
        (labels,) = one.of(container)
        found.append(None if labels is None else (labels.container, labels.version, labels.extra))
    extra = (("team", "search"),)
    assert found == [
        *((name, "1", extra) for name in ("old", "new", "newer")),
        None,
        ("old", "1", extra),
    ]
    # AND one that is being written, or is gone, changes nothing
    for text in ("", "{", '{"Name": 7}'):
        state.write_text(text)
        (labels,) = one.of(container)
        assert labels is not None and labels.container == "old"
    shutil.rmtree(state.parent)
    (labels,) = one.of(container)
    assert labels is not None and labels.container == "old"
    one._engines.stop()


_POD = Pod("shop", "web-1", "uid", labels=(("app", "web"),), annotations=(("a", "b"),))


def test_what_is_kept_is_what_was_known(tmp_path: Path) -> None:
    known = {
        "a" * 64: KnownContainer(EngineFacts("web", "nginx", (("team", "\udcff\x1b[31m"),))),
        "b" * 64: KnownContainer(PodContainer(_POD, "app", "nginx:1", "sha256:ab", "init")),
        "c" * 64: KnownContainer(EngineFacts("job", may_have_labels=True), "/a.service/c"),
    }
    keep(tmp_path, known)
    keep(tmp_path, known)
    assert kept(tmp_path) == known
    assert [path.name for path in tmp_path.iterdir()] == ["containers.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", "[" * 10**5, '{"a": 7}', '{"a": {"facts": 7}}'),
        '{"a": {"facts": {"labels": 7}, "of_service": ""}}',
        '{"a": {"name": "web", "image": "", "labels": [], "may_have_labels": false}}',
    ],
)
def test_what_is_kept_and_cannot_be_read_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "containers.json").write_text(text)
    assert kept(tmp_path) == {}
    keep(tmp_path / "absent", {})


def test_a_host_of_containers_without_end_is_bounded_for_sinks(
    tmp_path: Path, engine: dict[str, EngineFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelling, "_MAX_LABEL_SETS", 10)
    one = Labelling(_config(directory=str(tmp_path), node="n").agent)
    ids = [f"{number:064x}" for number in range(1000)]
    # WHEN a stretch has a thousand containers that nobody can name, one of them of a user's
    paths = [f"/user.slice/user-7.slice/libpod-{ids[0]}.scope", *(f"/docker/{k}" for k in ids[1:])]
    labels = one.of([replace(process(7, "x"), cgroup=path) for path in paths])
    # THEN sinks get few sets of labels, nothing is left out, and it is counted
    assert len({*labels}) == 11
    assert None not in labels
    assert labels.count(Labels("other", node="n")) == 990
    assert {loss.name: loss.count for loss in one.losses} == {
        "unnamed_containers": 1000,
        "labels_merged": 990,
    }
    # AND of the next stretch there is nothing to tell
    one.of([replace(process(7, "x"), cgroup="/system.slice/cron.service")])
    assert one.losses == ()


def test_what_a_container_makes_is_one_set_of_labels(
    tmp_path: Path, engine: dict[str, EngineFacts]
) -> None:
    engine["a" * 64] = EngineFacts("web")
    one = Labelling(_config(directory=str(tmp_path)).agent)
    below = ["", "/x%d", "/run-u%d.service", "/docker/%064x", "/kubepods/pod%032x/%064x"]
    processes = [
        replace(
            process(number, f"name{number}"),
            cgroup=f"/docker/{'a' * 64}{path.replace('%', '%(n)') % {'n': number}}",
            executable=f"/bin/{number}",
        )
        for number in range(1, 1000)
        for path in below
    ]
    assert len({*one.of(processes)}) == 1
