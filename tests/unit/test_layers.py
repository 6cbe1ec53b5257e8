# SPDX-License-Identifier: Apache-2.0
"""The shape of agent/ and gpu/: which part may know which, and how large things may be.

Read from the sources, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@functools.cache  # not read where none of these tests runs
def _modules(folder: str) -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(_ROOT / folder).with_suffix("").parts): ast.parse(
            path.read_text()
        )
        for path in sorted((_ROOT / folder).rglob("*.py"))
    }


# What each part may import of agent/, itself aside. A part is a folder, or a module at the top.
_LEAVES = {
    "allocator",
    "closing",
    "demangle",
    "errors",
    "kernelfs",
    "limits",
    "losses",
    "loopback",
    "tls",
    "typed_messages",
    "memory_file",
    "model",
    "outfile",
    "priority",
    "process_group",
    "redaction",
    "retries",
    "rights",
    "rows",
    "settings",
    "inspector",
    "file_questions",
    "http_exchange",
    "target_files",
    "user_folders",
    "",
}
_MAY_IMPORT = {
    "": set(),
    "allocator": {"kernelfs"},
    "closing": set(),
    "demangle": {"closing", "inspector", "kernelfs", "limits"},
    "errors": set(),
    "kernelfs": set(),
    "limits": {"kernelfs"},
    "losses": set(),
    "loopback": set(),
    "tls": {"errors"},
    "typed_messages": set(),
    "memory_file": set(),
    "model": {"losses", "rows"},
    "outfile": {"errors", "limits"},
    "redaction": set(),
    "retries": set(),
    "target_files": {"errors"},
    "file_questions": {"errors"},
    "http_exchange": set(),
    "priority": set(),
    "process_group": set(),
    "rights": {"errors", "priority"},
    "rows": set(),
    "settings": {"errors", "loopback"},
    "user_folders": {"errors"},
    "inspector": {
        *("allocator", "closing", "file_questions", "limits", "losses", "memory_file", "priority"),
        *("process_group", "target_files"),
    },
    "capture": {
        *("allocator", "errors", "limits", "losses", "model", "outfile", "rows", "user_folders"),
    },
    "elf": {"file_questions", "target_files"},
    "symbols": {
        *("demangle", "elf", "errors", "inspector", "kernelfs", "losses", "model", "outfile"),
        *("file_questions", "limits", "memory_file", "process_group", "target_files"),
        "user_folders",
    },
    "unwind": {
        *("elf", "errors", "file_questions", "inspector", "limits", "model", "process_group"),
        *("symbols", "target_files"),
    },
    "python": {"elf", "errors", "file_questions", "model", "symbols", "target_files", "unwind"},
    "kernel": {"symbols", "unwind", *_LEAVES},
    "injection": {"elf", "processes", "python", "unwind", *_LEAVES},
    "processes": {"elf", "kernel", "python", "symbols", "unwind", *_LEAVES},
    "symbolize": {"elf", "kernel", "python", "symbols", *_LEAVES},
    "store": {"errors", "http_exchange", "loopback", "losses", "model", "reports", "tls", ""},
    "sinks": {"capture", "processes", "reports", "store", "symbolize", "symbols", *_LEAVES},
    "launches": {"elf", "kernel", "processes", "python", "symbols", *_LEAVES},
    "devices": {"capture", "kernel", "launches", "processes", "symbols", *_LEAVES},
    "reports": {"demangle", "errors", "losses", "model"},
    "dumps": {
        *("kernel", "processes", "python", "reports", "symbolize", "symbols", "unwind"),
        *_LEAVES,
    },
    "recording": {
        *("devices", "elf", "kernel", "launches", "processes", "python", "symbols", "unwind"),
        *_LEAVES,
    },
    "fleet": {
        *("capture", "devices", "kernel", "processes", "recording", "sinks", "symbolize"),
        *("symbols", *_LEAVES),
    },
    "doctor": {
        *("capture", "fleet", "kernel", "processes", "python", "reports", "symbols"),
        *_LEAVES,
    },
    "commands": {
        *("capture", "devices", "doctor", "dumps", "fleet", "kernel", "processes", "python"),
        *("recording", "reports", "sinks", "store", "symbols"),
        *_LEAVES,
    },
    "cli": {"commands", *_LEAVES},
    "__main__": {"cli"},
}
_PREFIX = "aiflame.agent"

# Which parts of agent/ know the device half. Reports know what is made of a capture, not devices.
_GPU = "aiflame.gpu"
_MAY_IMPORT_GPU = {
    *("commands", "devices", "doctor", "fleet", "launches", "recording", "reports", "store"),
}
_GPU_OF_CAPTURES = (f"{_GPU}.apis", f"{_GPU}.attribution", f"{_GPU}.stalls")

# All that agent/ knows of devices: the protocols, the list of families, and data. Never a family.
_GPU_OF_AGENT = (f"{_GPU}.base", f"{_GPU}.families", f"{_GPU}.host_stubs", *_GPU_OF_CAPTURES)
# Who asks which families there are.
_KNOW_FAMILIES = {"devices.choice", "devices.listings", "doctor.checks", "doctor.gpu"}

# What gpu/ may know of agent/: what it measures into, and how files are read that a `Host` opened.
_AGENT_OF_GPU = tuple(
    f"{_PREFIX}.{name}" for name in ("elf", "file_questions", "losses", "model", "target_files")
)
# Of the files of targets, only what a host hands out: no guard, no path.
_TARGET_FILES_OF_GPU = {
    f"{_PREFIX}.target_files.{name}" for name in ("TargetFile", "BadTargetFile")
}

# They read a capture, and have to work where nothing can be recorded.
_UNPRIVILEGED = ("commands.report", "commands.stats", "commands.diff")


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            # `from package import name` may mean a module of it.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(module: str) -> str:
    return "" if module == "__init__" else module.partition(".")[0]


def _parts_known(module: str) -> set[str]:
    """The parts of agent/ that a module imports."""
    found = set()
    for name in _imports(_modules("agent")[module]):
        if name == _PREFIX or name.startswith(f"{_PREFIX}."):
            first = name.removeprefix(_PREFIX).lstrip(".").partition(".")[0]
            found.add(first if first in _MAY_IMPORT else "")
    return found - {_part(module)}


def _who_imports(package: str) -> list[str]:
    return [
        module
        for module, tree in _modules("agent").items()
        if any(f"{name}.".startswith(f"{package}.") for name in _imports(tree))
    ]


def test_every_part_has_its_rule() -> None:
    assert {_part(module) for module in _modules("agent")} == set(_MAY_IMPORT)


@pytest.mark.parametrize("part", _MAY_IMPORT)
def test_imports_follow_the_arrows(part: str) -> None:
    wrong = {
        module: sorted(_parts_known(module) - _MAY_IMPORT[part])
        for module in _modules("agent")
        if _part(module) == part
    }
    assert {module: parts for module, parts in wrong.items() if parts} == {}


def test_bcc_is_imported_in_one_module() -> None:
    assert _who_imports("bcc") == ["kernel.compile"]


def test_captures_are_written_by_recordings_only() -> None:
    assert {_part(m) for m in _who_imports(f"{_PREFIX}.capture.writer")} <= {
        "devices",
        "sinks",
        "recording",
        "commands",
        "fleet",
    }


@pytest.mark.parametrize("module", _UNPRIVILEGED)
def test_a_capture_is_read_without_what_recording_needs(module: str) -> None:
    assert _parts_known(module) & {"recording", "doctor", "symbols"} == set()
    assert f"{_PREFIX}.capture.writer" not in {
        n.rpartition(".")[0] for n in _imports(_modules("agent")[module])
    }


def _is_of(name: str, packages: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def test_few_parts_know_the_device_half() -> None:
    assert {_part(module) for module in _who_imports(_GPU)} <= _MAY_IMPORT_GPU


def test_reports_know_no_device() -> None:
    found = {
        (module, name)
        for module, tree in _modules("agent").items()
        if _part(module) == "reports" or module in _UNPRIVILEGED
        for name in _imports(tree)
        if _is_of(name, [_GPU]) and not _is_of(name, _GPU_OF_CAPTURES)
    }
    assert found == set()


def test_the_device_half_knows_what_it_measures_and_nothing_else_of_the_agent() -> None:
    assert {
        (module, name)
        for module, tree in _modules("gpu").items()
        for name in _imports(tree)
        if _is_of(name, ["aiflame"]) and not _is_of(name, [_GPU, *_AGENT_OF_GPU])
    } == set()


def test_families_read_files_that_a_host_opened() -> None:
    target_files = f"{_PREFIX}.target_files"
    found = {name for tree in _modules("gpu").values() for name in _imports(tree)}
    assert {name for name in found if _is_of(name, [target_files])} <= _TARGET_FILES_OF_GPU


def test_the_agent_knows_families_by_their_list_alone() -> None:
    found = {
        (module, name)
        for module, tree in _modules("agent").items()
        for name in _imports(tree)
        if _is_of(name, [_GPU])
    }
    assert {(m, name) for m, name in found if not _is_of(name, _GPU_OF_AGENT)} == set()
    assert {m for m, name in found if _is_of(name, [f"{_GPU}.families"])} == _KNOW_FAMILIES


def test_families_know_each_other_no_more_than_the_agent_does() -> None:
    folders = {module.partition(".")[0] for module in _modules("gpu") if module.endswith(".family")}
    assert folders, "where are the families?"
    assert {
        (module, name)
        for module, tree in _modules("gpu").items()
        for name in _imports(tree)
        for folder in folders - {module.partition(".")[0]}
        if module != "families" and _is_of(name, [f"{_GPU}.{folder}"])
    } == set()


def test_what_reports_know_of_the_device_half_knows_no_device() -> None:
    # Nor does it need anything but numpy: a capture is read where nothing can be recorded.
    of_captures = {
        module: tree
        for module, tree in _modules("gpu").items()
        if _is_of(f"{_GPU}.{module}", _GPU_OF_CAPTURES)
    }
    allowed = ("numpy", *_AGENT_OF_GPU, *_GPU_OF_CAPTURES, *sys.stdlib_module_names)
    assert {
        (module, name)
        for module, tree in of_captures.items()
        for name in _imports(tree)
        if not _is_of(name, allowed)
    } == set()
    assert len(of_captures) > 2, "the prefixes fit none any more"
