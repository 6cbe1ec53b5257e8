# SPDX-License-Identifier: Apache-2.0
"""The CPython interpreters of this machine that tests run programs on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
# What python/fetch.sh makes: Debian's own builds, with the C library that they need.
_DEBIAN = Path(
    os.environ.get("AIFLAME_TEST_PYTHONS", Path(__file__).parents[1] / "build/pythons")
).resolve()
_OF_DEBIAN = ("3.14", "3.15")
# Any others, used where they are: in folders like 3.14t or 3.13-uv that have bin/python3.14t.
_MORE = os.environ.get("AIFLAME_TEST_MORE_PYTHONS", _DEBIAN.with_name("more-pythons"))
_OTHERS = {
    path.parents[1].name: path
    for path in sorted(Path(_MORE).resolve().glob("3.*/bin/python3.*[0-9t]"))
}
_RELEASES = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13", *_OF_DEBIAN)
VERSIONS = (*_RELEASES, "system", *_OTHERS)

# The same interpreter in libpython, whose thread-local variables are found in another way.
LINKED = "3.15 linked"
_MAIN = "int Py_BytesMain(int, char **); int main(int c, char **v) { return Py_BytesMain(c, v); }"

# Runs a program of another /usr, in a mount namespace of its own, under the same process id. It is
# what programs in containers are: its files are others than those of the same names here.
_IN_DEBIAN = """\
#!/bin/sh
exec unshare --mount sh -c 'mount --bind "$0" /usr && exec {program} "$@"' '{usr}' "$@"
"""


def find_executable(version: str) -> Path | None:
    """Returns the interpreter of a version, None where there is none."""
    if version == "system":
        return Path("/usr/bin/python3").resolve()
    if version in _OTHERS:
        return _OTHERS[version]
    found = sorted(_PYENV.glob(f"{version}.*/bin/python{version}"))
    if found or version not in (*_OF_DEBIAN, LINKED):
        return found[-1] if found else None
    name = f"python{version.split()[0]}"
    if os.geteuid() != 0 or not (_DEBIAN / "usr/bin" / name).exists():
        return None  # only root may mount
    if version == LINKED:
        return _in_debian(f"{name}-linked", _linked(name))
    return _in_debian(name, Path("/usr/bin") / name)


def _is_here(version: str) -> bool:
    """Whether a release is here, as far as that is known without making anything."""
    if version not in _RELEASES:
        return False
    is_debians = os.geteuid() == 0 and (_DEBIAN / "usr/bin" / f"python{version}").exists()
    return is_debians or any(_PYENV.glob(f"{version}.*/bin/python{version}"))


def _linked(name: str) -> Path:
    """Returns a program that is linked with libpython."""
    program = _DEBIAN / f"{name}-linked.bin"
    if not program.exists():
        library = _DEBIAN / f"usr/lib/x86_64-linux-gnu/lib{name}.so.1.0"
        # Of a newer C library than this machine's.
        flags = ("-x", "c", "-", "-Wl,--unresolved-symbols=ignore-in-shared-libs")
        made = program.with_suffix(f".{os.getpid()}")
        command = ["gcc", *flags, "-x", "none", library, "-o", made]
        subprocess.run(command, input=_MAIN, text=True, check=True)
        made.rename(program)
    return program


def _in_debian(name: str, program: Path) -> Path:
    """Returns what runs a program of Debian's."""
    script = _DEBIAN / name
    text = _IN_DEBIAN.format(program=program, usr=_DEBIAN / "usr")
    if not script.exists() or script.read_text() != text:
        made = script.with_suffix(f".{os.getpid()}")  # other tests may run it now
        made.write_text(text)
        made.chmod(0o755)
        made.rename(script)
    return script


def executable(version: str) -> Path:
    """Returns the interpreter of a version; skips the test where there is none."""
    found = find_executable(version)
    if found is None and version in (*_OF_DEBIAN, LINKED):
        pytest.skip(f"no CPython {version[:4]} of Debian's here: tests/python/fetch.sh (root)")
    if found is None:
        pytest.skip(f"no pyenv CPython {version} on this machine")
    return found


def each(versions: Sequence[str] = VERSIONS) -> list[Any]:
    """Returns versions, maybe with words after them, as parameters of a test or a fixture.

    A property that a test holds all interpreters to is asked of the oldest and the newest release
    that are here, and of the distribution's own, wherever tests run; of all where breadth is asked
    for (`make test BREADTH=1`).
    """
    here = [name for name in versions if _is_here(name.partition(" ")[0])]
    always = {*here[:1], *here[-1:], "system"}
    return [
        version if version in always else pytest.param(version, marks=pytest.mark.breadth)
        for version in versions
    ]


def chosen(request: pytest.FixtureRequest, names: Collection[str] = VERSIONS) -> list[str]:
    """Returns which of these parameters the chosen tests of a module have; all if none has any."""
    own = [item for item in request.session.items if item.path == request.path]
    calls = [call for item in own if (call := getattr(item, "callspec", None)) is not None]
    values = {value for call in calls for value in call.params.values() if isinstance(value, str)}
    return [name for name in names if name in values] or [*names]


def has_gil(version: str) -> bool:
    """Whether the threads of an interpreter take turns: of 3.14t they do not."""
    return not version.partition("-")[0].endswith("t")


def prefix(python: Path) -> Path:
    """Returns where what belongs to an interpreter is: include, lib."""
    return _DEBIAN / "usr" if python.parent == _DEBIAN else python.parents[1]
