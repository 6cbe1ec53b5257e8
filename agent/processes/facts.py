# SPDX-License-Identifier: Apache-2.0
"""Tells windows who the processes and threads are, and what they have mapped."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from aiflame.agent.model.window import COLUMNS, NO_TIME, NONE, FactsTaker, rows_of
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.identity import identity_of
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.symbols.frames import clean_name

_UINT64 = 1 << 64


class ProcessFacts:
    """Facts of a process table that windows have to know.

    Args:
        window: Where they go.
        table: Process table.
        images: ELF headers of its binaries.
    """

    def __init__(self, window: FactsTaker, table: ProcessTable, images: ElfImages) -> None:
        self._window = window
        self._table = table
        self._images = images
        self._binaries: set[int] = set()
        self._cgroups: dict[str, int] = {}
        self._next_cgroup = 0
        self._images_in: dict[str, set[int]] = {}
        self._told_in: dict[int, str] = {}  # the path of each image

    def tell(self, end_ns: int) -> None:
        """Tells what is new.

        Args:
            end_ns: When the recording ends, monotonic: who ends later lives.
        """
        images, threads = self._table.take_changed()
        text = self._window.text
        rows = [(t.index, t.image.index, t.tid, text(t.shown_name)) for t in threads]
        if rows:
            self._window.define("threads", np.array(rows, COLUMNS["threads"].dtype))
        for image in images:
            self._tell_process(image, end_ns)
            if image.laid:
                self._tell_mappings(image)

    def _tell_process(self, image: ProcessImage, end_ns: int) -> None:
        text = self._window.text
        exited_ns = NO_TIME
        if image.exited_ns is not None and image.exited_ns < end_ns:
            exited_ns = max(image.exited_ns - self._table.start_ns, 0)
        row = (
            *(image.index, image.pid, image.parent_pid, image.namespaced_pid, image.image),
            *(max(image.started_ns - self._table.start_ns, 0), exited_ns),
            *(self._cgroup(image), text(image.name)),
            *(text(image.executable), text(image.command_line)),
        )
        self._window.define("processes", rows_of("processes", row))

    def _cgroup(self, image: ProcessImage) -> int:
        """Returns the number of a process's cgroup, told now if it is new."""
        path = image.cgroup
        if not path:
            return NONE
        before = self._told_in.get(image.index, path)
        if before != path:  # it has moved
            self._forget_in(before, {image.index})
        self._told_in[image.index] = path
        self._images_in.setdefault(path, set()).add(image.index)
        known = self._cgroups.get(path)
        if known is None:
            known = self._cgroups[path] = self._next_cgroup
            self._next_cgroup += 1
            text, identity = self._window.text, identity_of(path)
            engines = [container.engine for container in identity.containers]
            engine = engines[-1].value if engines and engines[-1] else ""
            unit = identity.units[0].name if identity.units else ""
            words = (text(path), text(identity.container_id), text(engine), text(unit))
            row = (known, self._table.cgroup_id_of(image), *words)
            self._window.define("cgroups", rows_of("cgroups", row))
        return known

    def _tell_mappings(self, image: ProcessImage) -> None:
        rows = []
        for mapping in image.laid:
            span = (mapping.start, mapping.end, mapping.file_offset)
            if mapping.binary not in self._table.binaries.files:  # none, or one that was closed
                rows.append((image.index, NONE, *span, 0))
                continue
            self.tell_binary(mapping.binary)
            rows.append((image.index, mapping.binary, *span, self._images.bias(mapping) % _UINT64))
        self._window.define("mappings", np.array(rows, COLUMNS["mappings"].dtype))

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets process images that have ended, and cgroups in which none is left."""
        for index in images:
            self._told_in.pop(index, None)
        for path in [*self._images_in]:
            self._forget_in(path, images)

    def _forget_in(self, path: str, images: Collection[int]) -> None:
        self._images_in[path].difference_update(images)
        if not self._images_in[path]:
            del self._images_in[path], self._cgroups[path]

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more."""
        self._binaries.difference_update(binaries)

    def tell_binary(self, binary: int) -> None:
        """Tells of a binary by its index, once."""
        if binary in self._binaries:
            return
        self._binaries.add(binary)
        elf, text = self._images.of(binary), self._window.text
        path = clean_name(self._table.binaries.files[binary].path)
        row = (binary, text(path), text("" if elf is None else elf.build_id))
        self._window.define("binaries", rows_of("binaries", row))
