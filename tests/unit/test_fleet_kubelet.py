# SPDX-License-Identifier: Apache-2.0
"""A kubelet that tells its pods, as one does on the wire, and ones that do not."""

from __future__ import annotations

import itertools
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.fleet.kubelet import Kubelet, KubeletSettings, PodWatch
from aiflame.agent.fleet.pods import KubeletError, PodList, parse_pods
from hypothesis import given
from hypothesis import strategies as st
from support import wait_until

_IDS = [f"{number:x}" * 64 for number in range(1, 9)]
_UID = "0f9cdd5e-8d1c-4d5a-9d5f-6a4b1ad0c9ab"


def _item(name: str, **changes: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "prod",
        "uid": f"uid of {name}",
        "creationTimestamp": "2026-11-20T10:00:00Z",
        "labels": {"app": "shop"},
        **changes.pop("metadata", {}),
    }
    return {"metadata": metadata, "spec": {"nodeName": "node-1"}, **changes}


def _status(container_id: str, name: str = "web") -> dict[str, Any]:
    return {
        "name": name,
        "state": {"running": {"startedAt": "2026-11-20T10:00:03Z"}},
        "lastState": {},
        "ready": True,
        "restartCount": 0,
        "image": "registry.example/shop:1.7",
        "imageID": "registry.example/shop@sha256:" + "ab" * 32,
        "containerID": f"containerd://{container_id}",
    }


def _owned(kind: str, name: str) -> list[dict[str, Any]]:
    return [{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "x", "controller": True}]


def _answer(*items: Any) -> bytes:
    pods = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [*items]}
    return json.dumps(pods).encode()


def test_all_kinds_of_containers_of_a_pod() -> None:
    restarted = _status(_IDS[2])
    restarted["lastState"] = {"terminated": {"exitCode": 1, "containerID": f"cri-o://{_IDS[3]}"}}
    status = {
        "phase": "Running",
        "containerStatuses": [restarted, {"name": "waiting", "state": {"waiting": {}}}],
        "initContainerStatuses": [_status(_IDS[4], "setup")],
        "ephemeralContainerStatuses": [_status(_IDS[5], "debug")],
    }
    found = parse_pods(_answer(_item("shop-1", status=status)))
    roles = {key: (each.name, each.role) for key, each in found.containers.items()}
    assert roles == {
        _IDS[2]: ("web", ""),
        _IDS[3]: ("web", ""),
        _IDS[4]: ("setup", "init"),
        _IDS[5]: ("debug", "ephemeral"),
    }
    container = found.containers[_IDS[2]]
    assert container.image == "registry.example/shop:1.7"
    assert container.digest.endswith("ab" * 32)
    assert (container.pod.namespace, container.pod.name) == ("prod", "shop-1")
    assert (container.pod.node, container.pod.labels) == ("node-1", (("app", "shop"),))


@pytest.mark.parametrize(
    ("kind", "owner", "labels", "workload"),
    [
        ("ReplicaSet", "shop-7d9f8b6c5d", {"pod-template-hash": "7d9f8b6c5d"},
         ("Deployment", "shop")),
        ("ReplicaSet", "shop-7d9f8b6c5d", {}, ("ReplicaSet", "shop-7d9f8b6c5d")),
        ("ReplicaSet", "shop", {"pod-template-hash": ""}, ("ReplicaSet", "shop")),
        ("ReplicaSet", "shop-1", {"pod-template-hash": "2"}, ("ReplicaSet", "shop-1")),
        ("Job", "backup-28391040", {}, ("CronJob", "backup")),
        ("Job", "backup-1700000000", {}, ("CronJob", "backup")),
        ("Job", "backup-2024", {}, ("Job", "backup-2024")),
        ("StatefulSet", "db", {}, ("StatefulSet", "db")),
        ("DaemonSet", "agent", {}, ("DaemonSet", "agent")),
        ("Node", "node-1", {}, ("", "")),
        ("Workflow", "train", {}, ("Workflow", "train")),
    ],
)  # fmt: skip
def test_what_made_a_pod(
    kind: str, owner: str, labels: dict[str, str], workload: tuple[str, str]
) -> None:
    metadata = {"ownerReferences": _owned(kind, owner), "labels": labels}
    (pod,) = parse_pods(_answer(_item("p", metadata=metadata))).pods.values()
    assert (pod.workload_kind, pod.workload) == workload


def test_a_static_pod_is_found_by_both_of_its_uids() -> None:
    own = {"kubernetes.io/config.hash": "5d41402abc4b2a76"}

    def item(name: str, uid: str, source: str) -> object:
        annotations = {**own, "kubernetes.io/config.source": source}
        return _item(name, metadata={"uid": uid, "annotations": annotations})

    # GIVEN one, and before it in the list a pod of somebody's that claims to be it
    claims, static = item("mine", "0-1-2", "api"), item("etcd-node-1", _UID, "file")
    found = parse_pods(_answer(claims, static))
    assert {uid: pod.name for uid, pod in found.pods.items()} == {
        "0-1-2": "mine",
        _UID: "etcd-node-1",
        "5d41402abc4b2a76": "etcd-node-1",
    }


@pytest.mark.parametrize(
    "answer",
    [b"", b"{", b"[]", b"null", b'"items"', b"{}", b"[" * 100_000, b"\xff", b"9" * 100_000],
)
def test_what_is_no_list_of_pods(answer: bytes) -> None:
    with pytest.raises(KubeletError):
        parse_pods(answer)


def test_what_is_odd_in_a_list_costs_itself_only() -> None:
    odd = [None, 7, [], {}, {"metadata": []}, _item(""), _item("x", metadata={"uid": 5})]
    statuses = [None, [], {"containerID": 5}, {"containerID": "docker://x"}, _status("A" * 64)]
    status = {"containerStatuses": [*statuses, _status(_IDS[1])], "initContainerStatuses": "x"}
    many = {"labels": {f"l{n}": "x" for n in range(5000)}, "annotations": {"big": "x" * 100_000}}
    found = parse_pods(_answer(*odd, _item("good", status=status, metadata=many)))
    assert found.containers.keys() == {_IDS[1]}
    (pod,) = found.pods.values()
    assert (len(pod.labels), pod.annotations) == (128, ())
    assert parse_pods(b'{"items": null}') == PodList()


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["metadata", "status", "spec", "containerStatuses", "containerID", "labels",
                 "ownerReferences", "name", "namespace", "uid", "lastState", "controller", "kind"]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
)  # fmt: skip


@given(st.lists(_JSON, max_size=4))
def test_any_list_is_read(items: list[Any]) -> None:
    assert isinstance(parse_pods(_answer(*items, _item("good"))).pods["uid of good"].name, str)


def test_a_full_node_is_read_quickly() -> None:
    status = {"containerStatuses": [_status("a" * 60 + f"{n:04x}", "c") for n in range(20)]}
    filler = {"annotations": {"last-applied": "x" * 40_000}}
    answer = _answer(*(_item(f"p{n}", status=status, metadata=filler) for n in range(500)))
    begun = time.process_time()
    parse_pods(answer)
    # 25 MB take 0.1 s; other threads wait for that.
    assert time.process_time() - begun < 3


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and a kubelet's certificate that it has signed."""
    folder = tmp_path_factory.mktemp("authority")
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    ca = f"{made} -subj /CN=kubernetes -keyout ca.key -out ca.crt"
    kubelet = (
        f"{made} -subj /O=system:nodes/CN=system:node:node-1 -keyout kubelet.key -out kubelet.crt"
        " -CA ca.crt -CAkey ca.key -addext subjectAltName=IP:127.0.0.1"
        " -addext basicConstraints=critical,CA:FALSE"
    )
    for command in (ca, kubelet, ca.replace("ca.", "other.")):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    (folder / "token").write_text("first\n")
    return folder


class _Served:
    """What a stand-in answers, and what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] = _answers(200, _answer())


def _answers(status: int, body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def _kubelet(authority: Path, served: _Served) -> Iterator[KubeletSettings]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append((self.path, self.headers["Authorization"]))
            served.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def finish_request(self, request: Any, client_address: Any) -> None:
            with context.wrap_socket(request, server_side=True) as connection:
                super().finish_request(connection, client_address)

        def handle_error(self, *_: object) -> None:
            pass  # whoever asked has gone

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "kubelet.crt", authority / "kubelet.key")
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield KubeletSettings(
                "127.0.0.1", server.server_port, authority / "token", authority / "ca.crt"
            )
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served() -> _Served:
    return _Served()


@pytest.fixture
def kubelet(authority: Path, served: _Served) -> Iterator[KubeletSettings]:
    with _kubelet(authority, served) as settings:
        yield settings


def test_pods_are_asked_for_with_the_token_of_the_moment(
    kubelet: KubeletSettings, served: _Served, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    settings = replace(kubelet, token_file=token)
    status = {"containerStatuses": [_status(_IDS[0])]}
    served.answer = _answers(200, _answer(_item("shop-1", status=status)))
    for words in ("first\n", "second"):
        token.write_text(words)
        assert Kubelet(settings).fetch().containers[_IDS[0]].pod.name == "shop-1"
    assert served.requests == [("/pods", "Bearer first"), ("/pods", "Bearer second")]


def test_a_kubelet_of_another_authority_gets_no_token(
    kubelet: KubeletSettings, served: _Served, authority: Path
) -> None:
    for settings in (
        replace(kubelet, ca_file=authority / "other.crt"),
        replace(kubelet, host="localhost"),  # its certificate is for another name
        replace(kubelet, ca_file=authority / "none.crt"),
        replace(kubelet, token_file=authority / "none"),
    ):
        with pytest.raises(KubeletError):
            Kubelet(settings).fetch()
    assert served.requests == []
    # Unless the configuration says so.
    settings = replace(kubelet, ca_file=authority / "none.crt", skip_verify=True)
    assert Kubelet(settings).fetch() == PodList()


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX-Evil: 1", "\x00", "é"])
def test_a_token_that_is_none_is_not_sent(
    kubelet: KubeletSettings, served: _Served, tmp_path: Path, token: str
) -> None:
    (tmp_path / "token").write_text(token, newline="")
    with pytest.raises(KubeletError, match="no token"):
        Kubelet(replace(kubelet, token_file=tmp_path / "token")).fetch()
    assert served.requests == []


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "401: is the token"), (403, "`get` of `nodes/pods`"), (500, "500"), (301, "301")],
)
def test_a_refusal_says_what_to_do(
    kubelet: KubeletSettings, served: _Served, status: int, words: str
) -> None:
    served.answer = _answers(status, b"first first first")
    with pytest.raises(KubeletError, match=words) as refusal:
        Kubelet(kubelet).fetch()
    assert "first" not in str(refusal.value)


def test_an_answer_is_bounded_in_size_and_time(kubelet: KubeletSettings, served: _Served) -> None:
    served.answer = _answers(200, b" " * 100_001)
    with pytest.raises(KubeletError, match="larger than 100000 bytes"):
        Kubelet(kubelet, max_bytes=100_000).fetch()
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not ended.wait(0.01):
            handler.wfile.write(b" ")

    served.answer = drip
    begun = time.monotonic()
    try:
        with pytest.raises(KubeletError, match="longer than"):
            Kubelet(kubelet, answer_s=0.2).fetch()
    finally:
        ended.set()
    assert time.monotonic() - begun < 5
    silent = threading.Event()
    served.answer = lambda _: (silent.wait(10), None)[1]
    try:
        with pytest.raises(KubeletError, match="timed out"):
            Kubelet(kubelet, step_s=0.2).fetch()
    finally:
        silent.set()


def test_nobody_is_there() -> None:
    settings = KubeletSettings("127.0.0.1", 1, Path("/dev/null"), Path("/dev/null"), True)
    with pytest.raises(KubeletError):
        Kubelet(settings).fetch()


class _Told:
    """Answers in turn; the last one again and again."""

    def __init__(self, *answers: PodList | str) -> None:
        self._answers = [*answers]
        self.times: list[float] = []

    def __call__(self) -> PodList:
        self.times.append(time.monotonic())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, str):
            raise KubeletError(answer)
        return answer


_SOME = parse_pods(_answer(_item("shop-1", status={"containerStatuses": [_status(_IDS[0])]})))


def test_an_unknown_container_is_asked_for_at_once_but_not_all_the_time() -> None:
    told = _Told(PodList(), _SOME)
    watch = PodWatch(told, poll_s=600, asked_s=0.1)
    watch.start()
    try:
        wait_until(lambda: watch.answers == 1)
        # WHEN many ask
        begun = time.monotonic()
        while watch.answers < 4:
            watch.ask()
            time.sleep(0.001)
        # THEN they have answers long before the next poll, and the kubelet has its pauses
        assert 0.25 < time.monotonic() - begun < 60
        assert watch.pods == _SOME
    finally:
        watch.stop()


def test_it_is_asked_again_before_an_answer_is_old() -> None:
    watch = PodWatch(_Told(_SOME), poll_s=0.05, asked_s=0.01)
    watch.start()
    wait_until(lambda: watch.answers > 2)
    watch.stop()


def test_after_failures_it_waits_twice_as_long_each_time_and_keeps_what_it_knows() -> None:
    told = _Told(_SOME, *("not now",) * 4, PodList())
    watch = PodWatch(told, poll_s=0.01, asked_s=0.01, back_off_s=0.02)
    watch.start()
    try:
        wait_until(lambda: watch.failures > 0)
        assert watch.pods == _SOME
        wait_until(lambda: watch.failures == 4 and watch.answers > 1)
        assert (watch.pods, watch.error) == (PodList(), "")
        pauses = [after - before for before, after in itertools.pairwise(told.times[1:6])]
        assert all(p > least for p, least in zip(pauses, (0.02, 0.04, 0.08, 0.16), strict=True))
    finally:
        watch.stop()


@pytest.mark.parametrize("host", ["a..b", "x" * 80])
def test_a_name_that_is_none_is_an_answer_as_any_other(kubelet: KubeletSettings, host: str) -> None:
    with pytest.raises(KubeletError, match=host):
        Kubelet(replace(kubelet, host=host)).fetch()


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), RuntimeError("odd")])
def test_no_error_ends_who_asks(error: Exception) -> None:
    # GIVEN a kubelet that is there after errors that nobody has foreseen
    answers = iter([error, error])

    def fetch() -> PodList:
        if (one := next(answers, None)) is not None:
            raise one
        return _SOME

    watch = PodWatch(fetch, back_off_s=0.01)
    watch.start()
    # THEN it is asked again, and what was wrong was counted
    wait_until(lambda: watch.answers == 1)
    assert watch.failures == 2 and watch.pods is _SOME and watch.error == ""
    watch.stop()


def test_whoever_asks_does_not_wait_for_a_kubelet_that_hangs() -> None:
    hung = threading.Event()

    def hang() -> PodList:
        hung.wait(30)
        return _SOME

    watch = PodWatch(hang)
    watch.start()
    begun = time.monotonic()
    for _ in range(1000):
        watch.ask()
        assert watch.pods == PodList()
    watch.stop(0.05)
    assert time.monotonic() - begun < 5
    hung.set()
