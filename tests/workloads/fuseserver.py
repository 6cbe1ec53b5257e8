# SPDX-License-Identifier: Apache-2.0
"""Serves one file, `program`, by FUSE (linux/fuse.h, fs/fuse/dev.c), until it is told to stop.

Arguments: the file, where to mount, and a path: once there is such a file, questions of the kinds
that are named in it, by their numbers, are not answered any more.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from pathlib import Path

_HEADER = struct.Struct("<IIQQIIII")  # length, kind, number, node
_ANSWER = struct.Struct("<IiQ")  # length, error, number
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS = 1, 2, 3, 14, 15, 17
_RELEASE, _FLUSH, _INIT, _OPENDIR, _INTERRUPT, _BATCH_FORGET = 18, 25, 26, 27, 36, 42
_ROOT, _FILE = 1, 2
_MAX_QUESTION_BYTES = 1 << 18


class _Server:
    def __init__(self, contents: bytes) -> None:
        self._contents = contents

    def _facts(self, node: int) -> bytes:
        """A struct fuse_attr."""
        is_root = node == _ROOT
        size = 0 if is_root else len(self._contents)
        mode = (stat.S_IFDIR if is_root else stat.S_IFREG) | 0o755
        return struct.pack("<6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, kind: int, node: int, body: bytes) -> bytes | int:
        """Returns what is asked for, or an error number."""
        if kind == _INIT:
            return struct.pack("<4I2H2I2H2I28x", 7, 31, 65536, 0, 12, 10, 131072, 1, 1, 0, 0, 0)[
                :64
            ]
        if kind == _LOOKUP:
            is_there = body.rstrip(b"\0") == b"program"
            entry = struct.pack("<4Q2I", _FILE, 0, 0, 0, 0, 0) + self._facts(_FILE)
            return entry if is_there else errno.ENOENT
        if kind == _GETATTR:
            return struct.pack("<Q2I", 0, 0, 0) + self._facts(node)
        if kind in (_OPEN, _OPENDIR):
            return struct.pack("<Q2I", 1, 0, 0)
        if kind == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self._contents[offset : offset + size]
        if kind == _STATFS:
            return struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        return b"" if kind in (_RELEASE, _FLUSH) else errno.ENOSYS


def main() -> None:
    source, mount, silence = map(Path, sys.argv[1:])
    server = _Server(source.read_bytes())
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"test", os.fsencode(mount), b"fuse", 0, options) == 0, ctypes.get_errno()
    print("ready", flush=True)
    while True:
        question = os.read(device, _MAX_QUESTION_BYTES)
        _, kind, number, node, *_ = _HEADER.unpack_from(question)
        is_silent = silence.exists() and str(kind) in silence.read_text().split()
        if is_silent or kind in (_FORGET, _INTERRUPT, _BATCH_FORGET):
            continue
        found = server.answer(kind, node, question[_HEADER.size :])
        data, error = (b"", found) if isinstance(found, int) else (found, 0)
        os.write(device, _ANSWER.pack(_ANSWER.size + len(data), -error, number) + data)


if __name__ == "__main__":
    main()
