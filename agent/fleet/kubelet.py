# SPDX-License-Identifier: Apache-2.0
"""Pods of this node, as its kubelet tells them, asked by a thread of their own.

`GET https://NODE:10250/pods` answers with a v1.PodList of this node's pods only: no list of a whole
cluster, no watch. It takes the right to `get` `nodes/pods` (KEP-2862: on by default from v1.33;
before that `nodes/proxy`, which also lets one run commands in every container). Fields: the
published OpenAPI of core/v1 (Pod, ContainerStatus, ObjectMeta, OwnerReference). What pods are
labelled with was chosen by whoever may make pods in their namespace.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SECRETS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PORT = 10250
_PATH = "/pods"

# An API server gives objects of 1.5 MB at most, and a pod has some 10 KB: 500 pods of 60 KB.
MAX_ANSWER_BYTES = 32 << 20
_CHUNK_BYTES = 1 << 16
# A projected token has 1 KB.
_MAX_TOKEN_BYTES = 1 << 16
# RFC 6750: what a bearer token is made of. A line break would begin another header.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")

# How old an answer may get; how soon an unknown container may have it asked again; and after
# failures, twice as long each time.
_POLL_S, _ASKED_S, _BACK_OFF_S, _MOST_BACK_OFF_S = 30.0, 2.0, 1.0, 60.0
# For one step of the network, and for all of an answer.
_STEP_S, _ANSWER_S = 5.0, 20.0

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


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """How to reach the kubelet.

    Attributes:
        host: The node's address.
        port: Of the authenticated endpoint.
        token_file: Read anew for each request, since tokens rotate.
        ca_file: Whom to trust. The kubelet's certificate is of the cluster's CA only where
            `serverTLSBootstrap` is set; else it is signed by itself.
        skip_verify: Trust whoever answers there, and send the token to it.
    """

    host: str
    port: int = _PORT
    token_file: Path = _SECRETS / "token"
    ca_file: Path = _SECRETS / "ca.crt"
    skip_verify: bool = False


class Kubelet:
    """Asks a kubelet for its pods.

    Args:
        settings: Where it is.
        step_s: How long one step of the network may take.
        answer_s: How long all of it may take.
        max_bytes: The largest answer that is taken.
    """

    def __init__(
        self,
        settings: KubeletSettings,
        step_s: float = _STEP_S,
        answer_s: float = _ANSWER_S,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._settings = settings
        self._step_s, self._answer_s, self._max_bytes = step_s, answer_s, max_bytes

    def fetch(self) -> PodList:
        """Returns the pods of this node.

        Raises:
            KubeletError: As it says.
        """
        deadline = time.monotonic() + self._answer_s
        try:
            answer = self._get(deadline)
        except (OSError, http.client.HTTPException) as error:
            words = str(error) or type(error).__name__
            raise KubeletError(f"https://{self._settings.host}{_PATH}: {words}") from error
        return parse_pods(answer)

    def _get(self, deadline: float) -> bytes:
        settings = self._settings
        connection = http.client.HTTPSConnection(
            settings.host, settings.port, timeout=self._step_s, context=self._trust()
        )
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        with contextlib.closing(connection):
            connection.request("GET", _PATH, headers=headers)
            with connection.getresponse() as response:
                return self._read(response, deadline)

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        if response.status != http.HTTPStatus.OK:
            raise KubeletError(_refusal(response.status))
        parts, size = [], 0
        # read1: each step returns what has come, so that no server can make one last.
        while chunk := response.read1(_CHUNK_BYTES):
            size += len(chunk)
            if size > self._max_bytes:
                raise KubeletError(f"the answer is larger than {self._max_bytes} bytes")
            if time.monotonic() > deadline:
                raise KubeletError(f"the answer took longer than {self._answer_s:g} s")
            parts.append(chunk)
        return b"".join(parts)

    def _trust(self) -> ssl.SSLContext:
        if self._settings.skip_verify:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            context = ssl.create_default_context(cafile=self._settings.ca_file)
            # CAs of many clusters have no key identifiers, which Python asks for from 3.13 on.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            return context
        except OSError as error:
            raise KubeletError(f"no CA: {self._settings.ca_file}: {error.strerror}") from error

    def _token(self) -> str:
        path = self._settings.token_file
        try:
            with path.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise KubeletError(f"no token in {path}: {error.strerror}") from error
        if not _TOKEN.fullmatch(token):
            raise KubeletError(f"no token in {path}")
        return token


def _refusal(status: int) -> str:
    cure = {401: ": is the token of this cluster?", 403: ": needs `get` of `nodes/pods`"}
    return f"the kubelet answered {status}{cure.get(status, '')}"


class PodWatch:
    """Keeps the pods of this node, in a thread of its own: whoever asks is answered at once.

    Args:
        fetch: Returns them, or raises KubeletError.
        poll_s: How old an answer may get.
        asked_s: How soon after an answer it is asked again for one that is unknown.
        back_off_s: How long it waits after the first failure, then twice as long each time.

    Attributes:
        error: Why it has no newer pods, "" if it has.
        answers: How often it was told them.
        failures: How often it was not.
    """

    def __init__(
        self,
        fetch: Callable[[], PodList],
        poll_s: float = _POLL_S,
        asked_s: float = _ASKED_S,
        back_off_s: float = _BACK_OFF_S,
    ) -> None:
        self._fetch = fetch
        self._poll_s, self._asked_s, self._back_off_s = poll_s, asked_s, back_off_s
        self._list = PodList()
        self._wakes = threading.Condition()
        self._is_asked = self._is_stopped = False
        self.error = ""
        self.answers = self.failures = 0
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the thread; one that waits for the network is left to end with the process."""
        with self._wakes:
            self._is_stopped = True
            self._wakes.notify()
        self._thread.join(timeout_s)

    def ask(self) -> None:
        """Has the kubelet asked soon: there is a container that it did not tell of."""
        with self._wakes:
            self._is_asked = True
            self._wakes.notify()

    @property
    def pods(self) -> PodList:
        """What was said last."""
        return self._list

    def _run(self) -> None:
        failed = 0
        while not self._is_stopped:
            if self._has_fetched():
                failed = 0
                self._wait(self._asked_s, self._poll_s)
            else:
                wait_s = min(self._back_off_s * 2 ** min(failed, 16), _MOST_BACK_OFF_S)
                failed += 1
                self._wait(wait_s, wait_s)

    def _has_fetched(self) -> bool:
        try:
            self._list = self._fetch()
        except KubeletError as error:
            self.failures += 1
            self.error = str(error)
            return False
        self.answers += 1
        self.error = ""
        return True

    def _wait(self, least_s: float, most_s: float) -> None:
        """Waits as long as that, and between the two only until somebody asks."""
        begun = time.monotonic()
        with self._wakes:
            # A question from before the answer came may be about what is in it: it is asked again.
            self._wakes.wait_for(lambda: self._is_stopped, least_s)
            left_s = most_s - (time.monotonic() - begun)
            self._wakes.wait_for(lambda: self._is_stopped or self._is_asked, max(left_s, 0))
            self._is_asked = False
