# SPDX-License-Identifier: Apache-2.0
"""Files of kernels that were sampled, kept in captures which nobody lists kernels for.

A recording lists kernels by itself when it is over. An agent's does not end; its captures keep the
files in which processes had their kernels mapped, as PoCL has them, and reports list these.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from aiflame.agent.capture.code_objects import StoredCode
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import NONE, Window
from aiflame.agent.symbolize.files import Files
from aiflame.agent.symbols.file_facts import FileFacts


@dataclass(frozen=True, slots=True)
class _File:
    family: str  # of devices
    process: int  # who has it mapped
    fd: int


# PoCL's have some 15 KB each. They are kept as they are, and a process can make them as large as it
# likes, after they were mapped, too: of one, of all that a process brings, and of all together.
_MAX_FILE_BYTES = 4 << 20
_MAX_BYTES_OF_PROCESS, _MAX_BYTES = 16 << 20, 64 << 20


class KernelFiles:
    """Puts files of kernels into a capture.

    Args:
        stored: Of the capture.
        files: Opens them.
        file_facts: Knows which are not to be read here.
        keep: Takes the number and the bytes of each file that is in the capture.
    """

    def __init__(
        self,
        stored: StoredCode,
        files: Files,
        file_facts: FileFacts,
        keep: Callable[[int, bytes], None] = lambda *_: None,
    ) -> None:
        self._keep = keep
        self._stored = stored
        self._files = files
        self._remote = file_facts.guard.remote
        self._numbers: dict[int, int | None] = {}  # by code
        self._of_binary: dict[int, int | None] = {}
        self._bytes: Counter[int] = Counter()  # that were read, by process

    def put(self, window: Window, lose: Callable[[LossKind], None]) -> dict[int, int | None]:
        """Puts those of a window there; returns the number of a code object by code.

        Args:
            window: The window.
            lose: Counts what finds no room.
        """
        for code, binary, file in self._new(window):
            if binary not in self._of_binary:
                self._of_binary[binary] = self._put(binary, file, lose)
            self._numbers[code] = self._of_binary[binary]
        return self._numbers

    def _put(self, binary: int, file: _File, lose: Callable[[LossKind], None]) -> int | None:
        room = min(
            _MAX_FILE_BYTES,
            _MAX_BYTES_OF_PROCESS - self._bytes[file.process],
            _MAX_BYTES - self._bytes.total(),
        )
        data = self._read(file.fd, room + 1)  # one byte more tells what is too large
        if len(data) > room:
            lose(LossKind.DEVICE_CODE_NOT_STORED)
            return None
        self._bytes[file.process] += len(data)
        number = self._stored.put(file.family, file.process, data, lose)
        if number is not None:
            self._keep(binary, data)
        return number

    def _new(self, window: Window) -> Iterator[tuple[int, int, _File]]:
        texts = window.texts
        family_of = dict(window.devices[["device", "family"]].tolist())
        process_of = dict(window.kernels[["kernel", "process"]].tolist())
        codes = {code: rest for code, *rest in window.codes.tolist()}
        binaries = {number: rest for number, *rest in window.binaries.tolist()}
        for code, device in np.unique(window.device_samples[["code", "device"]]).tolist():
            kernel, binary = codes[code]
            if binary == NONE or code in self._numbers:
                continue
            path, build_id = binaries[binary]
            fd = self._files.open(binary, texts[path], texts[build_id]).fd
            if fd is not None and fd not in self._remote:  # else who serves it may not answer
                yield code, binary, _File(texts[family_of[device]], process_of[kernel], fd)

    def _read(self, fd: int, most_bytes: int) -> bytes:
        try:
            return os.pread(fd, min(os.fstat(fd).st_size, most_bytes), 0)
        except OSError:
            return b""
