# SPDX-License-Identifier: Apache-2.0
"""The kernels that are booted: where each distribution keeps its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Archive:
    """A distribution's package archive.

    Attributes:
        uri: As in sources.list.
        keyring: The file of its signing keys.
        keyring_package: What has that file in it: a package of `DEBIAN`, which is trusted.
    """

    uri: str
    keyring: Path
    keyring_package: str


DEBIAN = Archive(
    "http://deb.debian.org/debian",
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    "debian-archive-keyring",
)
UBUNTU = Archive(
    "http://archive.ubuntu.com/ubuntu",
    Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg"),
    "ubuntu-keyring",
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A distribution's stock kernel.

    Attributes:
        label: The distribution, as the table of results names it.
        archive: Where its packages are.
        suite: The release's name in the archive. Ubuntu's holds the kernel of the release day, with
            the oldest verifier of its line; Debian's that of the last point release.
        package: The package that depends on the kernel of the day. The cloud kernels of Debian are
            built from the same source as the others, with fewer drivers.
    """

    label: str
    archive: Archive
    suite: str
    package: str


_CLOUD = "linux-image-cloud-amd64"
_GENERIC = "linux-image-generic"

KERNELS = {
    "5.10": Kernel("Debian 11", DEBIAN, "bullseye", _CLOUD),
    "5.15": Kernel("Ubuntu 22.04", UBUNTU, "jammy", _GENERIC),
    "6.1": Kernel("Debian 12", DEBIAN, "bookworm", _CLOUD),
    "6.8": Kernel("Ubuntu 24.04", UBUNTU, "noble", _GENERIC),
    "6.12": Kernel("Debian 13", DEBIAN, "trixie", _CLOUD),
    "unstable": Kernel("Debian unstable", DEBIAN, "sid", _CLOUD),
}

# The user space of all guests: its CPython is that of the checkout's .venv, which is used inside.
# `make kernels` asks for a host of the same release.
GUEST_SUITE = "bookworm"
GUEST_PACKAGES = (
    "busybox-static",
    "iproute2",
    "kmod",
    "ocl-icd-libopencl1",
    "pocl-opencl-icd",
    "procps",
    "python3",
    "python3-bpfcc",
    "systemd",
)
