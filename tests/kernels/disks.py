# SPDX-License-Identifier: Apache-2.0
"""What a guest boots from: a kernel, an initramfs, and three disks.

The first disk is a bare Debian, made once; the second the checkout with its .venv; the third what
one boot is for. All are written by mke2fs from a folder: nothing is mounted on the host.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernels.archive import ArchiveError, fetch_kernel
from kernels.catalogue import DEBIAN, GUEST_PACKAGES, GUEST_SUITE, Kernel

_HERE = Path(__file__).parent
CHECKOUT = _HERE.parents[1]

# What guests run: the sources, and the interpreter's environment less its largest development
# tools, which nothing in a guest imports.
_CHECKOUT_PARTS = ("agent", "bpf", "gpu", "deploy", "tests", "pyproject.toml", ".venv")
_LEFT_OUT = ("mypy", "*mypyc*", "ast_serialize", "clang_format", "ruff", "py-spy", "cache")

# Drivers that are modules in some kernels and built into others.
_MODULES = ("virtio_pci", "virtio_blk", "ext4")

# Room to write in: file systems need some 5 % for themselves, guests a few MB for captures.
_ROOM_MB = 128


@dataclass(frozen=True, slots=True)
class Bootable:
    """A kernel that QEMU can boot.

    Attributes:
        release: As `uname -r` says.
        image: Its vmlinuz.
        initramfs: What loads the drivers of the disks.
    """

    release: str
    image: Path
    initramfs: Path


def _is_made(stamp: Path, *recipe: object) -> bool:
    """Whether what a stamp stands for was made from the same recipe."""
    return stamp.exists() and stamp.read_text() == _digest(*recipe)


def _digest(*recipe: object) -> str:
    return hashlib.sha256(repr(recipe).encode()).hexdigest()


def prepare_kernel(name: str, kernel: Kernel, cache: Path) -> Bootable:
    """Returns a kernel from the cache; fetches it when it is not there.

    Raises:
        ArchiveError: It cannot be fetched.
    """
    folder = cache / name
    recipe = (kernel, _MODULES, (_HERE / "initramfs.sh").read_text())
    stamp = folder / "made"
    if not _is_made(stamp, *recipe):
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache) as unpacked:
            tree = Path(unpacked) / "tree"
            fetch_kernel(kernel, cache / "apt" / name, tree)
            folder.mkdir()
            _take_kernel(tree, folder)
        stamp.write_text(_digest(*recipe))
    release = (folder / "release").read_text()
    return Bootable(release, folder / "vmlinuz", folder / "initramfs")


def _take_kernel(tree: Path, folder: Path) -> None:
    """Takes the kernel and the drivers of its disks out of unpacked packages."""
    if not (tree / "lib").exists():
        (tree / "lib").symlink_to("usr/lib")  # as base-files has it
    (modules,) = (tree / "lib/modules").iterdir()
    release = modules.name
    # Ubuntu and Debian keep it in /boot, Debian since 2026 beside its modules.
    images = (tree / f"boot/vmlinuz-{release}", modules / "vmlinuz")
    shutil.copyfile(next(image for image in images if image.exists()), folder / "vmlinuz")
    subprocess.run(["depmod", "--basedir", tree, release], check=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for inside in ("bin", "dev", "disk", "modules", "proc", "sys"):
            (root / inside).mkdir()
        order = [_copy_module(path, root / "modules") for path in _module_files(tree, release)]
        (root / "modules/order").write_text("".join(f"{module}\n" for module in order))
        shutil.copy("/bin/busybox", root / "bin")
        for applet in ("insmod", "mount", "sh", "sleep", "switch_root"):
            (root / "bin" / applet).symlink_to("busybox")
        shutil.copyfile(_HERE / "initramfs.sh", root / "init")
        (root / "init").chmod(0o755)
        names = [".", *(str(path.relative_to(root)) for path in sorted(root.rglob("*")))]
        archive = subprocess.run(
            ["busybox", "cpio", "-o", "-H", "newc"],
            cwd=root,
            input="".join(f"{name}\n" for name in names).encode(),
            capture_output=True,
            check=True,
        )
    (folder / "initramfs").write_bytes(gzip.compress(archive.stdout, 1))
    (folder / "release").write_text(release)


def _module_files(tree: Path, release: str) -> list[Path]:
    """Returns the files of the drivers and of all that they need, in the order to load them."""
    files: dict[str, None] = {}
    for module in _MODULES:
        told = subprocess.run(
            ["modprobe", "--dirname", tree, "--set-version", release, "--show-depends", module],
            capture_output=True,
            text=True,
            check=True,
        )
        # "insmod FILE", or "builtin NAME".
        words = [line.split() for line in told.stdout.splitlines()]
        files |= dict.fromkeys(word[1] for word in words if word[0] == "insmod")
    return [Path(file) for file in files]


def _copy_module(file: Path, folder: Path) -> str:
    """Copies a module, unpacked: busybox cannot."""
    content = file.read_bytes()
    if file.suffix == ".xz":
        content = lzma.decompress(content)
    elif file.suffix == ".zst":
        command = ["zstd", "-dqc", str(file)]
        content = subprocess.run(command, capture_output=True, check=True).stdout
    name = file.name.partition(".ko")[0] + ".ko"
    (folder / name).write_bytes(content)
    return name


def prepare_base(cache: Path) -> Path:
    """Returns the disk of a bare Debian from the cache; makes it when it is not there.

    Raises:
        ArchiveError: The archive was not reached.
    """
    disk, stamp = cache / "base.ext4", cache / "base.made"
    recipe = (GUEST_SUITE, GUEST_PACKAGES, (_HERE / "guest-init.sh").read_text())
    if _is_made(stamp, *recipe):
        return disk
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        root = Path(name) / "root"
        packages = f"--include={','.join(GUEST_PACKAGES)}"
        command = ["debootstrap", "--variant=minbase", packages, GUEST_SUITE, root, DEBIAN.uri]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stdout.strip().splitlines()[-3:]
            raise ArchiveError(f"{DEBIAN.uri} {GUEST_SUITE}: debootstrap: {'; '.join(lines)}")
        for leftover in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc"):
            shutil.rmtree(root / leftover)
        shutil.copyfile(_HERE / "guest-init.sh", root / "guest-init")
        (root / "guest-init").chmod(0o755)
        make_disk(root, disk)
    stamp.write_text(_digest(*recipe))
    return disk


def make_disk(folder: Path, disk: Path) -> None:
    """Writes a folder's content as an ext4 file system, with some room."""
    used_kb = int(subprocess.check_output(["du", "-sk", folder]).split()[0])
    size_mb = used_kb * 11 // 10 // 1024 + _ROOM_MB
    disk.unlink(missing_ok=True)
    command = ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", folder, disk]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(
        [*command, f"{size_mb}M"], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def make_checkout_disk(disk: Path, with_bytecode: bool) -> None:
    """Writes the checkout and its .venv as a disk.

    Args:
        disk: Where to.
        with_bytecode: With the compiled kernel programs; without, guests compile them.
    """
    left_out = shutil.ignore_patterns(*_LEFT_OUT, *([] if with_bytecode else ["programs.bin"]))
    # Under emulation each module takes a tenth of a second to compile.
    parts = [CHECKOUT / part for part in ("agent", "bpf", "gpu", "tests")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *parts], check=True)
    with tempfile.TemporaryDirectory(dir=disk.parent) as name:
        for part in _CHECKOUT_PARTS:
            source, copy = CHECKOUT / part, Path(name) / part
            if source.is_dir():
                shutil.copytree(source, copy, symlinks=True, ignore=left_out)
            else:
                shutil.copy2(source, copy)
        make_disk(Path(name), disk)


def read_disk(disk: Path, inside: str, folder: Path) -> None:
    """Copies a folder of an ext4 file system out of it."""
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    command = ["debugfs", "-R", f"rdump {inside} {folder}", disk]
    subprocess.run(command, check=True, capture_output=True, env=environment)
