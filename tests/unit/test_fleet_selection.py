# SPDX-License-Identifier: Apache-2.0
"""Rules that say what is recorded, and the cgroups that they leave out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet import selection
from aiflame.agent.fleet.labels import TOLD_OF_POD, Subject
from aiflame.agent.fleet.selection import Selection, known_groups, left_out_paths
from aiflame.agent.model.batch import Labels

_SHOP = Subject(
    Labels(service="shop", namespace="prod", container="web", pod="shop-7d9-x"),
    (("team", "ml-search"), ("empty", "")),
    (("aiflame", "off"),),
)
_CRON = Subject(Labels(service="cron", unit="cron.service"))
# Of a pod that the kubelet has not told of, in its first minute and later.
_NEW = Subject(
    Labels("unknown-container", engine="containerd", pod_uid="7"),
    unknown=TOLD_OF_POD,
    is_awaited=True,
)
_OLD = replace(_NEW, is_awaited=False)


@pytest.mark.parametrize(
    ("include", "exclude", "shop", "cron"),
    [
        ([], [], True, True),
        ([], ["namespace=prod"], False, True),
        ([], ["namespace=pr*"], False, True),
        ([], ["namespace=PROD"], True, True),
        ([], ["namespace=pro"], True, True),
        ([], ["unit=cron.*"], True, False),
        ([], ["label:team=ml-*"], False, True),
        ([], ["label:team=*", "unit=*.service"], False, False),
        ([], ["label:other=*"], True, True),
        ([], ["annotation:aiflame=off"], False, True),
        ([], ["annotation:team=ml-*"], True, True),
        ([], ["namespace=prod,container=db"], True, True),
        ([], ["namespace=prod, container=web"], False, True),
        # What is not there matches nothing, and what is there and empty does.
        ([], ["container=*"], False, True),
        ([], ["namespace=*"], False, True),
        ([], ["unit=*"], True, False),
        ([], ["label:empty=*"], False, True),
        (["pod=*"], [], True, False),
        ([], ["process=worker"], False, False),
        ([], ["process=work??"], False, False),
        ([], ["process=nginx"], True, True),
        ([], ["container=web,process=work*"], False, True),
        (["namespace=prod"], [], True, False),
        (["namespace=prod"], ["container=web"], False, False),
        (["unit=cron.service", "pod=shop-*"], [], True, True),
        (["process=worker"], ["namespace=prod"], False, True),
    ],
)
def test_who_is_recorded(include: list[str], exclude: list[str], shop: bool, cron: bool) -> None:
    selection = Selection.parse(include, exclude)
    assert (selection.takes(_SHOP, "worker"), selection.takes(_CRON, "worker")) == (shop, cron)


@pytest.mark.parametrize(
    ("include", "exclude", "shop", "cron"),
    [
        ([], [], False, False),
        ([], ["namespace=prod"], True, False),
        ([], ["container=*"], True, False),
        (["namespace=*"], [], False, True),
        # Only some processes of it.
        ([], ["container=web,process=work*"], False, False),
        ([], ["process=worker"], False, False),
        (["process=worker"], [], False, False),
        (["namespace=prod"], [], False, True),
        (["namespace=prod,process=worker"], [], False, True),
        (["namespace=dev,process=worker"], [], True, True),
    ],
)
def test_which_cgroups_nothing_is_recorded_of(
    include: list[str], exclude: list[str], shop: bool, cron: bool
) -> None:
    selection = Selection.parse(include, exclude)
    assert (selection.leaves_out(_SHOP), selection.leaves_out(_CRON)) == (shop, cron)
    # What is left out in the kernel would be left out here, too.
    for subject in (_SHOP, _CRON):
        assert not (selection.leaves_out(subject) and selection.takes(subject, "worker"))


@pytest.mark.parametrize(
    ("include", "exclude", "takes", "leaves_out_new", "leaves_out_old"),
    [
        ([], [], True, False, False),
        # What is not known is not sent, and is recorded for as long as it may be known.
        (["namespace=shop"], [], None, False, True),
        (["label:team=a", "unit=cron.service"], [], None, False, True),
        (["container=web,process=work*"], [], None, False, True),
        ([], ["namespace=shop"], None, False, False),
        ([], ["annotation:aiflame=off"], None, False, False),
        (["namespace=shop"], ["pod=x"], None, False, True),
        # What is known may settle it.
        ([], ["unit=cron.service"], True, False, False),
        (["unit=cron.service"], [], False, True, True),
        (["engine=containerd"], [], True, False, False),
        (["namespace=shop", "engine=containerd"], [], True, False, False),
        (["namespace=shop,engine=docker"], [], False, True, True),
        ([], ["namespace=shop,engine=docker"], True, False, False),
        ([], ["namespace=shop,process=nginx"], True, False, False),
        ([], ["namespace=shop", "engine=containerd"], False, True, True),
        (["unit=cron.service"], ["namespace=shop"], False, True, True),
    ],
)
def test_rules_about_a_pod_that_is_not_known_yet(
    include: list[str],
    exclude: list[str],
    takes: bool | None,
    leaves_out_new: bool,
    leaves_out_old: bool,
) -> None:
    selection = Selection.parse(include, exclude)
    assert (selection.takes(_NEW, "worker"), selection.takes(_OLD, "worker")) == (takes, takes)
    found = selection.leaves_out(_NEW), selection.leaves_out(_OLD)
    assert found == (leaves_out_new, leaves_out_old)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a rule"),
        ("namespace", "not a rule"),
        ("namespace=", "not a rule"),
        ("=prod", "not known"),
        ("color=red", "'color', which is not known"),
        ("label=team", "not a rule"),
        ("label:=x", "not a rule"),
        ("namespace:x=y", "not a rule"),
        ("namespace=a,", "not a rule"),
        ("namespace=" + "*a" * 9, "wildcards"),
    ],
)
def test_rules_that_are_none_are_refused(text: str, words: str) -> None:
    for include, exclude in ([text], []), ([], [text]):
        with pytest.raises(UsageError, match=words):
            Selection.parse(include, exclude)


class _Owners:
    """All below a path belongs to the shop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.expected: list[str] = []

    def decided(self, cgroups: Collection[str], decide: Callable[[Subject], bool]) -> list[bool]:
        self.expected = sorted(cgroups)
        return [decide(_SHOP if path.startswith(self._path) else _CRON) for path in cgroups]


def _left_out(mount: Path, selection: Selection, owners: _Owners) -> set[int]:
    groups = known_groups(mount)
    return {groups[path] for path in left_out_paths(groups, selection, owners)}


def test_ids_of_cgroups_that_are_left_out(tmp_path: Path) -> None:
    # GIVEN a tree of cgroups, with a container's own below one of them
    inner = tmp_path / "pod" / "web" / "init"
    inner.mkdir(parents=True)
    (tmp_path / "system").mkdir()
    (tmp_path / "pod" / "cgroup.procs").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    owners = _Owners("/pod/web")
    # WHEN one container is excluded
    found = _left_out(tmp_path, Selection.parse([], ["namespace=prod"]), owners)
    # THEN its group is left out and the one below it, and no other
    assert found == {inner.stat().st_ino, inner.parent.stat().st_ino}
    assert owners.expected == ["/", "/pod", "/pod/web", "/pod/web/init", "/system"]
    # AND without rules nobody looks
    assert _left_out(tmp_path, Selection(), _Owners("/")) == set()


def test_cgroups_of_a_user_a_container_or_a_service_do_not_hide_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_MAX_GROUPS", 800)
    monkeypatch.setattr(selection, "_MAX_GROUPS_OF_ONE", 100)
    # GIVEN a user, a container and a service who make cgroups without end, under names of
    # containers, where these are delegated to them
    hostile = [
        "user.slice/user-7.slice/user@7.service",
        f"system.slice/docker-{'a' * 64}.scope",
        "system.slice/web.service",
    ]
    for folder in (tmp_path / name for name in hostile):
        for number in range(300):
            (folder / f"docker-{number:064x}.scope" / "a").mkdir(parents=True)
    # AND an engine that has as many containers below its own service
    containers = [f"/system.slice/docker.service/{number:064x}" for number in range(90)]
    for name in containers:
        (tmp_path / name.lstrip("/") / "a").mkdir(parents=True)
    services = [f"/system.slice/{number}.service" for number in range(200)]
    for name in services:
        (tmp_path / name.lstrip("/")).mkdir()
    # WHEN all are looked at THEN no group of others' is missing
    owners = _Owners("/")
    _left_out(tmp_path, Selection.parse([], ["namespace=prod"]), owners)
    assert {*services, *containers, *(f"{name}/a" for name in containers)} <= {*owners.expected}
    for name in ("user-7", "/docker-aaa", "web.service"):
        assert sum(name in path for path in owners.expected) == 101


def test_a_tree_that_is_too_deep_ends(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(60):
        folder = folder / "d"
    folder.mkdir(parents=True)
    found = _left_out(tmp_path, Selection.parse([], ["namespace=prod"]), _Owners("/"))
    assert len(found) == 33
