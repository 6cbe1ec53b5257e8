# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/ are valid, and say the same."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiflame.agent.fleet.config import load
from aiflame.agent.fleet.health import HealthServer
from aiflame.agent.fleet.vitals import Vitals
from aiflame.gpu.nvidia.family import NvidiaFamily
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


def test_each_probe_asks_what_it_is_for() -> None:
    alive, started, ready = (
        container()[f"{name}Probe"]["exec"]["command"]
        for name in ("liveness", "startup", "readiness")
    )
    (file,) = container()["args"][2:]
    # Without a path it is /healthz; a pod that is not ready is not to be started anew.
    assert alive == started and alive[-2:] == ["--config", file]
    assert ready == [*alive, "/readyz"]


def test_what_is_written_outlives_the_container() -> None:
    mounted = {one["mountPath"]: one.get("readOnly", False) for one in container()["volumeMounts"]}
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    assert not mounted["/var/lib/aiflame"] and not mounted["/var/cache/aiflame"]
    assert mounted["/sys/fs/cgroup"]


def _of_kind(kind: str) -> dict[str, Any]:
    (found,) = (one for one in manifests() if one["kind"] == kind)
    return found


def test_pods_come_to_be_where_critical_ones_need_a_quota() -> None:
    (scope,) = _of_kind("ResourceQuota")["spec"]["scopeSelector"]["matchExpressions"]
    pod = _of_kind("DaemonSet")["spec"]["template"]["spec"]
    assert scope["scopeName"] == "PriorityClass"
    assert pod["priorityClassName"] in scope["values"]
    # AND the command to apply them knows all files
    listed = _of_kind(_OF_KUBECTL)["resources"]
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert {*listed, "kustomization.yaml"} == files


def _snippet(name: str) -> dict[str, Any]:
    """Returns an object that the text shows."""
    text = (DEPLOY / "README.md").read_text()
    (found,) = re.findall(rf"^```yaml\n# {name}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return dict(yaml.safe_load(found))


def _merged(base: Any, patch: Any) -> Any:
    """Returns a strategic merge: lists of named items are joined by name."""
    if isinstance(patch, dict):
        new = {key: _merged(base.get(key, type(one)()), one) for key, one in patch.items()}
        return {**base, **new}
    if isinstance(patch, list):
        by_name = {one["name"]: one for one in base}
        new = {one["name"]: _merged(by_name.get(one["name"], {}), one) for one in patch}
        return [*{**by_name, **new}.values()]
    return patch


@pytest.mark.parametrize("version", _VERSIONS)
def test_the_helpers_of_gpu_workloads_are_where_the_text_says(version: str) -> None:
    (base,) = (one for one in manifests() if one["kind"] == "DaemonSet")
    agent, pod = _merged(base, _snippet("patch.yaml")), _snippet("pod.yaml")
    for manifest in (agent, pod):
        kubernetes_validate.validate(manifest, version, strict=True)
    # The agent takes what the patch says,
    of_agent = agent["spec"]["template"]["spec"]["containers"][0]
    variables = {one["name"]: one["value"] for one in of_agent["env"] if "value" in one}
    directory = load(None, {}, variables).agent.gpu_helper_directory
    assert {"name": "gpu", "mountPath": str(directory)} in of_agent["volumeMounts"]
    # AND pods name the link in it, and cannot write there.
    (of_pod,) = pod["spec"]["containers"]
    assert NvidiaFamily.helper is not None
    assert of_pod["env"][0]["value"] == f"{directory}/{NvidiaFamily.helper.path.name}"
    assert of_pod["volumeMounts"][0]["readOnly"]


@pytest.mark.parametrize("version", _VERSIONS)
def test_the_patch_for_metrics_is_valid(version: str) -> None:
    (base,) = (one for one in manifests() if one["kind"] == "DaemonSet")
    kubernetes_validate.validate(_merged(base, _snippet("metrics.yaml")), version, strict=True)


def test_metrics_are_read_as_the_text_says(tmp_path: Path) -> None:
    (base,) = (one for one in manifests() if one["kind"] == "DaemonSet")
    pod = _snippet("metrics.yaml")["spec"]["template"]["spec"]
    (endpoint,) = _snippet("monitor.yaml")["spec"]["podMetricsEndpoints"]
    # GIVEN the secret, made by the commands of the text, where the patch has it
    text = (DEPLOY / "README.md").read_text()
    for command in re.findall(r"^openssl .*$", text, re.MULTILINE):
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    (volume,) = pod["volumes"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    for path in tmp_path.iterdir():
        path.chmod(volume["secret"]["defaultMode"])
    # WHEN an agent is told of it
    variables = {
        one["name"]: one["value"].replace(mount["mountPath"], str(tmp_path))
        for one in pod["containers"][0]["env"]
    }
    variables["AIFLAME_HEALTH"] = variables["AIFLAME_HEALTH"].replace(":7575", ":0")
    config = load(None, {}, variables)
    server = HealthServer(config.agent, Vitals())
    # THEN who knows the certificate and the token by the names of the monitor reads them
    try:
        port = int(server.url.rpartition(":")[2])
        tls, secret = endpoint["tlsConfig"], endpoint["authorization"]["credentials"]
        certificate = tmp_path / tls["ca"]["secret"]["key"]
        context = ssl.create_default_context(cafile=str(certificate))
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname=tls["serverName"]) as connection,
        ):
            token = (tmp_path / secret["key"]).read_text().strip()
            asked = f"GET {endpoint['path']} HTTP/1.1\r\nHost: aiflame\r\nConnection: close\r\n"
            connection.sendall(f"{asked}Authorization: Bearer {token}\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    finally:
        server.close()
    assert answer.startswith(b"HTTP/1.1 200 ") and b"\naiflame_" in answer
    # AND the monitor finds the pods
    labels = base["spec"]["template"]["metadata"]["labels"]
    selector = _snippet("monitor.yaml")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    assert endpoint["port"] in {one["name"] for one in pod["containers"][0]["ports"]}
