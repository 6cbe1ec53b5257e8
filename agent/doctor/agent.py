# SPDX-License-Identifier: Apache-2.0
"""Checks of the fleet agent: what it refuses to start with, and what its configuration needs here.

A container that has its own directories hides the host's; what that takes away is said, and which
mount gives it back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiflame.agent import rights
from aiflame.agent.doctor.base import Context, Finding, ok, skip, warn
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.config import AgentConfig, load
from aiflame.agent.fleet.host_checks import (
    cgroup_layout,
    cgroup_mount_note,
    cgroup_namespace_note,
    enter_host_cgroup_namespace,
    require_host_pids,
)
from aiflame.agent.fleet.labelling import kubelet_of
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.pods import KubeletError
from aiflame.agent.fleet.sinks import sink_module
from aiflame.agent.fleet.stretches import Stretches
from aiflame.agent.loopback import is_loopback
from aiflame.agent.outfile import try_folder
from aiflame.agent.processes.container_names import engine_directories
from aiflame.agent.processes.targets import cgroup2_mounts
from aiflame.agent.rights import Capability
from aiflame.agent.tls import client_context

# For children of `inspector/`, which read files and memory of targets as `nobody`.
CHILD_RIGHTS = (Capability.SETUID, Capability.SETGID, Capability.SETPCAP, Capability.KILL)

# The root of the host's first process is the host's own, whatever this process has for one.
_HOST_ROOT = Path("/proc/1/root")
# A back-end that takes longer to answer a connection would delay each request of an agent.
_CONNECT_S = 5.0


def config(context: Context) -> Finding:
    """Is the configuration one that the agent starts with?"""
    found = _config(context)
    for name, settings in found.sinks.items():
        sink_module(name).check(settings)
    if found.warnings:
        return warn(
            "; ".join(found.warnings),
            "unset them, or spell them as `aiflame agent --help` does; those that Kubernetes makes"
            " of services end with enableServiceLinks: false",
        )
    source = "defaults and variables" if context.config_path is None else str(context.config_path)
    if not found.sinks:
        return warn(
            f"{source}: no sink is named, so nothing leaves {found.agent.directory}",
            "name one in the configuration: [sinks.captures], [sinks.pyroscope], [sinks.otlp] or"
            " [sinks.clickhouse]",
        )
    return ok(f"{source}: sinks are {', '.join(found.sinks)}")


def pid_namespace(_: Context) -> Finding:
    """Are pids here those that the kernel half reports?"""
    require_host_pids()
    return ok("pids are the host's")


def cgroups(_: Context) -> Finding:
    """Can processes be told apart, and left out, by their cgroups?"""
    enter_host_cgroup_namespace()  # as the agent does
    if note := cgroup_namespace_note():
        return warn(
            note,
            "--cgroupns=host, or SYS_ADMIN in capabilities.add; and mount the host's"
            " /sys/fs/cgroup, read-only",
        )
    if note := cgroup_mount_note():
        return warn(note, "mount the host's /sys/fs/cgroup, read-only")
    if note := cgroup_layout().note:
        return warn(
            note,
            "mount the host's /sys/fs/cgroup, read-only; a host that has v1 takes"
            " systemd.unified_cgroup_hierarchy=1 on its kernel's command line",
        )
    return ok(f"cgroup v2 is mounted at {cgroup2_mounts()[0]}, and no v1")


def child_rights(_: Context) -> Finding:
    """Can the children that read files of targets give up all rights?"""
    lacking = rights.missing(CHILD_RIGHTS)
    if lacking:
        return warn(
            "children that read files of targets keep rights that they need not have"
            " (sandbox_incomplete): no " + ", ".join(map(str, lacking)),
            "add " + ", ".join(one.name for one in lacking) + " to capabilities.add, or"
            " CapabilityBoundingSet=",
        )
    return ok("children that read files of targets can give up all rights")


def directory(context: Context) -> Finding:
    """Is there a private directory for what is recorded and what waits, with room for it?"""
    settings = _config(context).agent
    Stretches(settings.directory, Log())
    try_folder(settings.directory)
    queues = [name for name in _config(context).sinks if name != "captures"]
    wanted_bytes = settings.keep_size + settings.spool_size * len(queues)
    free_bytes = shutil.disk_usage(settings.directory).free
    if free_bytes < wanted_bytes:
        return warn(
            f"{settings.directory} has {free_bytes / 1e6:,.0f} MB free: what is recorded, and what"
            f" waits for {len(queues)} back-ends, may take {wanted_bytes / 1e6:,.0f} MB",
            "free some space, or set keep_size and spool_size",
        )
    return ok(f"{settings.directory} takes files, and {free_bytes / 1e9:,.1f} GB are free there")


def captures(context: Context) -> Finding:
    """Can captures be put where the configuration says?"""
    settings = _config(context).sinks.get("captures")
    if settings is None:
        return skip("no captures are kept: there is no [sinks.captures]")
    try:
        # The agent makes a directory that is not there, in one that is.
        is_new = not os.path.lexists(settings.directory)
        try_folder(settings.directory.parent if is_new else settings.directory)
    except (OSError, UsageError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        return warn(
            f"no capture can be written to {settings.directory}: {words}",
            "mount it writable, or name another in [sinks.captures]",
        )
    return ok(f"captures can be written to {settings.directory}")


def back_ends(context: Context) -> Finding:
    """Do the back-ends answer, and does nobody on the way read their secrets?"""
    urls = {
        name: settings
        for name, settings in _config(context).sinks.items()
        if getattr(settings, "url", "")
    }
    if not urls:
        return skip("no back-end is named")
    complaints = [words for name, each in urls.items() if (words := _complaint(name, each))]
    if complaints:
        return warn("; ".join(complaints), "see `url` and the files of that sink, and firewalls")
    return ok(f"{', '.join(urls)} can be reached")


def kubelet(context: Context) -> Finding:
    """Does the kubelet tell which pods there are?"""
    settings = _config(context).agent
    if not settings.kubelet:
        return skip("no kubelet is named: pods, if there are any, have no names")
    try:
        pods = kubelet_of(settings).fetch()
    except KubeletError as error:
        return warn(
            str(error),
            "deploy/kubernetes/rbac.yaml has the service account that may ask; for the address and"
            " whom to trust see kubelet and kubelet_ca_file",
        )
    return ok(f"the kubelet of {settings.kubelet} tells of {len(pods.containers):,} containers")


def engines(_: Context) -> Finding:
    """Are the files here in which container engines keep names and labels of containers?"""
    here = [path for path in engine_directories(Path("/")) if path.is_dir()]
    try:
        on_host = [path for path in engine_directories(_HOST_ROOT) if path.is_dir()]
    except OSError as error:
        unseen = f"the host's files cannot be seen: {error.strerror}"
        if not here:
            return skip(unseen)
        return ok(
            f"names and labels of containers are read from {', '.join(map(str, here))}; {unseen}"
        )
    hidden = [f"/{path.relative_to(_HOST_ROOT)}" for path in on_host]
    hidden = [path for path in hidden if Path(path) not in here]
    if hidden:
        return warn(
            f"names of containers are on the host, and not here: {', '.join(hidden)}",
            "mount it read-only at the same path: "
            + " ".join(f"-v {path}:{path}:ro" for path in hidden),
        )
    if not here:
        return ok("neither docker, podman nor CRI-O keep names of containers on this host")
    return ok(f"names and labels of containers are read from {', '.join(map(str, here))}")


def _config(context: Context) -> AgentConfig:
    if context.config is None:
        context.config = load(context.config_path, {}, os.environ)
    return context.config


def _complaint(name: str, settings: Any) -> str:
    """Returns what is wrong on the way to a back-end, "" where nothing is."""
    is_tls = urlsplit(settings.url).scheme == "https"
    files = ("token_file", "password_file")
    has_secret = any(getattr(settings, each, None) is not None for each in files)
    is_insecure = getattr(settings, "insecure", False)
    try:
        host, port = settings.address
        trust = _trust(settings, is_insecure) if is_tls else None
        with contextlib.closing(socket.create_connection((host, port), _CONNECT_S)) as plain:
            if trust is not None:
                with trust.wrap_socket(plain, server_hostname=host):
                    pass
    except UsageError as error:
        return f"{name}: {error}"
    except OSError as error:
        return f"{name}: {settings.url} cannot be reached: {error.strerror or error}"
    except UnicodeError:
        return f"{name}: {settings.url} cannot be reached: no host can have that name"
    if has_secret and is_insecure and not is_loopback(host):
        way = "any certificate is trusted" if is_tls else "there is no TLS"
        return f"{name}: others on the way to {settings.url} can read its secret: {way}"
    return ""


def _trust(settings: Any, is_insecure: bool) -> ssl.SSLContext:
    found = client_context(settings.ca_file, settings.cert_file, settings.key_file)
    if is_insecure:
        found.check_hostname = False
        found.verify_mode = ssl.CERT_NONE
    return found
