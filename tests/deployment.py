# SPDX-License-Identifier: Apache-2.0
"""What the files of deploy/ say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


# What the DaemonSet says: what has no counterpart in podman is where pods are, how they are asked,
# and how they end.
_OF_POD = {
    *("serviceAccountName", "enableServiceLinks", "nodeSelector", "hostPID", "tolerations"),
    *("priorityClassName", "terminationGracePeriodSeconds", "containers", "volumes"),
}
_OF_CONTAINER = {
    *("name", "image", "args", "env", "securityContext", "resources", "volumeMounts"),
    *("startupProbe", "livenessProbe", "readinessProbe"),
}


def manifests() -> list[dict[str, Any]]:
    """Returns all Kubernetes objects."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def pod() -> dict[str, Any]:
    """Returns the agent's pod, as the DaemonSet has it."""
    (daemon_set,) = (one for one in manifests() if one["kind"] == "DaemonSet")
    return dict(daemon_set["spec"]["template"]["spec"])


def container() -> dict[str, Any]:
    """Returns the agent's container in it."""
    (found,) = pod()["containers"]
    return dict(found)


def capabilities() -> list[str]:
    """Returns the capabilities that the container has, without CAP_."""
    return list(container()["securityContext"]["capabilities"]["add"])


def podman_options(configuration: Path, on_host: Mapping[str, Path]) -> list[str]:
    """Returns what podman has to be told so that a container is like the DaemonSet's.

    What is new there, and has no place here, is an error.

    Args:
        configuration: The directory that stands for the ConfigMap.
        on_host: Directories that stand for those of the host, by their paths there; others are
            the host's own.
    """
    assert pod()["hostPID"]
    assert pod().keys() == _OF_POD and container().keys() == _OF_CONTAINER
    assert container()["resources"].keys() == {"requests", "limits"}
    assert container()["resources"]["limits"].keys() == {"memory"}
    found = ["--pid=host", "--network=none"]  # which has a loopback device, as a pod's
    found += _of_security(dict(container()["securityContext"]))
    found.append(f"--memory={container()['resources']['limits']['memory'].replace('Gi', 'g')}")
    fields = {"spec.nodeName": "this-node", "status.hostIP": "127.0.0.1"}
    for one in container()["env"]:
        found.append(f"--env={one['name']}={fields[one['valueFrom']['fieldRef']['fieldPath']]}")
    volumes = {one["name"]: one for one in pod()["volumes"]}
    for mount in container()["volumeMounts"]:
        found.append(_of_volume(volumes[mount["name"]], mount, configuration, on_host))
    return found


def _of_security(context: dict[str, Any]) -> list[str]:
    granted = context.pop("capabilities")
    found = [f"--cap-drop={','.join(granted['drop'])}", f"--cap-add={','.join(granted['add'])}"]
    found.append(f"--user={context.pop('runAsUser')}")
    found.append(f"--security-opt=label=type:{context.pop('seLinuxOptions')['type']}")
    for key, name in (("seccompProfile", "seccomp"), ("appArmorProfile", "apparmor")):
        found.append(f"--security-opt={name}={context.pop(key)['type'].lower()}")
    # podman would mount some of what is not said.
    found += ["--read-only", "--read-only-tmpfs=false"]
    found.append("--security-opt=no-new-privileges")
    wanted = {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
    }
    assert context == wanted
    return found


def _of_volume(
    volume: dict[str, Any],
    mount: dict[str, Any],
    configuration: Path,
    on_host: Mapping[str, Path],
) -> str:
    assert mount.keys() <= {"name", "mountPath", "readOnly"}
    at = mount["mountPath"]
    options = ":ro" if mount.get("readOnly", False) else ""
    if "configMap" in volume:
        return f"--volume={configuration}:{at}{options}"
    if "hostPath" in volume:
        path = volume["hostPath"]["path"]
        return f"--volume={on_host.get(path, path)}:{at}{options}"
    # A kubelet lets everybody write there (pkg/volume/emptydir).
    assert volume["emptyDir"]["medium"] == "Memory" and not options
    size = volume["emptyDir"]["sizeLimit"].replace("Mi", "m")
    return f"--mount=type=tmpfs,destination={at},tmpfs-size={size},tmpfs-mode=0777,notmpcopyup"
