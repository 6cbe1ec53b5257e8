# SPDX-License-Identifier: Apache-2.0
"""Packages of other releases and distributions, fetched by apt and checked by its signatures.

Each suite gets an apt of its own: a folder with its lists, an empty status file, and no part of the
host's configuration. Nothing is installed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kernels.catalogue import DEBIAN, Archive, Kernel

# Where Debian keeps the keys of Ubuntu's archive: in its releases from the thirteenth on.
_KEYRING_SUITE = "trixie"

# What makes up a kernel. Which of these there are differs: Ubuntu splits the modules off, Debian
# since 2026 the rest too. Unsigned images are the same again.
_PART = re.compile(r"^ *(?:Depends: )?(linux-(?:image|modules|binary|base)-[0-9]\S*)$", re.M)


class ArchiveError(Exception):
    """An archive was not reached, or has no such package. The message names the archive."""


class Suite:
    """One release of an archive, with its list of packages brought up to date.

    Args:
        archive: The archive.
        suite: The release.
        folder: Where apt keeps what belongs to it.
        keyring: The keys that have to have signed it.

    Raises:
        ArchiveError: It was not reached.
    """

    def __init__(self, archive: Archive, suite: str, folder: Path, keyring: Path) -> None:
        self._archive, self._suite, self._folder = archive, suite, folder
        for name in ("etc/apt/apt.conf.d", "var/lib/apt/lists/partial", "var/cache/apt"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        line = f"deb [signed-by={keyring}] {archive.uri} {suite} main\n"
        (folder / "etc/apt/sources.list").write_text(line)
        # Without it a list that was not fetched is a warning, and the one before is used.
        self._apt("apt-get", "-o", "APT::Update::Error-Mode=any", "update")

    def _apt(self, program: str, *arguments: str, folder: Path | None = None) -> str:
        settings = {
            "Dir": self._folder,
            "Dir::State::status": self._folder / "status",
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::Retries": 1,
        }
        command = [program, "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
        command += arguments
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ArchiveError(f"{self._archive.uri} {self._suite}: {done.stderr.strip()}")
        return done.stdout

    def kernel_packages(self, package: str) -> list[str]:
        """Returns the packages that a meta package of kernels stands for."""
        told = self._apt("apt-cache", "depends", "--recurse", "--important", package)
        found = sorted({name for name in _PART.findall(told) if "unsigned" not in name})
        if not found:
            raise ArchiveError(f"{self._archive.uri} {self._suite}: {package} has no kernel")
        return found

    def unpack(self, packages: Sequence[str], folder: Path) -> None:
        """Downloads packages and unpacks them below a folder."""
        folder.mkdir(parents=True)
        downloads = folder / "packages"
        downloads.mkdir()
        self._apt("apt-get", "download", *packages, folder=downloads)
        for package in downloads.iterdir():
            subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
            package.unlink()
        downloads.rmdir()


def _keyring(archive: Archive, folder: Path) -> Path:
    """Returns the archive's keyring; fetches it where the host has none."""
    if archive.keyring.exists():
        return archive.keyring
    unpacked = folder / "keyring"
    if not unpacked.exists():
        suite = Suite(DEBIAN, _KEYRING_SUITE, folder / "debian", DEBIAN.keyring)
        suite.unpack([archive.keyring_package], unpacked)
    return unpacked / archive.keyring.relative_to("/")


def fetch_kernel(kernel: Kernel, apt_folder: Path, folder: Path) -> None:
    """Unpacks a kernel's packages below a folder.

    Raises:
        ArchiveError: They cannot be had.
    """
    keyring = _keyring(kernel.archive, apt_folder)
    suite = Suite(kernel.archive, kernel.suite, apt_folder, keyring)
    suite.unpack(suite.kernel_packages(kernel.package), folder)
