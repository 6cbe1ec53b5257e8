# SPDX-License-Identifier: Apache-2.0
"""Who opens files. What runs as root opens those of others in few modules, which take care.

Outputs are opened by `outfile`, files of targets by `inspector`, what
the kernel tells by `kernelfs`. Whoever is listed here besides opens nothing that another user can
have put there; the reason says why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]

# Calls that open a path, by their last name. `open` is told from other methods of that name, such
# as a store's, by its arguments: Path.open takes a mode, or none.
_PATH_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "touch"}
_FUNCTIONS = {
    "open",
    "os.open",
    "io.open",
    "os.mkfifo",
    "sqlite3.connect",
    "shutil.copyfile",
    "shutil.copy",
    "np.load",
    "np.fromfile",
}
_MODULES = {"tempfile"}
# Methods of our own with those names, which is where files are opened.
_CAREFUL = {"kernelfs.read_text", "kernelfs.read_bytes"}

_MAY_OPEN = {
    # The four that take care.
    "agent/outfile.py": "outputs",
    "agent/inspector/rootfs.py": "files of targets, inside their root directory",
    "agent/inspector/opener_worker.py": "the same by other ways, in a process that can be killed",
    "agent/kernelfs.py": "/proc and /sys",
    "agent/injection/delivery.py": "a new file in a directory that is checked, no link followed",
    # Directories of our own, which no other user can write to.
    "agent/capture/workspace.py": "a recording before it has its name",
    "agent/capture/writer.py": "the same",
    "agent/user_folders.py": "which directory temporary files have: none is opened",
    "agent/capture/columns.py": "a database in memory",
    "agent/sinks/segments.py": "the segments of a recording",
    "agent/commands/captures.py": "a private directory, for what segments are made into",
    "agent/commands/record_copy_worker.py": "the same",
    "agent/fleet/agent.py": "the directory of an agent, to lock it",
    "agent/fleet/stretches.py": "the same, for marks of a stretch",
    "agent/fleet/naming_worker.py": "the same, to lock it, too",
    "agent/fleet/capture_request.py": "the same, for its socket",
    "agent/fleet/known_containers.py": "the same, for names of containers",
    "agent/fleet/capture_job.py": "a private directory in it, a file without a name, /proc/self",
    "agent/commands/agent_capture.py": "a private directory, for what an agent hands over",
    "agent/fleet/delivery.py": "the same, for what waits for a back-end",
    "agent/sinks/captures.py": "a capture of ours, in that directory",
    "agent/symbols/store.py": "the cache",
    "agent/symbols/kallsyms.py": "a file without a name in the directory of an agent",
    "agent/processes/cached_tables.py": "a private directory, where there is no cache",
    "agent/sinks/index.py": "a database without a name",
    # Files of this package, or beside it.
    "agent/capture/schema.py": "the schema",
    "agent/kernel/compile.py": "the C of bpf/ and what it was compiled to, the version of BCC",
    "agent/reports/html.py": "parts of the page",
    "agent/reports/svg.py": "the parts of the SVG",
    "agent/injection/inject.py": "a helper's library",
    "agent/fleet/prepared.py": "the same",
    # Files that the user names, with the user's rights or as root: no process chooses them.
    "agent/capture/reader.py": "a capture to be read",
    "agent/sinks/posting.py": "tokens and passwords that the configuration names",
    "agent/fleet/kubelet.py": "the token of a service account",
    "agent/store/address.py": "a password of a store",
    "agent/store/engines.py": "the lock of a store",
    "agent/fleet/config.py": "the configuration",
    "agent/fleet/probe.py": "the same, and a certificate and a token that it names",
    "agent/settings.py": "secrets that the configuration names",
    "agent/recording/recorder.py": "the directory of the cgroup that is recorded",
    # Ours to the end.
    "agent/processes/cgroup_ids.py": "where cgroups are mounted",
    "agent/fleet/naming.py": "the same",
    "agent/inspector/forking.py": "the same",
    "agent/commands/messages.py": "/dev/null and the standard streams",
    # Children that read for others: they get descriptors.
    "agent/inspector/child.py": "the status of a child of ours, in /proc",
    "agent/processes/binaries.py": "a pipe without a name, that the opener found",
    "agent/inspector/parser.py": "/dev/null, and what /proc says of a descriptor",
    "agent/unwind/worker.py": "what it is told to read",
    # The system's own.
    "agent/fleet/host_checks.py": "the cgroup namespace of a thread of the kernel",
    "agent/processes/engine_files.py": "files of container engines, if they are root's",
    "agent/processes/podman_state.py": "the same, or a copy in a private directory in memory",
    "gpu/nvidia/machine.py": "what NVIDIA's driver tells in /proc, and its nodes in /dev",
    "gpu/opencl/platforms.py": "registered drivers of OpenCL, and /proc/cpuinfo",
}


def _opens(tree: ast.Module) -> Iterator[str]:
    """Yields the calls that open a path, as they are written."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_path = name.rpartition(".")[2] in _PATH_METHODS and name not in _CAREFUL
        is_path |= name.endswith(".open") and _is_mode(node.args)
        if is_path or name in _FUNCTIONS or name.partition(".")[0] in _MODULES:
            yield ast.unparse(node)


def _is_mode(arguments: list[ast.expr]) -> bool:
    """Whether these are arguments of Path.open."""
    if not arguments:
        return True
    first = arguments[0]
    return (
        isinstance(first, ast.Constant)
        and isinstance(first.value, str)
        and set(first.value) <= set("rwxabt+")
    )


def _found() -> dict[str, list[str]]:
    paths = [path for folder in ("agent", "gpu") for path in (_ROOT / folder).rglob("*.py")]
    calls = {str(path.relative_to(_ROOT)): [*_opens(ast.parse(path.read_text()))] for path in paths}
    return {path: opened for path, opened in calls.items() if opened}


def test_files_are_opened_where_that_is_taken_care_of() -> None:
    assert {path: calls for path, calls in _found().items() if path not in _MAY_OPEN} == {}


def test_the_list_is_no_longer_than_it_has_to_be() -> None:
    assert _MAY_OPEN.keys() - _found().keys() == set()


def test_each_way_to_open_is_seen() -> None:
    script = """
open(path)
os.open(path, os.O_RDONLY)
path.open()
path.open("rb")
Path("/etc/passwd").read_text()
(folder / name).write_bytes(data)
tempfile.mkstemp()
sqlite3.connect(path)
store.open(name)
kernelfs.read_text(path)
"""
    calls = script.strip().splitlines()
    seen = [call.replace("'", '"') for call in _opens(ast.parse(script))]
    assert sorted(seen) == sorted(calls[:-2])
