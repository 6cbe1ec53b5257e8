# SPDX-License-Identifier: Apache-2.0
"""Pods of a node, and what a kubelet says of them.

Fields: the published OpenAPI of core/v1 (Pod, ContainerStatus, ObjectMeta, OwnerReference). What
pods are labelled with was chosen by whoever may make pods in their namespace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Kubernetes allows 253 characters in names, 63 in values of labels, and any annotation.
_MAX_NAME, _MAX_VALUE = 253, 256
# Of a pod, each; real ones have a dozen.
_MAX_TAGS = 128
_MAX_PODS = 4096
_MAX_CONTAINERS = 16384

_ID = re.compile(r"[a-z0-9.-]+://([0-9a-f]{64})")
# The name of a CronJob's Job ends in the minute for which it was made (v1.21; seconds before).
_CRON_JOB = re.compile(r"(.+)-(?:[0-9]{8}|[0-9]{10})")
_STATIC_SOURCES = ("file", "http")
_HASH_LABEL = "pod-template-hash"
_CONTAINER_LISTS = {
    "containerStatuses": "",
    "initContainerStatuses": "init",
    "ephemeralContainerStatuses": "ephemeral",
}

Tags = tuple[tuple[str, str], ...]


class KubeletError(Exception):
    """The kubelet did not tell its pods. The message says why, without the token."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node.

    Attributes:
        namespace: Where it is.
        name: In that.
        uid: Of the API's object; cgroups of a static pod are named after another.
        node: This one.
        workload: What made it: the Deployment of a ReplicaSet, the CronJob of a Job.
        workload_kind: For instance "Deployment"; "" if nothing made it.
        labels, annotations: As its makers chose them, those of a bounded length.
    """

    namespace: str
    name: str
    uid: str
    node: str = ""
    workload: str = ""
    workload_kind: str = ""
    labels: Tags = ()
    annotations: Tags = ()


@dataclass(frozen=True, slots=True)
class PodContainer:
    """A container of a pod.

    Attributes:
        pod: Its pod.
        name: In that.
        image: As the runtime resolved it, mostly a name with a tag.
        digest: Of the image, "" where it is not told.
        role: "init", "ephemeral", or "" for all others.
    """

    pod: Pod
    name: str
    image: str
    digest: str
    role: str


@dataclass(frozen=True, slots=True)
class PodList:
    """What a kubelet said: containers by their ids, pods by the uids of their cgroups."""

    containers: Mapping[str, PodContainer] = field(default_factory=dict)
    pods: Mapping[str, Pod] = field(default_factory=dict)


def parse_pods(answer: bytes) -> PodList:
    """Reads a v1.PodList; what is odd in it is left out.

    Raises:
        KubeletError: It is none.
    """
    try:
        items = json.loads(answer)["items"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise KubeletError("the answer is no list of pods") from error
    containers: dict[str, PodContainer] = {}
    pods: dict[str, Pod] = {}
    # `null` is what Go makes of an empty list.
    for item in _list(items)[:_MAX_PODS]:
        pod = _pod(item)
        if pod is None:
            continue
        pods[pod.uid] = pod
        pods.setdefault(_hash_of_static(pod) or pod.uid, pod)
        for container_id, container in _containers(pod, item):
            if len(containers) < _MAX_CONTAINERS:
                containers[container_id] = container
    return PodList(containers, pods)


def _pod(item: Any) -> Pod | None:
    metadata = _map(_map(item).get("metadata"))
    namespace, name, uid = (_text(metadata, key) for key in ("namespace", "name", "uid"))
    if not (namespace and name and uid):
        return None
    labels, annotations = _tags(metadata.get("labels")), _tags(metadata.get("annotations"))
    kind, workload = _workload(metadata, dict(labels))
    node = _text(_map(_map(item).get("spec")), "nodeName")
    return Pod(namespace, name, uid, node, workload, kind, labels, annotations)


def _hash_of_static(pod: Pod) -> str:
    """Returns the hash of a static pod's configuration, which its cgroup has for a uid, or "".

    Whoever makes a pod may claim any hash. Where it comes from, the kubelet says itself, whatever
    was there (pkg/kubelet/config/config.go, updatePodsFunc).
    """
    told = dict(pod.annotations)
    if told.get("kubernetes.io/config.source") not in _STATIC_SOURCES:
        return ""
    return told.get("kubernetes.io/config.hash", "")


def _workload(metadata: Mapping[str, Any], labels: Mapping[str, str]) -> tuple[str, str]:
    """Returns kind and name of what made a pod; there is no asking who made that."""
    owners = [_map(owner) for owner in _list(metadata.get("ownerReferences"))]
    owner = next((each for each in owners if each.get("controller") is True), {})
    kind, name = _text(owner, "kind"), _text(owner, "name")
    suffix = f"-{labels.get(_HASH_LABEL, '')}"
    if kind == "ReplicaSet" and len(suffix) > 1 and name.endswith(suffix):
        return "Deployment", name.removesuffix(suffix)
    of_cron_job = _CRON_JOB.fullmatch(name) if kind == "Job" else None
    if of_cron_job is not None:
        return "CronJob", of_cron_job[1]
    # The kubelet itself runs static pods, and calls their node the owner.
    return ("", "") if kind == "Node" or not name else (kind, name)


def _containers(pod: Pod, item: Any) -> Iterator[tuple[str, PodContainer]]:
    status = _map(_map(item).get("status"))
    for key, role in _CONTAINER_LISTS.items():
        for each in map(_map, _list(status.get(key))):
            # Also of the one before, whose samples may still come.
            states = [each, *map(_map, _map(each.get("lastState")).values())]
            image, digest = _text(each, "image"), _text(each, "imageID")
            found = PodContainer(pod, _text(each, "name"), image, digest, role)
            for state in states:
                container_id = _ID.fullmatch(_text(state, "containerID"))
                if container_id is not None:
                    yield container_id[1], found


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Mapping[str, Any], key: str) -> str:
    found = value.get(key)
    # Names of images may be longer than those of objects.
    return found if isinstance(found, str) and len(found) <= 2 * _MAX_NAME else ""


def _tags(value: Any) -> Tags:
    found = [
        (key, text)
        for key, text in sorted(_map(value).items())
        if isinstance(text, str) and len(text) <= _MAX_VALUE and len(key) <= 2 * _MAX_NAME
    ]
    return tuple(found[:_MAX_TAGS])
