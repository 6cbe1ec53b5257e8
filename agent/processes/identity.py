# SPDX-License-Identifier: Apache-2.0
"""Who a process is by its cgroup: container, container engine, systemd unit, Kubernetes pod.

Engines and systemd name cgroups after what runs in them, so a path tells without asking anybody.
Users can make cgroups of any name below those that are delegated to them: a path is bounded, and
what it tells is what its process claims to be.

Forms of paths: Kubernetes' pkg/kubelet/cm (cgroupfs and systemd drivers), moby's
daemon/oci_linux.go, podman's libpod/container_internal_linux.go, LXC's cgroup layout (lxc.payload
since 4.0), systemd's src/basic/cgroup-util.c. Format of /proc/PID/cgroup: cgroups(7).
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# The kernel writes no longer path (PATH_MAX, proc_cgroup_show in kernel/cgroup/cgroup.c).
_MAX_PATH_CHARACTERS = 4096
# Kubernetes in a container, with systemd and users in its own containers, is 15 deep. Without a
# bound, a path of 2,000 groups that all look like units takes milliseconds.
_MAX_DEPTH = 32
# Many processes share a path. Of the longest ones, these take 32 MB.
_CACHED_PATHS = 256
# What the kernel appends to the path of a process whose cgroup was removed (same function).
REMOVED = " (deleted)"

# What stands for groups above the reader's cgroup namespace (cgroup_namespaces(7)).
ABOVE = re.compile(r"(?:/\.\.)+(?=/|\Z)")
# A user's own, with its uid; all below it may be made by that user.
USER_SLICE = re.compile(r"/user\.slice/user-(\d{1,10})\.slice(?=/|\Z)")
# Units that run containers in cgroups below their own.
ENGINE_UNITS = frozenset(
    f"{name}.service"
    for name in (
        *("containerd", "docker", "crio", "cri-docker", "kubelet", "podman", "buildkit"),
        *("k3s", "k3s-agent", "rke2-server", "rke2-agent", "k0scontroller", "k0sworker"),
        *("snap.docker.dockerd", "snap.microk8s.daemon-containerd", "lxc", "lxd", "incus"),
    )
)
_COMPONENT = re.compile(r"[^/]+")
# All engines that speak OCI give containers 64 hex digits; containerd joins with colons where its
# own cgroup driver meets names that were made for systemd's.
_OCI_GROUP = re.compile(r"(?:(?P<prefix>.*)[:-])?(?P<id>[0-9a-f]{64})(?:\.scope)?", re.DOTALL)
# Fargate's: the id of the task and a number, in a group below the task's.
_FARGATE_ID = re.compile(r"([0-9a-f]{32})-[0-9]{1,10}")
# Steps of a build have groups of their own here, of random names (moby, builder/builder-next).
_BUILD_STEPS = "buildkit"
# With podman's cgroupfs driver: below it are containers, and pods, which have 64 digits, too.
_PODMAN_FOLDER = "libpod_parent"
# Talos starts its own services in groups at the top, without systemd (machinery/constants.go).
_TALOS_SERVICE = re.compile(r"/(?:podruntime|system)/([a-z0-9-]{1,64})")
# conmon watches over a container of podman or CRI-O from a cgroup of its own.
_MONITOR_SUFFIX = "conmon"
_LXC_PREFIX = "lxc.payload."
# Before LXC 4.0 containers were sub-groups of these.
_LXC_FOLDERS = ("lxc", "lxc.payload")
# systemd-nspawn puts the container into a sub-group of its unit, itself into "supervisor".
_NSPAWN_UNIT = re.compile(r"(?:machine-(.+)\.scope|systemd-nspawn@(.+)\.service)")
_NSPAWN_PAYLOAD = "payload"
# A name of machined's is a host name; what is no letter, digit, ":", "_" or "." is escaped in the
# names of units (systemd.unit(5)).
_UNIT_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_MACHINE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# systemd.unit(5): the characters of a name, at most 255 with its type.
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,247}\.(?:service|scope)")
# The uid of a static pod is a hash without dashes; systemd's driver writes "_" for "-".
_POD = re.compile(
    r"(?:^|-)pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice(?::|\Z)|\Z)"
)


class Engine(enum.Enum):
    """What runs a container, by the name that its users know."""

    DOCKER = "docker"
    CONTAINERD = "containerd"
    CRI_O = "cri-o"
    PODMAN = "podman"
    LXC = "lxc"
    NSPAWN = "systemd-nspawn"


_ENGINE_OF_PREFIX = {
    "docker": Engine.DOCKER,
    "cri-containerd": Engine.CONTAINERD,
    "nerdctl": Engine.CONTAINERD,
    "crio": Engine.CRI_O,
    "libpod": Engine.PODMAN,
    "libpod-payload": Engine.PODMAN,  # podman run --cgroups=split, as its units use it
}
# The cgroupfs driver of docker; that of the kubelet does not tell.
_ENGINE_OF_FOLDER = {"docker": Engine.DOCKER}


@dataclass(frozen=True, slots=True)
class Container:
    """A container on a cgroup path.

    Attributes:
        id: 64 hex digits; on Fargate 32, "-" and a number; "" where the engine has only names.
        name: Where the path has it; engines with ids keep names elsewhere (container_names).
        engine: None where the path does not tell.
        path: Of the container's own cgroup; those below it are the container's, too.
    """

    id: str
    name: str
    engine: Engine | None
    path: str


@dataclass(frozen=True, slots=True)
class Unit:
    """A systemd unit on a cgroup path: its name with its type, and the path of its cgroup.

    Talos has services without a type.
    """

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What a cgroup path tells.

    Attributes:
        containers: From the outermost to the innermost.
        units: Services and scopes; the first may be the host's, others are of users' managers, or
            of a systemd in a container.
        pod_uid: Of a Kubernetes pod, with dashes if it is a UUID, or "".
    """

    containers: tuple[Container, ...]
    units: tuple[Unit, ...]
    pod_uid: str

    @property
    def container_id(self) -> str:
        """Id of the innermost container that has one, or ""."""
        return next((c.id for c in reversed(self.containers) if c.id), "")


@dataclass(frozen=True, slots=True)
class CgroupPaths:
    """The cgroups of a process: one path of v2, and one of each v1 hierarchy.

    Attributes:
        unified: "" where v2 is not mounted, "/" where it does not group processes.
        legacy: By the controllers of the hierarchy, as in "cpu,cpuacct" or "name=systemd".
    """

    unified: str
    legacy: dict[str, str]

    @property
    def telling(self) -> str:
        """The path that tells most: a container's, else that of v2, else systemd's, else any."""
        deepest_first = sorted(dict.fromkeys(self.legacy.values()), key=len, reverse=True)
        # Where both are in use, an engine may group by v1 alone, and its containers are in the
        # engine's own unit by v2.
        for path in (self.unified, *deepest_first):
            if identity_of(path).containers:
                return path
        for path in (self.unified, self.legacy.get("name=systemd", ""), *deepest_first):
            if path not in ("", "/"):
                return path
        return self.unified or next(iter(deepest_first), "")


def cgroup_paths(lines: Iterable[str]) -> CgroupPaths:
    """Reads the lines of a /proc/PID/cgroup; those that are none are left out."""
    unified, legacy = "", {}
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if hierarchy == "0" and not controllers:
            unified = path
        else:
            legacy[controllers] = path
    return CgroupPaths(unified, legacy)


@functools.lru_cache(_CACHED_PATHS)
def identity_of(path: str) -> Identity:
    """Returns what a cgroup path tells; nothing is read."""
    path = path.removesuffix(REMOVED)[:_MAX_PATH_CHARACTERS]
    containers: list[Container] = []
    units: list[Unit] = []
    pod_uid = ""
    above = ""
    for name, group in itertools.islice(_groups(path), _MAX_DEPTH):
        container = _container(name, above, group)
        if container is not None and not _is_known(container, containers):
            containers.append(container)
        # systemd puts "_" before a name that the kernel's own files could have.
        unit = name.removeprefix("_")
        if _UNIT.fullmatch(unit):
            units.append(Unit(unit, group))
        talos = _TALOS_SERVICE.fullmatch(group)
        if talos is not None:
            units.append(Unit(talos[1], group))
        pod = _POD.search(name)
        if pod is not None:
            pod_uid = pod[1].replace("_", "-")
        above = name
    return Identity(tuple(containers), tuple(units), pod_uid)


def _groups(path: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the path of each cgroup on a path, from the outermost on."""
    for component in _COMPONENT.finditer(path):
        # As seen from another cgroup namespace a path begins with some of these.
        if component[0] != "..":
            yield component[0], path[: component.end()]


def _is_known(container: Container, known: list[Container]) -> bool:
    """Whether a sub-group of a container has the container's id once more."""
    return bool(container.id) and any(container.id == other.id for other in known)


def _container(name: str, above: str, path: str) -> Container | None:
    oci = _OCI_GROUP.fullmatch(name)
    if oci is not None:
        prefix = (oci["prefix"] or "").rpartition(":")[2]
        if prefix.endswith(_MONITOR_SUFFIX) or (above == _PODMAN_FOLDER and not prefix):
            return None
        engine = _ENGINE_OF_PREFIX.get(prefix) if prefix else _ENGINE_OF_FOLDER.get(above)
        return Container(oci["id"], "", engine, path)
    fargate = _FARGATE_ID.fullmatch(name)
    if fargate is not None and above == fargate[1]:
        return Container(name, "", None, path)
    if name == _BUILD_STEPS and above in _ENGINE_OF_FOLDER:
        return Container("", name, _ENGINE_OF_FOLDER[above], path)
    if name == _NSPAWN_PAYLOAD:
        return _nspawn(above, path)
    if name.startswith(_LXC_PREFIX):
        name, above = name.removeprefix(_LXC_PREFIX), _LXC_FOLDERS[0]
    if above in _LXC_FOLDERS and name:
        return Container("", name, Engine.LXC, path)
    return None


def _nspawn(unit: str, path: str) -> Container | None:
    found = _NSPAWN_UNIT.fullmatch(unit)
    if found is None:
        return None
    name = _UNIT_ESCAPE.sub(lambda code: chr(int(code[1], 16)), found[1] or found[2])
    return Container("", name, Engine.NSPAWN, path) if _MACHINE_NAME.fullmatch(name) else None


def whole_path(path: str) -> str:
    """Returns a path without what stands for groups above the reader's cgroup namespace."""
    above = ABOVE.match(path)
    return path if above is None else path[above.end() :]


def is_made_by_engine(container: Container, identity: Identity) -> bool:
    """Whether an engine named a container's cgroup, and not a service that one is delegated to.

    Args:
        container: On no path of a user's.
        identity: What else its path tells.
    """
    above = [unit for unit in identity.units if container.path.startswith(f"{unit.path}/")]
    if container.engine is Engine.NSPAWN:
        # Its group is in a unit that is named after it.
        return len(above) == 1
    return all(unit.name in ENGINE_UNITS for unit in above)
