# SPDX-License-Identifier: Apache-2.0
"""Device code that a compiler put into a program or a library: section .nv_fatbin of its file.

NVIDIA documents no format. This is what nvcc and fatbinary of CUDA 13.0 write in each of their
modes of compression, and what PyTorch 2.14 and the libraries of CUDA 12.9 are made of:

- Containers follow one another, aligned to 8 bytes; most are what one source file has.
- A container has entries: a cubin for one architecture, or text (PTX) to be compiled by the driver.
- An entry is as it is, or one block of LZ4, or one frame of zstd.

Of a container, the driver takes the cubin of the device's own architecture, or else the latest
earlier one of the same major number (CUDA C++ Programming Guide, "Binary Compatibility").

The file is a target's, and may hold anything: this is run by a process without rights. It may have
some GB, of which one question goes through as much as a quarter of a second allows.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import lz4.block
import zstandard
from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.file_questions import BadAnswer, Json, Question, rows, text, whole
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.gpu.nvidia.cubin import (
    MAX_FUNCTIONS,
    Cubin,
    NoCubinError,
    Readable,
    digest_of,
    unneeded,
    without,
)

_SECTION = ".nv_fatbin"
# Magic, version, size of this header, size of all entries.
_CONTAINER = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
# Kind, version, size of this header, size of the data that follows, size of it if it is compressed,
# where options are, two numbers of a version, architecture (90 for sm_90), where the name is, its
# length, flags, 0, size when it is not compressed.
_ENTRY = struct.Struct("<2HIQ2I2H3I3Q")
_KIND_CUBIN = 2
_FLAG_LZ4, _FLAG_ZSTD = 0x2000, 0x8000
_CHUNK_BYTES = 1 << 16

# Of a container. Those of cuSPARSE have 20: one for each architecture.
_MAX_ENTRIES = 1024
# Of a cubin that is not compressed, as more is not kept of any; the largest of PyTorch has 42 MB.
MAX_CUBIN_BYTES = 64 << 20
# For one question, what it goes through, and headers that it reads. Whoever asks may have other
# files, and reads headers for us one by one where a file system is the target's own. A question may
# read half a GB (target_files.MAX_BYTES), which zstd brings about in a quarter of a second.
_QUESTION_CPU_S, _QUESTION_BYTES, _MAX_HEADERS = 0.25, 128 << 20, 1024
# Of one question: each is a kernel that was sampled, in one cubin. A header has a kernel in as many
# cubins as there are files which include it.
_MAX_FOUND = 20_000
_DIGEST_BYTES = 16
# zlib's: zeros, and there are many, compress at any. Of an answer, which has 8 MiB, in base 64.
_COMPRESSION, _MAX_PACKED_BYTES = 1, 5 << 20


class Section(NamedTuple):
    """Where device code is in a file."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel in one of the cubins of a file.

    Attributes:
        cubin: Where its entry is in the file.
        name: Its linkage name.
        size: Of its code in bytes.
        digest: Of its code.
    """

    cubin: int
    name: str
    size: int
    digest: str


class Position(NamedTuple):
    """How far a file was searched: all before this entry of this container."""

    container: int
    entry: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What was found in a part of a file.

    Attributes:
        kernels: Of those that were looked for.
        unread: Cubins, and remainders of files, that are damaged or too large.
        rest: From where on to go on, None at the end.
    """

    kernels: tuple[Kernel, ...]
    unread: int
    rest: Position | None


class _Entry(NamedTuple):
    at: int  # of its header
    data_at: int
    size: int
    packed_size: int  # 0 where it is not compressed
    unpacked_size: int
    sm: int
    is_cubin: bool
    is_zstd: bool


class _Plain:
    """A cubin that is a part of a file."""

    def __init__(self, file: TargetFile, begin: int, size: int) -> None:
        self._file, self._begin, self._size = file, begin, size

    def read(self, size: int, offset: int) -> bytes:
        """See `Readable`."""
        return self._file.read(min(size, self._size - offset), self._begin + offset)


class _Unpacked:
    """A cubin in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int, offset: int) -> bytes:
        """See `Readable`."""
        return self._data[offset : offset + size]


def section(file: TargetFile) -> Json:
    """Returns offset and size of a file's device code; None where it has none."""
    try:
        found = ElfImage.read(file).section(_SECTION)
    except NotElf:
        return None
    return [found.file_offset, found.size] if found is not None and found.size else None


def search(
    file: TargetFile, end: int, container: int, entry: int, sm: int, digests: Sequence[str]
) -> Json:
    """Looks for kernels among the cubins that a device would take.

    Args:
        file: The file.
        end: Of its device code.
        container: Where to begin.
        entry: The same, within the container.
        sm: Of the device.
        digests: Of the names of kernels.
    """
    found: list[tuple[int, int, int, str]] = []
    headers = size = unread = 0
    deadline_s = time.thread_time() + _QUESTION_CPU_S
    try:
        while (container := _next_container(file, container, end)) < end:
            entries, next_container = _entries(file, container, end)
            for one in _taken(entries, sm):
                if one.at < entry:
                    continue
                try:
                    found += [*_kernels(_contents(file, one), one.at, digests)]
                except (BadTargetFile, NoCubinError):
                    unread += 1
                size += one.size + one.unpacked_size
                is_much = size > _QUESTION_BYTES or len(found) >= _MAX_FOUND
                if is_much or time.thread_time() > deadline_s:
                    return [found, unread, [container, one.at + 1]]
            container, entry = next_container, 0
            headers += len(entries)
            if headers >= _MAX_HEADERS:
                return [found, unread, [container, entry]]
    except BadTargetFile:
        unread += 1
    return [found, unread, None]


def _next_container(file: TargetFile, at: int, end: int) -> int:
    """Returns where the next container begins, or the end: linkers put zeros between them."""
    while at < end:
        data = file.read(min(_CHUNK_BYTES, end - at), at)
        if not data:
            raise BadTargetFile("a file that is cut")
        zeros = len(data) - len(data.lstrip(b"\0"))
        at += zeros
        if zeros < len(data):
            return at
    return end


def _entries(file: TargetFile, at: int, end: int) -> tuple[list[_Entry], int]:
    """Returns what a container has, and where what follows it may begin."""
    magic, _, header_size, size = _unpack(_CONTAINER, file, at)
    if magic != _MAGIC or header_size < _CONTAINER.size or header_size + size > end - at:
        raise BadTargetFile("no device code")
    end, at = at + header_size + size, at + header_size
    found: list[_Entry] = []
    while at < end:
        one = _entry(file, at)
        at = one.data_at + one.size
        if at > end or len(found) == _MAX_ENTRIES:
            raise BadTargetFile("entries that are too many, or reach too far")
        found.append(one)
    return found, end


def _entry(file: TargetFile, at: int) -> _Entry:
    fields = _unpack(_ENTRY, file, at)
    kind, _, header_size, size, packed_size, _, _, _, sm, _, _, flags, _, unpacked_size = fields
    if header_size < _ENTRY.size or packed_size > size:
        raise BadTargetFile("an entry that is none")
    is_packed = bool(flags & (_FLAG_LZ4 | _FLAG_ZSTD))
    return _Entry(
        at=at,
        data_at=at + header_size,
        size=size,
        packed_size=packed_size if is_packed else 0,
        unpacked_size=unpacked_size if is_packed else size,
        sm=sm,
        is_cubin=kind == _KIND_CUBIN,
        is_zstd=bool(flags & _FLAG_ZSTD),
    )


def _unpack(form: struct.Struct, file: TargetFile, at: int) -> tuple[int, ...]:
    data = file.read(form.size, at)
    if len(data) < form.size:
        raise BadTargetFile("a header that is cut")
    return form.unpack(data)


def _taken(entries: Sequence[_Entry], sm: int) -> list[_Entry]:
    """Returns those that a device takes: several, where some use what only its own model has."""
    fit = [one for one in entries if one.is_cubin and one.sm // 10 == sm // 10 and one.sm <= sm]
    best = max((one.sm for one in fit), default=0)
    return [one for one in fit if one.sm == best]


def _contents(file: TargetFile, entry: _Entry) -> Readable:
    """Returns the cubin of an entry; of one that is not compressed, without reading it."""
    if not 0 < entry.unpacked_size <= MAX_CUBIN_BYTES or entry.packed_size > MAX_CUBIN_BYTES:
        raise BadTargetFile("a cubin that is too large")
    if not entry.packed_size:
        return _Plain(file, entry.data_at, entry.size)
    file.spend(entry.unpacked_size)
    data = file.read(entry.packed_size, entry.data_at)
    try:
        return _Unpacked((_zstd if entry.is_zstd else _lz4)(data, entry.unpacked_size))
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, MemoryError) as error:
        raise BadTargetFile("a cubin that is damaged") from error


def _lz4(data: bytes, size: int) -> bytes:
    found: bytes = lz4.block.decompress(data, uncompressed_size=size)  # never more
    return found


def _zstd(data: bytes, size: int) -> bytes:
    # As much memory is taken as a frame says of itself.
    if zstandard.frame_content_size(data) > size:
        raise BadTargetFile("a cubin of another size")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)


def _kernels(
    cubin: Readable, at: int, digests: Sequence[str]
) -> Iterator[tuple[int, int, int, str]]:
    found = Cubin(cubin)
    for place, symbol in found.functions(digests).items():
        code = found.code_of(symbol)
        digest = hashlib.blake2b(code, digest_size=_DIGEST_BYTES).hexdigest()
        yield at, place, len(code), digest


def cubin(file: TargetFile, at: int, digests: Sequence[str]) -> Json:
    """Returns a cubin, with zeros for what listing some kernels takes nothing of.

    Args:
        file: The file.
        at: Where its entry is.
        digests: Of the names of the kernels.

    Returns:
        Its size, and the cubin, compressed by zlib and in base 64; None where it is no cubin.
    """
    entry = _entry(file, at)
    contents = _contents(file, entry)
    data = contents.read(entry.unpacked_size, 0)
    parts = unneeded(contents, digests)
    if parts is None:
        return None
    packed = zlib.compress(without(data, parts), _COMPRESSION)
    if len(packed) > _MAX_PACKED_BYTES:
        raise BadTargetFile("a cubin that is too large")
    return [len(data), base64.b64encode(packed).decode()]


def _checked_section(answer: Json) -> Section | None:
    if answer is None:
        return None
    offset, size = answer
    return Section(whole(offset), whole(size))


SECTION = Question(section, _checked_section)


def search_from(
    section: Section, position: Position, sm: int, names: Sequence[str]
) -> Question[Part]:
    """Kernels in a part of a file.

    Args:
        section: All of its device code.
        position: From where on.
        sm: Of the device, 90 for sm_90.
        names: Linkage names, `MAX_FUNCTIONS` at most.
    """
    end = section.offset + section.size

    def checked(answer: Json) -> Part:
        found, unread, rest = answer
        kernels = tuple(
            Kernel(
                cubin=whole(at, end),
                name=names[whole(place, len(names))],
                size=whole(size, MAX_CUBIN_BYTES + 1),
                digest=text(digest, 2 * _DIGEST_BYTES),
            )
            for at, place, size, digest in rows(found, _MAX_FOUND + MAX_FUNCTIONS)
        )
        further = None
        if rest is not None:
            container, entry = rest
            further = Position(whole(container, 1 << 63), whole(entry, 1 << 63))
        if further is not None and further <= position:
            raise BadAnswer("a search that goes back")
        return Part(kernels, whole(unread, 1 << 32), further)

    arguments = (end, *position, sm, [digest_of(name.encode()) for name in names])
    return Question(search, checked, arguments, is_kept=False)


def cubin_at(at: int, names: Sequence[str]) -> Question[bytes]:
    """A cubin of a file, without what listing kernels takes nothing of; b"" for none.

    Args:
        at: Where its entry is.
        names: Linkage names of the kernels, `MAX_FUNCTIONS` at most.
    """

    def checked(answer: Json) -> bytes:
        if answer is None:
            return b""
        size, packed = answer
        size = whole(size, MAX_CUBIN_BYTES + 1)
        packed = base64.b64decode(packed, validate=True)
        try:
            data = zlib.decompressobj().decompress(packed, size + 1)  # one more tells a lie
        except zlib.error as error:
            raise BadAnswer("no cubin") from error
        if len(data) != size:
            raise BadAnswer("a cubin of another size")
        return data

    digests = [digest_of(name.encode()) for name in names]
    return Question(cubin, checked, (at, digests), is_kept=False)
