# SPDX-License-Identifier: Apache-2.0
"""Finds what strip took away: separate debug files and compressed mini symbol tables.

Searched in order (GDB manual, "Separate Debug Files" and "MiniDebugInfo"):
1. /usr/lib/debug/.build-id/xx/yyy.debug, accepted when its build id is the binary's;
2. the .gnu_debuglink name beside the binary, in .debug/ beside it, and under /usr/lib/debug,
   accepted when its CRC-32 is the one in the link;
3. .gnu_debugdata inside the binary: an xz-compressed ELF with a .symtab only.

Each is tried beneath the target's root, then beneath the host's. Nothing is fetched from
the network.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import posixpath
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.inspector.rootfs import open_beneath, open_root
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.frames import Problem
from aiflame.agent.target_files import BadTargetFile, TargetFile

_DEBUG_ROOT = "/usr/lib/debug"
# Mini symbol tables unpack to a few MB; the largest (browsers) to some 20.
MAX_DEBUGDATA_BYTES = 64 * 1024 * 1024
# xz -9 needs 65 MiB to unpack; Fedora packs with the default level, which needs 9.
_LZMA_MEMORY_BYTES = 128 * 1024 * 1024
# The checksum reads the whole file: about 1 s per GB.
MAX_LINKED_BYTES = 4 * 1024 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


class OpenElf:
    """An open ELF file: its descriptor, bytes and headers. The owner closes it.

    Args:
        fd: Descriptor to take over.

    Attributes:
        fd: The descriptor.
        file: Its bytes, within the budget of this file.
        image: Its headers.

    Raises:
        BadElf: It is not a sound ELF file; the descriptor is closed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.file = TargetFile(fd)
        try:
            self.image = ElfImage.read(self.file)
        except BadElf:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    @property
    def has_symbols(self) -> bool:
        """Has a full symbol table."""
        return has_symbols(self.image)

    @property
    def has_lines(self) -> bool:
        """Has DWARF with functions."""
        return has_lines(self.image)


def has_symbols(image: ElfImage) -> bool:
    """Whether a file has a full symbol table."""
    section = image.section(".symtab")
    return section is not None and section.size > 0


def has_lines(image: ElfImage) -> bool:
    """Whether a file has DWARF with functions."""
    return any(image.section(name) for name in (".debug_info", ".zdebug_info"))


class Candidate(NamedTuple):
    """A file that may be the debug file of a binary.

    Attributes:
        path: Where it was found, beneath a root.
        is_linked: Accepted by the checksum in the binary's link only.
        fd: Of the file.
    """

    path: str
    is_linked: bool
    fd: int


def open_candidates(
    build_id: str, link: str, binary_path: str, root_path: str
) -> Iterator[Candidate]:
    """Opens what may be the debug file of a binary, one after the other; the caller closes them.

    Args:
        build_id: Of the binary, "" if it has none.
        link: The name in its .gnu_debuglink, "" if it has none.
        binary_path: Its path inside the target's root, "" if unknown.
        root_path: The target's root directory, "" for the host's only.
    """
    with contextlib.ExitStack() as stack:
        for root_path_or_host in dict.fromkeys(path for path in (root_path, "/") if path):
            try:
                root = open_root(root_path_or_host)
            except OSError:
                continue
            stack.callback(os.close, root)
            for path, is_linked in _locations(build_id, link, binary_path):
                with contextlib.suppress(OSError):  # nearly all are empty
                    yield Candidate(path, is_linked, open_beneath(root, path))


def find_debug_file(
    binary: OpenElf,
    candidates: Iterator[Candidate],
    checksum: Callable[[Candidate], int],
    problems: list[Problem],
) -> OpenElf | None:
    """The debug file of a binary that is not complete; the caller closes it.

    Args:
        binary: The binary.
        candidates: Asked for one after the other.
        checksum: CRC-32 of a candidate.
        problems: Files that were found but do not belong to the binary are added here.
    """
    if binary.has_symbols and binary.has_lines:
        return None
    for candidate in candidates:
        try:
            found = OpenElf(candidate.fd)
        except BadElf as error:
            problems.append(Problem(LossKind.BAD_DEBUG_FILE, f"{candidate.path}: {error}"))
            continue
        reason = _mismatch(found, binary.image, candidate, checksum)
        if not reason:
            return found
        found.close()
        problems.append(Problem(LossKind.BAD_DEBUG_FILE, f"{candidate.path}: {reason}"))
    return None if binary.has_symbols else _mini(binary, problems)


def _mismatch(
    found: OpenElf, image: ElfImage, candidate: Candidate, checksum: Callable[[Candidate], int]
) -> str:
    """Why a debug file does not belong to the binary, "" when it does."""
    if found.image.machine != image.machine or found.image.bits != image.bits:
        return "it is for another machine"
    if image.build_id and found.image.build_id != image.build_id:
        return "its build id differs"
    if not candidate.is_linked or image.debuglink is None:
        return ""
    if found.image.size_bytes > MAX_LINKED_BYTES:
        return "it is too large to check"
    return "" if checksum(candidate) == image.debuglink.crc else "its checksum differs"


class Checksums:
    """CRC-32 of files, each read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], int] = {}

    def of(self, fd: int) -> int:
        """That of an open file."""
        facts = os.fstat(fd)
        key = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if key not in self._known:
            crc = 0
            for chunk in _chunks(fd, facts.st_size):
                crc = zlib.crc32(chunk, crc)
            self._known[key] = crc
        return self._known[key]


def _chunks(fd: int, size: int) -> Iterator[bytes]:
    for offset in range(0, size, _CHUNK_BYTES):
        yield os.pread(fd, min(_CHUNK_BYTES, size - offset), offset)


def _locations(build_id: str, link: str, binary_path: str) -> Iterator[tuple[str, bool]]:
    """Paths to try, and whether the checksum of the link must match."""
    if len(build_id) > 2:
        yield f"{_DEBUG_ROOT}/.build-id/{build_id[:2]}/{build_id[2:]}.debug", False
    if link and binary_path.startswith("/"):
        directory = posixpath.dirname(binary_path).rstrip("/")
        if posixpath.basename(binary_path) != link:
            yield f"{directory}/{link}", True
        yield f"{directory}/.debug/{link}", True
        yield f"{_DEBUG_ROOT}{directory}/{link}", True


def _mini(binary: OpenElf, problems: list[Problem]) -> OpenElf | None:
    section = binary.image.section(".gnu_debugdata")
    if section is None or section.size == 0:
        return None
    try:
        packed = binary.file.read(min(section.size, MAX_DEBUGDATA_BYTES), section.file_offset)
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY_BYTES)
        unpacked = unpacker.decompress(packed, MAX_DEBUGDATA_BYTES)
        if not unpacker.eof:
            raise BadElf("cut, or over the limit")
        fd = os.memfd_create("gnu_debugdata", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(unpacked)
        return OpenElf(fd)
    except (lzma.LZMAError, BadTargetFile, MemoryError) as error:
        problems.append(Problem(LossKind.BAD_DEBUG_FILE, f".gnu_debugdata: {error}"))
        return None
