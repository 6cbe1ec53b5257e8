# SPDX-License-Identifier: Apache-2.0
"""Where engines were told to keep containers, and what may stand there instead."""

from __future__ import annotations

import json
import time

import pytest
from aiflame.agent.processes.engine_settings import (
    MAX_SETTINGS_BYTES,
    StorageConf,
    absolute,
    data_root,
    storage_conf,
)

_VARIABLES = {"HOME": "/home/ann", "UID": "1000", "USER": "ann"}


def test_a_storage_conf_as_distributions_ship_it() -> None:
    text = b"""# This file is the configuration file
[storage]
driver = "overlay"
runroot = "/run/containers/storage"
graphroot = "/srv/containers" # moved
rootless_storage_path = "$HOME/containers"

[storage.options]
additionalimagestores = [
]
[storage.options.overlay]
mountopt = "nodev,metacopy=on"
"""
    assert storage_conf(text) == StorageConf(
        "/srv/containers", "/run/containers/storage", "$HOME/containers"
    )
    assert storage_conf(b"[storage]\ndriver = 'vfs'\n") == StorageConf()
    assert storage_conf(b'storage.graphroot = "/srv"') == StorageConf("/srv")


@pytest.mark.parametrize(
    "text",
    [b"", b"[storage", b"storage = 5", b"[storage]\ngraphroot = ['/srv']", b"[[storage]]\n",
     b"[storage]\ngraphroot = '/srv'\ngraphroot = '/srv'", b"\xff", b"\x00",
     b"a = " + b"[" * 60_000, b"a = " + b"{a=" * 20_000, b"a = " + b"9" * 60_000,
     b"graphroot = '/srv'"],
)  # fmt: skip
def test_a_storage_conf_that_is_not_as_it_should_be_says_nothing(text: bytes) -> None:
    assert storage_conf(text) == StorageConf()


@pytest.mark.parametrize(
    "text", [b"a." * (MAX_SETTINGS_BYTES // 2 - 2) + b"a=1", b"[" + b"a." * 32_000 + b"a]"]
)
def test_a_storage_conf_that_would_be_read_for_long_is_not_read(text: bytes) -> None:
    begun_s = time.thread_time()
    assert storage_conf(text) == StorageConf()
    assert time.thread_time() - begun_s < 2  # seconds of CPU; a parser takes many times that


def test_where_docker_is_told_to_keep_everything() -> None:
    assert data_root(json.dumps({"debug": True, "data-root": "/srv/docker"}).encode()) == (
        "/srv/docker"
    )
    for text in (b"", b"{", b"[]", b'{"data-root": 5}', b"[" * 60_000, b"9" * 60_000, b"\xff"):
        assert data_root(text) == ""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/srv/$USER/containers", "/srv/ann/containers"),
        ("$HOME/containers", "/home/ann/containers"),
        ("/srv/user-$UID", "/srv/user-1000"),
        ("${HOME}2/${UID}", "/home/ann2/1000"),
        ("//srv/./a/../b/", "/srv/b"),
        ("/../../etc", "/etc"),
        ("", ""),
        ("relative", ""),
        ("~/containers", ""),
        ("$XDG_DATA_HOME/containers", ""),
        ("/srv/$", ""),
        ("/srv/\0", ""),
        ("/srv/" + "a" * 4096, ""),
        ("$HOME" * 10_000, ""),
    ],
)
def test_paths_of_a_user(path: str, expected: str) -> None:
    assert absolute(path, _VARIABLES) == expected


def test_paths_that_are_taken_as_they_are() -> None:
    assert absolute("/srv/$HOME") == "/srv/$HOME"
    assert absolute("/srv/\ud800") == ""


def test_a_user_without_a_home_has_no_path_there() -> None:
    assert absolute("$HOME/containers", {"HOME": "", "UID": "7"}) == ""
