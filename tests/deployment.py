# SPDX-License-Identifier: Apache-2.0
"""What the files of deploy/ say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


def manifests() -> list[dict[str, Any]]:
    """Returns all Kubernetes objects."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def container() -> dict[str, Any]:
    """Returns the agent's container, as the DaemonSet has it."""
    (daemon_set,) = (one for one in manifests() if one["kind"] == "DaemonSet")
    (found,) = daemon_set["spec"]["template"]["spec"]["containers"]
    return dict(found)


def capabilities() -> list[str]:
    """Returns the capabilities that the container has, without CAP_."""
    return list(container()["securityContext"]["capabilities"]["add"])
