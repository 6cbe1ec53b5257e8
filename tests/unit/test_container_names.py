# SPDX-License-Identifier: Apache-2.0
"""Names of containers as engines leave them on the disk, and what is not believed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.processes.container_names import (
    EngineFacts,
    engine_directories,
    facts_of,
    names_of,
    state_directories,
)

_WEB, _DB, _JOB = "a" * 64, "b" * 64, "c" * 64


def _write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def _docker(root: Path, container_id: str, content: Any, folder: str = "var/lib/docker") -> Path:
    return _write(root / folder / "containers" / container_id / "config.v2.json", content)


def test_names_of_docker(tmp_path: Path) -> None:
    _docker(tmp_path, _WEB, {"ID": _WEB, "Name": "/web", "State": {"Running": True}})
    _docker(tmp_path, _DB, {"ID": _DB, "Name": "/db"}, "srv/docker")
    _docker(tmp_path, _JOB, {"Name": "/job"}, "var/snap/docker/common/var-lib-docker")
    _write(tmp_path / "etc/docker/daemon.json", {"data-root": "/srv/docker"})
    assert names_of([_WEB, _DB, _JOB], tmp_path) == {_WEB: "web", _DB: "db", _JOB: "job"}
    assert names_of([_DB], tmp_path) == {_DB: "db"}


def test_names_of_podman_and_of_cri_o(tmp_path: Path) -> None:
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    _write(storage / "containers.json", [{"id": _WEB, "names": ["web"]}, {"id": _DB}])
    _write(storage / "volatile-containers.json", [{"id": _JOB, "names": ["job", "alias"]}])
    assert names_of([_WEB, _DB, _JOB], tmp_path) == {_WEB: "web", _JOB: "job"}


def _moved(root: Path, folder: str, settings: str = "etc/containers/storage.conf") -> None:
    _write(root / settings, f'[storage]\ngraphroot = "{folder}"\n')


def test_names_of_podman_where_storage_was_moved(tmp_path: Path) -> None:
    # GIVEN a storage that was moved after a container was made, by the administrator
    _moved(tmp_path, "/opt/never", "usr/share/containers/storage.conf")
    _write(tmp_path / "etc/containers/storage.conf",
           '[storage]\ngraphroot = "/srv/graph"\nrunroot = "/srv/run"\n')  # fmt: skip
    for folder, key, name in (
        ("var/lib/containers/storage", _WEB, "web"),
        ("srv/graph", _DB, "db"),
        ("srv/run", _JOB, "job"),
        ("opt/never", "d" * 64, "never"),
    ):
        storage = tmp_path / folder / "overlay-containers"
        _write(storage / "containers.json", [{"id": key, "names": [name]}])
    ids = [_WEB, _DB, _JOB, "d" * 64]
    assert names_of(ids, tmp_path) == {_WEB: "web", _DB: "db", _JOB: "job"}
    # WHEN only the distribution says where
    (tmp_path / "etc/containers/storage.conf").unlink()
    assert names_of(ids, tmp_path) == {_WEB: "web", "d" * 64: "never"}


def test_places_of_engines_are_told_once(tmp_path: Path) -> None:
    before = engine_directories(tmp_path)
    _moved(tmp_path, "/var/lib/containers/storage/")
    _write(tmp_path / "etc/docker/daemon.json", {"data-root": "/var/lib/docker"})
    assert engine_directories(tmp_path) == before
    _moved(tmp_path, "/srv/graph")
    assert engine_directories(tmp_path) == [*before, tmp_path / "srv/graph"]


def test_a_place_that_no_file_system_can_have(tmp_path: Path) -> None:
    _docker(tmp_path, _WEB, {"Name": "/web"})
    _moved(tmp_path, "/srv/" + "a" * 300)
    _write(tmp_path / "etc/docker/daemon.json", {"data-root": "/srv/" + "b" * 300})
    assert state_directories(tmp_path) == [tmp_path / "var/lib/docker/containers"]
    assert names_of([_WEB], tmp_path) == {_WEB: "web"}


@pytest.mark.parametrize("kind", ["link", "fifo", "huge", "damaged", "relative", "another user"])
def test_settings_that_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _moved(tmp_path, "srv" if kind == "relative" else "/srv")
    path = tmp_path / "etc/containers/storage.conf"
    match kind:
        case "link":
            path.symlink_to(path.rename(tmp_path / "elsewhere"))
        case "fifo":
            path.unlink()
            os.mkfifo(path)
        case "huge":
            path.write_text(path.read_text() + "#" * (64 << 10))
        case "damaged":
            path.write_text(path.read_text() + "[")
        case "another user":
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
            else:
                monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert tmp_path / "srv" not in engine_directories(tmp_path)


def test_images_and_labels(tmp_path: Path) -> None:
    labels = {"com.docker.compose.service": "web", "odd": 5}
    settings = {"Image": "nginx:1.25", "Labels": labels}
    _docker(tmp_path, _WEB, {"Name": "/shop-web-1", "Config": settings})
    _docker(tmp_path, _DB, {"Name": "/db", "Config": {"Labels": [], "Image": None}})
    metadata = json.dumps({"image-name": "localhost/job:2", "name": "job"})
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    _write(storage / "containers.json", [{"id": _JOB, "names": ["job"], "metadata": metadata}])
    assert facts_of([_WEB, _DB, _JOB], tmp_path) == {
        _WEB: EngineFacts("shop-web-1", "nginx:1.25", (("com.docker.compose.service", "web"),)),
        _DB: EngineFacts("db"),
        _JOB: EngineFacts("job", "localhost/job:2"),
    }


@pytest.mark.parametrize("metadata", ["", "{", "[" * 100_000, "7", 7, None, {"image-name": "x"}])
def test_metadata_that_is_not_as_it_should_be_tells_no_image(tmp_path: Path, metadata: Any) -> None:
    storage = tmp_path / "var/lib/containers/storage/overlay-containers"
    _write(storage / "containers.json", [{"id": _JOB, "names": ["job"], "metadata": metadata}])
    assert facts_of([_JOB], tmp_path) == {_JOB: EngineFacts("job")}


def test_labels_are_bounded(tmp_path: Path) -> None:
    labels = {f"label {number}": "x" for number in range(5000)}
    _docker(tmp_path, _WEB, {"Name": "/web", "Config": {"Labels": labels}})
    assert len(facts_of([_WEB], tmp_path)[_WEB].labels) == 128
    labels = {"small": "x", **{f"large {number}": "x" * 5000 for number in range(100)}}
    _docker(tmp_path, _WEB, {"Name": "/" + "n" * 5000, "Config": {"Labels": labels}})
    found = facts_of([_WEB], tmp_path)[_WEB]
    assert [name for name, _ in found.labels] == ["small", "large 0"]
    assert len(found.name) == 1023


def test_an_id_that_is_a_path_is_not_looked_for(tmp_path: Path) -> None:
    _docker(tmp_path, "../../elsewhere", {"Name": "/web"})
    assert facts_of(["../../elsewhere"], tmp_path) == {}


def test_where_no_engine_is(tmp_path: Path) -> None:
    assert names_of([_WEB], tmp_path) == {}
    assert names_of([], tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "1", '{"Name": 5}', '{"Name": "/"}', '{"Name": null}', "[" * 100_000,
     '{"Name": "/x"}' + " " * (1 << 20), "9" * 100_000, "\x00"],
)  # fmt: skip
def test_a_file_that_is_not_as_it_should_be_names_nothing(tmp_path: Path, content: str) -> None:
    _docker(tmp_path, _WEB, content)
    _docker(tmp_path, _DB, {"Name": "/db"})
    _write(tmp_path / "etc/docker/daemon.json", content)
    assert names_of([_WEB, _DB], tmp_path) == {_DB: "db"}


@pytest.mark.parametrize(
    "content", ["{}", "[1, null, []]", '[{"id": 1, "names": ["x"]}]', '[{"id": "x", "names": [1]}]',
                '[{"names": "x"}]', "[" * 100_000]
)  # fmt: skip
def test_a_list_that_is_not_as_it_should_be_names_nothing(tmp_path: Path, content: str) -> None:
    _write(tmp_path / "var/lib/containers/storage/vfs-containers/containers.json", content)
    assert names_of([_WEB], tmp_path) == {}


def test_neither_a_link_nor_a_fifo_nor_a_folder_is_read(tmp_path: Path) -> None:
    elsewhere = _write(tmp_path / "elsewhere", {"Name": "/linked"})
    _docker(tmp_path, _WEB, "").unlink()
    folder = tmp_path / "var/lib/docker/containers"
    (folder / _WEB / "config.v2.json").symlink_to(elsewhere)
    (folder / _DB).mkdir()
    os.mkfifo(folder / _DB / "config.v2.json")
    (folder / _JOB / "config.v2.json").mkdir(parents=True)
    assert names_of([_WEB, _DB, _JOB], tmp_path) == {}


def test_a_file_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _docker(tmp_path, _WEB, {"Name": "/web"})
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert names_of([_WEB], tmp_path) == {}
