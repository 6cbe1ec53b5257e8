# SPDX-License-Identifier: Apache-2.0
"""Which processes a request for a capture means, and what is said where that is not clear."""

from __future__ import annotations

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.capture_choice import Choice, choose, directory_of
from aiflame.agent.fleet.capture_request import CaptureRequest
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Process

_WEB, _OTHER, _JOB = "a1" * 32, "a2" * 32, "b3" * 32
_UIDS = ["0f3c4e1e-3c5a-4a43-9f4e-000000000001", "0f3c4e1e-3c5a-4a43-9f4e-000000000002"]


def _group(uid: str, container: str) -> str:
    return f"/kubepods/burstable/pod{uid}/{container}"


def _process(pid: int, cgroup: str) -> Process:
    return Process(pid, 1, f"p{pid}", "", "", cgroup, "", 0, None)


_PROCESSES = [
    _process(10, _group(_UIDS[0], _WEB)),
    _process(11, _group(_UIDS[0], _WEB) + "/below"),
    _process(12, _group(_UIDS[0], _OTHER)),
    _process(13, _group(_UIDS[1], _JOB)),
    _process(14, "/system.slice/cron.service"),
    _process(10, "/system.slice/cron.service"),  # the pid was free again
]
_LABELS = [
    Labels("web", _WEB, "app", namespace="shop", pod="web-1", pod_uid=_UIDS[0]),
    Labels("web", _WEB, "app", namespace="shop", pod="web-1", pod_uid=_UIDS[0]),
    Labels("web", _OTHER, "proxy", namespace="shop", pod="web-1", pod_uid=_UIDS[0]),
    Labels("job", _JOB, "app", namespace="night", pod="web-1", pod_uid=_UIDS[1]),
    Labels("cron", unit="cron.service"),
    Labels("cron", unit="cron.service"),
]


def _chosen(**what: str | int) -> Choice:
    request = CaptureRequest(last_ns=1, **what)  # type: ignore[arg-type]
    return choose(request, _PROCESSES, _LABELS)


@pytest.mark.parametrize(
    ("what", "numbers", "group", "stem"),
    [
        ({"is_all": True}, (0, 1, 2, 3, 4, 5), "", "all"),
        ({"pid": 10}, (0, 5), "", "p10-10"),
        ({"cgroup": "/system.slice/cron.service/"}, (4, 5), None, "cgroup-cron.service"),
        ({"cgroup": f"/kubepods/burstable/pod{_UIDS[0]}"}, (0, 1, 2), None, None),
        ({"cgroup": "/kubepods/bur"}, None, None, None),
        ({"container": "proxy"}, (2,), _group(_UIDS[0], _OTHER), "container-proxy"),
        ({"container": _WEB[:12]}, (0, 1), _group(_UIDS[0], _WEB), "container-app"),
        ({"container": "a1a"}, None, None, None),
        ({"container": "app"}, None, None, None),
        ({"container": "app", "pod": "night/web-1"}, (3,), _group(_UIDS[1], _JOB), None),
        ({"pod": "web-1"}, None, None, None),
        ({"pod": "shop/web-1"}, (0, 1, 2), f"/kubepods/burstable/pod{_UIDS[0]}", "pod-web-1"),
        ({"pod": _UIDS[1]}, (3,), f"/kubepods/burstable/pod{_UIDS[1]}", "pod-web-1"),
        ({"pod": "/"}, None, None, None),
    ],
)
def test_choice(
    what: dict[str, str | int], numbers: tuple[int, ...] | None, group: str | None, stem: str | None
) -> None:
    if numbers is None:
        with pytest.raises(UsageError):
            _chosen(**what)
        return
    choice = _chosen(**what)
    assert choice.numbers == numbers
    assert group in (None, choice.group)
    assert stem in (None, choice.stem)


def test_what_is_ambiguous_names_all_that_it_may_mean() -> None:
    with pytest.raises(UsageError, match="2 are called container app") as found:
        _chosen(container="app")
    assert f"app ({_WEB[:12]}) in pod shop/web-1" in (found.value.hint or "")
    assert f"app ({_JOB[:12]}) in pod night/web-1" in (found.value.hint or "")
    with pytest.raises(UsageError, match="2 are called pod web-1") as found:
        _chosen(pod="web-1")
    assert "shop/web-1" in (found.value.hint or "")


def test_a_pod_that_was_made_anew_is_told_apart_by_its_uid() -> None:
    # GIVEN a pod of a StatefulSet, and the one that came in its place
    labels = [
        Labels("db", container, "db", namespace="shop", pod="db-0", pod_uid=uid)
        for container, uid in zip((_WEB, _OTHER), _UIDS, strict=True)
    ]
    processes = [_process(10, _group(_UIDS[0], _WEB)), _process(11, _group(_UIDS[1], _OTHER))]
    # WHEN it is asked for by its name THEN what is listed can be asked for.
    with pytest.raises(UsageError, match="2 are called pod shop/db-0") as found:
        choose(CaptureRequest(last_ns=1, pod="shop/db-0"), processes, labels)
    hint = found.value.hint or ""
    listed = [line.partition("(")[2].rstrip(")") for line in hint.splitlines()[1:]]
    assert sorted(listed) == _UIDS
    chosen = [choose(CaptureRequest(last_ns=1, pod=uid), processes, labels) for uid in listed]
    assert sorted(one.numbers for one in chosen) == [(0,), (1,)]


def test_what_is_unknown_names_what_there_is() -> None:
    with pytest.raises(UsageError, match="no container nginx is known") as found:
        _chosen(container="nginx")
    assert "proxy" in (found.value.hint or "")
    with pytest.raises(UsageError, match="no pod nginx is known") as found:
        _chosen(pod="nginx")
    assert "night/web-1" in (found.value.hint or "")


def test_a_path_leads_to_no_other_directory() -> None:
    assert directory_of("/../../etc") is None
    assert directory_of("") is None
