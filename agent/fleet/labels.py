# SPDX-License-Identifier: Apache-2.0
"""Whom a process belongs to: labels by its cgroup, Kubernetes, container engines and systemd.

What is believed, so that nobody takes another's name:

* Cgroups that root and engines make. Below a container's own, a service's or a user's, others may
  make cgroups of any name: a container counts if it is the outermost on its path, and only what
  runs containers, or nothing, is above it. All that is inside belongs to it, or to that service or
  user.
* Below a service of root's, as podman's units have it: where root alone can have made the cgroup,
  and files of root's engines know the container. In a container that is a node of Kubernetes, as
  kind's, by the labels that its engine has of it: the outermost one in it that the kubelet tells,
  while none that it tells is outside of nodes. An image may have such labels, too.
* What is below /user.slice/user-N.slice is that user's: its names follow "user-N/", also those of
  containers of rootless engines, of which that user's files tell, and nobody else's.
* Names, images and pods by the id of such a container, from files of root's or from the kubelet.
  Labels and annotations were chosen by whoever may make the container, or pods in its namespace.
* An executable's name, which its process chose, where none of these is there.

Every text is bounded and printable, and so is the number of services of a user.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Protocol

from aiflame.agent.fleet.pods import Pod, PodContainer, PodList, Tags
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Process
from aiflame.agent.processes.container_names import EngineFacts, facts_of
from aiflame.agent.processes.identity import (
    ABOVE,
    ENGINE_UNITS,
    USER_SLICE,
    Container,
    Identity,
    identity_of,
    is_made_by_engine,
    whole_path,
)
from aiflame.agent.processes.owners import owner_of

# How long what is known of a container outlives its last process: its samples come later, and so do
# those who ask.
KEPT_S = 600.0
# Containers that are known at a time; past it, those that were not seen for longest are forgotten.
_MAX_KNOWN = 8192
# How soon engines' files are read again for a container that is not in them, and for one of which
# only the labels are not: rules may leave it out, and what is in the way is over in some 20 ms.
_ASK_AGAIN_S, _LABELS_AGAIN_S = 5.0, 0.5
# How long the kubelet is asked for one at once: what it has not told by then, as sandboxes, is left
# to its regular answers. As long podman's files are read for labels.
_ASKED_FOR_S = 60.0

# Back-ends take 128 to 1,024 characters; Kubernetes allows 253 in a name.
MAX_TEXT = 253
_MAX_EXTRA_TEXT = 128
# Pyroscope takes 30 labels of a series, of which some are not extra.
_MAX_EXTRA = 16
# Containers of one user that are told apart at a time.
_MAX_CONTAINERS_OF_USER = 256
# Services of one user, and of all that is in no group, at a time; further ones are that user's, or
# "other".
_MAX_SERVICES_OF_USER, _MAX_SERVICES = 64, 256
# Cgroups of which it is kept what was decided; 500 pods have some 4,500, with paths of 300
# characters. They take 12 MB at most.
_MAX_DECIDED, _MAX_DECIDED_CHARACTERS = 8192, 512
# Of these, of one container or service, which may make as many as it likes.
_MAX_DECIDED_OF_ONE = 64

_KUBE_PATH = re.compile(r"[/-]kubepods(?=[./-]|\Z)")
_SHORT_ID_CHARACTERS = 12
# Units that systemd, engines and desktops make under names that never come again: each kind is one
# service. Sources: systemd-run(1) and src/run/run.c, logind's session names, sd_bus activation,
# systemd.socket(5) for Accept=yes, and https://systemd.io/DESKTOP_ENVIRONMENTS.
_HEX = "[0-9a-f]"
_UUID = f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
_TRANSIENT_UNIT = re.compile(
    "|".join(
        (
            r"(run|krun)-(?:u\d+|p\d+-i\d+|r?[0-9a-f]{32}|\d+)",
            r"(session)-c?\d+",
            r"(user|user-runtime-dir)@\d+",
            rf"(.+)[-@:](?:{_HEX}{{64}}|{_HEX}{{32}}|{_UUID})",
            r"(podman)-\d+",
            r"(app-.+)(?:-\d+|@[0-9a-f]+)",
            r"(.+)@\d+-\d+-\d+(?:_\d+)?",
            r"(.+)@\d+-[0-9a-f.:\[\]]+:\d+-[0-9a-f.:\[\]]+:\d+",
            r"dbus-:\d+\.\d+-(.+)@\d+",
        )
    )
)
# Labels of containers that are nodes, by kind, k3d and minikube: pkg/cluster/internal/providers,
# pkg/types/types.go, pkg/drivers/kic/oci/types.go of these.
_NODE_LABELS = frozenset(
    ("io.x-k8s.kind.cluster", "k3d.cluster", "created_by.minikube.sigs.k8s.io")
)
_UNIT_TYPES = re.compile(r"\.(?:service|scope)\Z")
# kthreadd, whose children all kernel threads are (rest_init in init/main.c).
_KTHREADD_PID = 2
_KERNEL_THREADS = "kernel threads"
_UNKNOWN, _OTHER = "unknown", "other"
# Of a container of which only the id is known: a service of that name would be new each time.
UNKNOWN_CONTAINER = "unknown-container"
# The process that holds the namespaces of a pod (containerd, CRI-O, cri-dockerd); the kubelet does
# not tell its id.
_SANDBOX = "pause"

# What rules may ask about a container that its pod tells, and what the pod's list of containers.
_TOLD_OF_CONTAINER = frozenset(("container", "version"))
TOLD_OF_POD = _TOLD_OF_CONTAINER | frozenset(
    ("namespace", "pod", "service", "workload", "workload_kind", "label", "annotation")
)

_SERVICE_LABELS = ("app.kubernetes.io/name", "app")
_COMPOSE_SERVICE = "com.docker.compose.service"
_VERSION_LABEL = "app.kubernetes.io/version"

_EXTRA_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
# What labels of ours are called, or become in a back-end: none of a pod's may pass for one.
_OWN_NAMES = frozenset(
    (*(name for name in Labels.__slots__ if name != "extra"), "host", "instance", "job", "tenant")
)
_OWN_PREFIXES = ("__", "k8s_", "service_", "container_", "host_", "process_", "aiflame_")

# What the kernel says of the path of a file that is gone (d_path, fs/d_path.c), and of one that
# memfd_create has made (mm/memfd.c).
_DELETED, _IN_MEMORY = " (deleted)", "/memfd:"


@dataclass(frozen=True, slots=True)
class LabelOptions:
    """What the configuration says about labels.

    Attributes:
        node: This host's name.
        extra: Names of labels and annotations to be sent, with wildcards.
        service_annotation: Of a pod: what its service is called.
        kept_s: How long what is known of a container outlives its last process.
    """

    node: str
    extra: tuple[str, ...] = ()
    service_annotation: str = "aiflame/service"
    kept_s: float = KEPT_S


@dataclass(frozen=True, slots=True)
class Subject:
    """Who a process is, with what rules may ask about but is not sent.

    Attributes:
        labels: What is sent.
        tags: Labels of its pod or container.
        annotations: Of its pod.
        unit: The systemd unit under its own name, where that in the labels is of many units.
        unknown: What rules may ask about and the kubelet has not told yet, as they call it.
        is_awaited: Whether that may still come within a minute.
    """

    labels: Labels
    tags: Tags = ()
    annotations: Tags = ()
    unit: str = ""
    unknown: frozenset[str] = frozenset()
    is_awaited: bool = False


class Pods(Protocol):
    """Where pods are known from: `kubelet.PodWatch`."""

    @property
    def pods(self) -> PodList:
        """What is known now."""

    def ask(self) -> None:
        """Has it looked for what is not known."""


class NoPods:
    """Of a host without Kubernetes."""

    def __init__(self) -> None:
        self.pods = PodList()

    def ask(self) -> None:
        """There is nobody to be asked."""


# What is known of a container.
Facts = PodContainer | EngineFacts


@dataclass(frozen=True, slots=True)
class KnownContainer:
    """What is known of a container, for whoever labels it once it is gone.

    Attributes:
        facts: What its pod or engine told.
        of_service: Its cgroup, where root has made it below a service, "" elsewhere.
    """

    facts: Facts
    of_service: str = ""


@dataclass(slots=True)
class _Known:
    facts: Facts | None
    first_s: float
    used_s: float
    asked_s: float
    group: str = ""  # of one that the kubelet has not told of when it was seen
    uid: str = ""  # of its pod, likewise
    pod: Pod | None = None  # of a sandbox, of which the kubelet tells no more
    of_service: str = ""  # its cgroup, where root has made it below a service
    is_learnt: bool = False  # and nobody was told so


@dataclass(slots=True)
class _Group:
    """A cgroup whose path alone tells which container it is of, or that it is of none.

    Attributes:
        container: None where it is of none.
        has_units: Whether its path tells of units, and so of a service.
        basis: What else its owner follows from: what was decided holds as long as that is equal.
        decided: None until something was that lasts.
    """

    container: Container | None
    has_units: bool
    basis: Facts | str | None = None
    decided: bool | None = None


def _is_not_roots(_cgroup: str) -> bool:
    return False


def _no_names(_ids: Iterable[str]) -> dict[str, str]:
    return {}


def _no_facts(_uid: int, _ids: Iterable[str]) -> dict[str, EngineFacts]:
    return {}


class Labeller:
    """Tells whom processes belong to.

    Args:
        options: What the configuration says.
        pods: Of this node, by Kubernetes.
        engine_facts: Returns what engines left of containers.
        clock_s: Monotonic, in seconds.
        rootless_facts: As engine_facts, of the containers of a user.
        names_of: Returns the names that containers have by now, as far as engines tell.
        is_roots: Whether nobody but root can make cgroups in one.

    Attributes:
        changes: How often something was learnt of a container.
    """

    def __init__(
        self,
        options: LabelOptions,
        pods: Pods | None = None,
        engine_facts: Callable[[Iterable[str]], dict[str, EngineFacts]] = facts_of,
        clock_s: Callable[[], float] = time.monotonic,
        rootless_facts: Callable[[int, Iterable[str]], dict[str, EngineFacts]] = _no_facts,
        names_of: Callable[[Iterable[str]], dict[str, str]] = _no_names,
        is_roots: Callable[[str], bool] = _is_not_roots,
    ) -> None:
        self.changes = 0
        self._list = PodList()
        self._listed_s = 0.0
        self._has_learnt = False
        self.use(options, pods)
        self._engine_facts = engine_facts
        self._rootless_facts = rootless_facts
        self._names_of = names_of
        self._is_roots = is_roots
        self._clock_s = clock_s
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._services: defaultdict[str, OrderedDict[str, float]] = defaultdict(OrderedDict)

    def use(self, options: LabelOptions, pods: Pods | None) -> None:
        """Takes another configuration; what is known of containers stays.

        Args:
            options, pods: As of the class.
        """
        self._options = options
        self._node = bounded_text(options.node)
        self._pods = NoPods() if pods is None else pods
        self._is_kubelet_of_host = False
        self._groups: dict[str, _Group] = {}
        self._decide: Callable[[Subject], bool] | None = None

    @property
    def other(self) -> Labels:
        """Labels of what is not told apart."""
        return Labels(service=_OTHER, node=self._node)

    @property
    def known(self) -> dict[str, KnownContainer]:
        """What is known of containers, by their ids."""
        return {
            key: KnownContainer(known.facts, known.of_service)
            for key, known in self._known.items()
            if known.facts is not None
        }

    def learn(self, known: Mapping[str, KnownContainer]) -> None:
        """Takes what somebody else has known of containers, as of ones that were just seen."""
        now_s = self._clock_s()
        for container_id, one in known.items():
            learnt = _Known(one.facts, now_s, now_s, now_s, of_service=one.of_service)
            self._known[container_id] = learnt
        self._forget(now_s)

    @property
    def unresolved(self) -> int:
        """How many containers there are of which only the id is known."""
        return sum(known.facts is None for known in self._known.values())

    def of(self, processes: Sequence[Process]) -> list[Labels]:
        """Returns the labels of each process."""
        return [subject.labels for subject in self.subjects(processes)]

    def subjects(self, processes: Sequence[Process]) -> list[Subject]:
        """Returns who each process is."""
        self.expect({process.cgroup for process in processes})
        # A host's ten thousands of a minute are of a few programs: each of those is looked at once.
        known: dict[tuple[str, str, str, bool], Subject] = {}
        found = []
        for process in processes:
            key = (process.cgroup, process.executable, process.name, _is_kernel_thread(process))
            if key not in known:
                known[key] = self._subject(process)
            found.append(known[key])
        return found

    def of_group(self, cgroup: str) -> Subject:
        """Returns who a cgroup belongs to, of whose processes nothing is known."""
        self.expect([cgroup])
        return self._subject(_in_group(cgroup))

    def decided(self, cgroups: Collection[str], decide: Callable[[Subject], bool]) -> list[bool]:
        """Returns what is decided about each cgroup: anew only where its owner may have changed.

        Args:
            cgroups: All there are: what was decided about others is forgotten.
            decide: Decides about whom one belongs to, as `of_group` tells.
        """
        before, self._groups = self._groups if decide == self._decide else {}, {}
        self._decide = decide
        counts: Counter[str] = Counter()
        for path in cgroups:
            group = before.get(path) or _group(path)
            if group is None or len(self._groups) >= _MAX_DECIDED:
                continue
            owner = owner_of(path)
            counts[owner] += 1
            if counts[owner] <= _MAX_DECIDED_OF_ONE:
                self._groups[path] = group
        self.expect(cgroups)
        return [self._decided(path, decide) for path in cgroups]

    def _decided(self, path: str, decide: Callable[[Subject], bool]) -> bool:
        group = self._groups.get(path)
        if group is None:
            return decide(self._subject(_in_group(path)))
        basis: Facts | str
        if group.container is not None:
            known = self._known.get(group.container.id)
            if known is None or known.facts is None:  # how long it is awaited decides, too
                return decide(self._subject(_in_group(path)))
            basis = known.facts
        else:
            basis = "" if group.has_units else self._service_of(_in_group(path))
        if group.decided is None or basis != group.basis:
            group.decided = decide(self._subject(_in_group(path)))
        group.basis = basis  # the newest of equal ones: the kubelet's older answer is let go
        return group.decided

    def expect(self, cgroups: Iterable[str]) -> None:
        """Looks for containers as soon as one is seen, so that they are known when labels are."""
        now_s = self._clock_s()
        self._take_list(now_s)
        paths = {path if path in self._groups else whole_path(path) for path in cgroups}
        self._expect(paths, now_s)
        inside = {path for path in paths if self._is_in_node(path)}
        if inside:  # which is known now
            self._expect(inside, now_s)
        self._forget(now_s)

    def _expect(self, paths: Iterable[str], now_s: float) -> None:
        missing, named = [], []
        for path in paths:
            group = self._groups.get(path)
            user = None if group is not None else USER_SLICE.match(path)
            if user is not None:
                self._expect_of_user(int(user[1]), path, now_s)
                continue
            if group is not None:
                container = group.container
            else:
                container = self._trusted(path) or self._below_service(path, now_s)
            if container is None or not container.id:
                continue
            known = self._seen(container.id, now_s)
            of_pod = self._list.containers.get(container.id)
            if of_pod is not None:
                self._take(known, of_pod)
                self._is_kubelet_of_host |= group is not None or _is_outermost(container, path)
            elif _is_to_be_asked(known, now_s):
                if _is_of_kubelet(container.path):
                    known.group = container.path
                    known.uid = identity_of(container.path).pod_uid
                    known.pod = self._list.pods.get(known.uid, known.pod)
                    if now_s - known.first_s <= _ASKED_FOR_S:
                        self._pods.ask()
                elif now_s - known.asked_s >= _pause_s(known):
                    known.asked_s = now_s
                    missing.append(container.id)
            elif isinstance(known.facts, EngineFacts):
                named.append(container.id)
        for container_id, name in self._names_of(named).items():
            self._rename(self._known[container_id], name)
        if missing:
            for container_id, facts in self._engine_facts(missing).items():
                if container_id in missing:
                    self._take(self._known[container_id], facts)

    def _trusted(self, path: str) -> Container | None:
        """Returns the container that a path of no user's is of, if root or an engine named it."""
        identity = identity_of(path)
        if not identity.containers:
            return None
        outermost = identity.containers[0]
        known = self._known.get(outermost.id)
        if not is_made_by_engine(outermost, identity):
            if known is None or not isinstance(known.facts, EngineFacts):
                return None
            return outermost if known.of_service == outermost.path else None
        if self._is_kubelet_of_host:
            return outermost
        inner = _in_node(identity) if known is not None and _is_node(known.facts) else None
        if inner is None:
            return outermost
        of_inner = self._known.get(inner.id)
        is_told = of_inner is not None and isinstance(of_inner.facts, PodContainer)
        return inner if is_told or inner.id in self._list.containers else outermost

    def _is_in_node(self, path: str) -> bool:
        if path in self._groups or USER_SLICE.match(path):
            return False
        trusted = self._trusted(path)
        return trusted is not None and not _is_outermost(trusted, path)

    def _below_service(self, path: str, now_s: float) -> Container | None:
        """Returns the container that a path below a service is of, if root alone can say so."""
        outermost = next(iter(identity_of(path).containers), None)
        if outermost is None or not outermost.id:
            return None
        if not self._is_roots(outermost.path.rpartition("/")[0]):
            return None
        known = self._seen(outermost.id, now_s)
        self.changes += known.of_service != outermost.path
        known.of_service = outermost.path
        return outermost

    def take_learnt(self) -> set[str]:
        """Returns cgroups of containers that were seen before the kubelet told of them.

        Each once, when it has.
        """
        self._take_list(self._clock_s())
        if not self._has_learnt:
            return set()
        self._has_learnt = False
        learnt = set()
        for known in self._known.values():
            if known.is_learnt:
                known.is_learnt = False
                learnt.add(known.group)
        return learnt

    def _take_list(self, now_s: float) -> None:
        """Takes what the kubelet told last of those that were seen before; mostly it is known."""
        told = self._pods.pods
        if told is self._list:
            return
        self._list = told
        if not told.pods:  # nobody has answered yet
            return
        self._listed_s = now_s
        for container_id, known in self._known.items():
            if known.facts is not None or not known.uid:
                continue
            of_pod, pod = told.containers.get(container_id), told.pods.get(known.uid, known.pod)
            if of_pod is not None or pod != known.pod:
                known.is_learnt = self._has_learnt = True
            known.pod = pod
            if of_pod is not None:
                self._take(known, of_pod)

    def _expect_of_user(self, uid: int, path: str, now_s: float) -> None:
        container = _of_rootless(path)
        if container is None or not self._tells_apart(uid, container.id):
            return
        key = _key_of_user(uid, container.id)
        known = self._seen(key, now_s)
        if known.facts is None:
            facts = self._rootless_facts(uid, [container.id]).get(container.id)
            if facts is not None:
                self._take(known, facts)

    def _tells_apart(self, uid: int, container_id: str) -> bool:
        """Whether a container of a user's is not one too many."""
        most = _MAX_CONTAINERS_OF_USER
        return bool(self._bounded(f"containers of {uid}", container_id, "", most))

    def _seen(self, key: str, now_s: float) -> _Known:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(None, now_s, now_s, now_s - _ASK_AGAIN_S)
        known.used_s = now_s
        self._known.move_to_end(key)
        return known

    def _take(self, known: _Known, facts: Facts) -> None:
        self.changes += known.facts != facts
        known.facts = facts

    def _rename(self, known: _Known, name: str) -> None:
        """Takes a container's name anew; its labels do not change."""
        if isinstance(known.facts, EngineFacts) and name != known.facts.name:
            self._take(known, replace(known.facts, name=name))

    def _forget(self, now_s: float) -> None:
        while self._known:
            oldest = next(iter(self._known.values()))
            if len(self._known) <= _MAX_KNOWN and now_s - oldest.used_s <= self._options.kept_s:
                return
            self._known.popitem(last=False)

    def _subject(self, process: Process) -> Subject:
        path = whole_path(process.cgroup)
        user = USER_SLICE.match(path)
        if user is not None:
            return Subject(self._of_user(int(user[1]), path, process))
        container = self._trusted(path)
        if container is not None:
            return self._of_container(container, path, process)
        units = identity_of(path).units
        if units:
            own = bounded_text(units[0].name)
            service, unit = _lasting(own)
            return Subject(Labels(service=service, unit=unit, node=self._node), unit=own)
        return Subject(Labels(service=self._service_of(process), node=self._node))

    def _service_of(self, process: Process) -> str:
        """Returns the service of a process in no group that tells one."""
        return self._bounded("", _of_executable(process), _OTHER, _MAX_SERVICES)

    def _of_user(self, uid: int, path: str, process: Process) -> Labels:
        user = f"user-{uid}"
        container = _of_rootless(path)
        # The first is the user's own manager, or the session.
        units = [unit.name for unit in identity_of(path).units[1:]]
        facts = None
        if container is not None:
            known = self._known.get(_key_of_user(uid, container.id))
            facts = None if known is None else known.facts
            name = UNKNOWN_CONTAINER if facts is None else facts.name
        else:
            name = _lasting(units[0])[0] if units else _of_executable(process)
        service = f"{user}/{bounded_text(name)}"[:MAX_TEXT]
        most = _MAX_SERVICES_OF_USER
        labels = Labels(
            service=self._bounded(user, service, user, most),
            unit=f"{user}.slice",
            node=self._node,
        )
        # An id that root's engines gave out is not the user's to claim.
        if container is None or container.id in self._known:
            return labels
        if not self._tells_apart(uid, container.id):
            return labels
        labels = replace(labels, container_id=container.id, engine=_engine(container))
        if not isinstance(facts, EngineFacts):
            return labels
        return replace(labels, container=service, version=_version({}, facts.image, ""))

    def _of_container(self, container: Container, path: str, process: Process) -> Subject:
        known = self._known.get(container.id)
        facts = None if known is None else known.facts
        labels = Labels(
            service=bounded_text(container.name) or UNKNOWN_CONTAINER,
            container_id=container.id,
            container=bounded_text(container.name),
            engine=_engine(container),
            node=self._node,
        )
        if isinstance(facts, PodContainer):
            return self._of_pod(labels, facts)
        if facts is not None:
            return self._of_engine(labels, facts)
        uid = identity_of(container.path).pod_uid
        if not uid:
            return Subject(labels)
        pod = None if known is None else known.pod
        if known is None or pod is None:
            is_awaited = known is None or self._clock_s() - known.first_s <= _ASKED_FOR_S
            labels = replace(labels, pod_uid=uid)
            return Subject(labels, unknown=TOLD_OF_POD, is_awaited=is_awaited)
        is_sandbox = PurePath(process.executable).name == _SANDBOX
        name = _SANDBOX if is_sandbox else ""
        found = self._of_pod(labels, PodContainer(pod, name, "", "", ""))
        # A kubelet that tells of the pod for so long tells of its containers, and of no sandbox.
        if is_sandbox or self._listed_s - known.first_s > _ASKED_FOR_S:
            return found
        # What has no better name is called after its container.
        is_named = found.labels.service != bounded_text(pod.name)
        unknown = _TOLD_OF_CONTAINER if is_named else _TOLD_OF_CONTAINER | {"service"}
        return replace(found, unknown=unknown, is_awaited=True)

    def _of_pod(self, labels: Labels, found: PodContainer) -> Subject:
        pod, tags = found.pod, dict(found.pod.labels)
        annotation = dict(pod.annotations).get(self._options.service_annotation, "")
        chosen = (annotation, *(tags.get(name, "") for name in _SERVICE_LABELS))
        service = next(filter(None, map(bounded_text, (*chosen, pod.workload, found.name))), "")
        labels = replace(
            labels,
            service=service or bounded_text(pod.name) or labels.service,
            container=bounded_text(found.name),
            namespace=bounded_text(pod.namespace),
            pod=bounded_text(pod.name),
            pod_uid=bounded_text(pod.uid),
            workload=bounded_text(pod.workload),
            workload_kind=bounded_text(pod.workload_kind),
            version=_version(tags, found.image, found.digest),
            extra=self._extra((*pod.labels, *pod.annotations)),
        )
        return Subject(labels, pod.labels, pod.annotations)

    def _of_engine(self, labels: Labels, facts: EngineFacts) -> Subject:
        tags = dict(facts.labels)
        name = bounded_text(facts.name)
        service = bounded_text(tags.get(_COMPOSE_SERVICE, "")) or name or labels.service
        version = _version(tags, facts.image, "")
        extra = self._extra(facts.labels)
        labels = replace(labels, service=service, container=name, version=version, extra=extra)
        return Subject(labels, facts.labels)

    def _extra(self, tags: Iterable[tuple[str, str]]) -> Tags:
        """Returns those that the configuration asks for, under names that are not ours."""
        found: dict[str, str] = {}
        for name, value in tags:
            if name not in found and _may_be_extra(name) and self._is_wanted(name):
                found[name] = bounded_text(value)[:_MAX_EXTRA_TEXT]
        return tuple(sorted(found.items())[:_MAX_EXTRA])

    def _is_wanted(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._options.extra)

    def _bounded(self, payer: str, service: str, instead: str, most: int) -> str:
        """Returns a service, or another one for a payer that has too many."""
        services, now_s = self._services[payer], self._clock_s()
        while services and now_s - next(iter(services.values())) > KEPT_S:
            services.popitem(last=False)
        if service not in services and len(services) >= most:
            return instead
        services[service] = now_s
        services.move_to_end(service)
        return service


def _is_to_be_asked(known: _Known, now_s: float) -> bool:
    """Whether not all is known of a container, and it may be by now."""
    facts = known.facts
    if isinstance(facts, EngineFacts) and facts.may_have_labels:
        return now_s - known.first_s <= _ASKED_FOR_S
    return facts is None


def _pause_s(known: _Known) -> float:
    return _ASK_AGAIN_S if known.facts is None else _LABELS_AGAIN_S


def bounded_text(text: str) -> str:
    """Returns a text that any back-end can take: printable, and not too long."""
    text = text[:MAX_TEXT].strip()
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _in_group(cgroup: str) -> Process:
    """Returns a process of which nothing else is known."""
    return Process(0, 0, "", "", "", cgroup, "", 0, None)


def _group(path: str) -> _Group | None:
    """Returns what is kept of a cgroup; None where more than its path tells whose it is."""
    if len(path) > _MAX_DECIDED_CHARACTERS or ABOVE.match(path) or USER_SLICE.match(path):
        return None
    identity = identity_of(path)
    if not identity.containers:
        return _Group(None, bool(identity.units))
    (outermost, *inner) = identity.containers
    if inner or not outermost.id or not is_made_by_engine(outermost, identity):
        return None
    return _Group(outermost, False)


def _is_outermost(container: Container, path: str) -> bool:
    return container.path == identity_of(path).containers[0].path


def _is_node(facts: Facts | None) -> bool:
    """Whether a container is a node of Kubernetes: whoever made it says so, and nobody inside."""
    return isinstance(facts, EngineFacts) and any(name in _NODE_LABELS for name, _ in facts.labels)


def _in_node(identity: Identity) -> Container | None:
    """Returns the outermost container in one that is a node, if what the kubelet runs it is.

    Those inside of it, and below a service of the node's, may be called after anybody's.
    """
    if len(identity.containers) == 1:
        return None
    node, inner = identity.containers[:2]
    above = (unit for unit in identity.units if inner.path.startswith(f"{unit.path}/"))
    inside = [unit for unit in above if unit.path.startswith(f"{node.path}/")]
    if not inner.id or not _is_of_kubelet(inner.path[len(node.path) :]):
        return None
    return inner if all(unit.name in ENGINE_UNITS for unit in inside) else None


def _of_rootless(path: str) -> Container | None:
    """Returns the outermost container with an id on a path of a user's."""
    return next((each for each in identity_of(path).containers if each.id), None)


def _key_of_user(uid: int, container_id: str) -> str:
    return f"user-{uid}/{container_id}"


def _lasting(unit: str) -> tuple[str, str]:
    """Returns the names of a unit's service and of the unit, without what is new each time."""
    name = _UNIT_TYPES.sub("", unit)
    found = _TRANSIENT_UNIT.fullmatch(name)
    if found is None:
        return name, unit
    kind = next(filter(None, found.groups()))
    return kind, f"{kind}-*{unit[len(name) :]}"


def _is_of_kubelet(path: str) -> bool:
    return _KUBE_PATH.search(path) is not None


def _engine(container: Container) -> str:
    return "" if container.engine is None else container.engine.value


def _is_kernel_thread(process: Process) -> bool:
    return _KTHREADD_PID in (process.pid, process.parent_pid)


def _of_executable(process: Process) -> str:
    if _is_kernel_thread(process):
        return _KERNEL_THREADS
    path = process.executable.removesuffix(_DELETED)
    # What runs from no file, as runc does, is called by a random name.
    name = "" if path.startswith(_IN_MEMORY) else PurePath(path).name
    return bounded_text(name or process.name) or _UNKNOWN


def _version(tags: dict[str, str], image: str, digest: str) -> str:
    """Returns the version of a service: what its label says, else its image's tag, or digest."""
    labelled = bounded_text(tags.get(_VERSION_LABEL, ""))
    if labelled:
        return labelled
    name, _, image_digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if image.startswith("sha256:"):  # an image without a name
        tag, image_digest = "", image
    if tag:
        return bounded_text(tag)
    digest = (image_digest or digest).rpartition("sha256:")[2]
    return bounded_text(digest[:_SHORT_ID_CHARACTERS])


def _may_be_extra(name: str) -> bool:
    # Back-ends write "_" for whatever else is not a letter or a digit.
    word = re.sub(r"[^a-z0-9]", "_", name.lower())
    if word in _OWN_NAMES or word.startswith(_OWN_PREFIXES):
        return False
    return _EXTRA_NAME.fullmatch(name) is not None
