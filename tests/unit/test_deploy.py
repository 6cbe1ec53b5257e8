# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/ are valid, and say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from deployment import DEPLOY, capabilities, container, manifests

_VERSIONS = ("1.30", "1.33", "1.36")
# Of kubectl, not of the API.
_OF_KUBECTL = "Kustomization"


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda one: f"{one['kind']}-{one.get('metadata', {}).get('name')}"
)
def test_kubernetes_takes_each_object(manifest: dict[str, Any], version: str) -> None:
    if manifest["kind"] == _OF_KUBECTL:
        for resource in manifest["resources"]:
            assert (DEPLOY / "kubernetes" / resource).exists()
        return
    kubernetes_validate.validate(manifest, version, strict=True)


def test_all_ways_have_the_same_rights() -> None:
    given = set(capabilities())
    # systemd's, with their prefix
    unit = (DEPLOY / "systemd/aiflame-agent.service").read_text()
    (line,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    assert set(line.split()) == {f"CAP_{name}" for name in given}
    # and podman's, in the text
    (words,) = re.findall(r"--cap-add=(\S+)", (DEPLOY / "README.md").read_text())
    assert set(words.split(",")) == given


_SYSTEMD_ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture
def unit_here(tmp_path: Path) -> Path:
    """The unit, with the program of an installation in its place by one that is here."""
    found = tmp_path / "aiflame-agent.service"
    text = (DEPLOY / "systemd/aiflame-agent.service").read_text()
    found.write_text(text.replace("/opt/aiflame/bin/aiflame", sys.executable))
    return found


@pytest.mark.skipif(_SYSTEMD_ANALYZE is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit_and_finds_it_guarded(unit_here: Path) -> None:
    def analyze(*words: str) -> subprocess.CompletedProcess[str]:
        assert _SYSTEMD_ANALYZE is not None
        return subprocess.run(
            [_SYSTEMD_ANALYZE, *words, str(unit_here)],
            capture_output=True,
            text=True,
            check=False,
            env={"SYSTEMD_COLORS": "0", "LC_ALL": "C.UTF-8"},
        )

    verified = analyze("verify")
    assert (verified.returncode, verified.stderr) == (0, "")
    # AND what it may do is no more than now: 0 is nothing, 10 is all
    judged = analyze("security", "--offline=yes", "--threshold=50")
    assert judged.returncode == 0, judged.stdout


def test_what_is_written_outlives_the_container() -> None:
    mounted = {one["mountPath"]: one.get("readOnly", False) for one in container()["volumeMounts"]}
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    assert not mounted["/var/lib/aiflame"] and not mounted["/var/cache/aiflame"]
    assert mounted["/sys/kernel/tracing"] and mounted["/sys/fs/cgroup"]
