# SPDX-License-Identifier: Apache-2.0
"""What kernels are called that a launch knows by a handle or by a host address.

Told by the API itself where the kernel was made while it was watched: the name is an argument of
the function that makes it, and the kernel half puts the name's id where the handle was. Else, in
this order: a host address is a function whose symbol is the kernel's name; a handle's memory holds
a pointer to a name, at the same offset for all kernels of a runtime. Which offset that is, the
kernels tell that the process was seen to run. What is left has no name, and says why.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf.functions import function_names
from aiflame.agent.kernel import abi
from aiflame.agent.launches.gpu_kernels import KernelTable
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.process_memory import ProcessMemory
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.agent.python.memory import NoMemoryAccess
from aiflame.agent.symbols.frames import clean_name
from aiflame.gpu.host_stubs import is_stub, name_from_host_symbol

T = TypeVar("T")

# A name lies near the beginning of what a handle points to: PoCL's is the sixth word (pocl_cl.h,
# v3.1). Smaller pieces are for objects at the end of a mapping.
_HANDLE_BYTES = (512, 256, 128, 64)
_NAME = re.compile(rb"[A-Za-z_$][\w$]{0,254}\0", re.ASCII)
_NAME_BYTES = 256
# Names as long as the longest of C++ are read whole from the process.
_LONGEST_NAME_BYTES = 16384

# Between a kernel's stub and the launch stands at most a helper of nvcc's (crt/host_runtime.h,
# CUDA 13.0); what was inlined into the stub has no frame.
_STUB_DEPTH = 3
# One kernel is launched from many stacks, but through one stub.
_MAX_STACKS = 4
# Symbols that one file is asked for at a time: a message holds 3,000 addresses.
_MOST_ASKED = 2048

# Handles and names of one process that are known: those that came last, as some make a handle for
# each launch.
_MOST_TOLD = 1 << 16
_UNTOLD = "made before the recording began"
_LOST = "its name was lost"
_UNSAID = "the call does not say which kernels it launches"


class StackAddresses(Protocol):
    """Where stacks are that have just come."""

    def user_addresses(self, stack: int) -> npt.NDArray[np.uint64]:
        """Returns the user half of a stack, leaf first; empty for one that is not there."""


@dataclass(slots=True)
class _Unnamed:
    """A kernel that no name was told of: its row, and what may lead to one."""

    row: int
    image: ProcessImage
    api: str
    handle: int
    candidates: Mapping[int, str]  # by the offset of a pointer to it from the handle, in words
    stacks: dict[int, tuple[int, ...]]  # by id, callers in which the stub may be


class KernelNames:
    """All kernels that were launched.

    Args:
        table: Process table.
        images: ELF headers of the targets' files.
        kernels: Gives out rows.
        stacks: Of launches.
    """

    def __init__(
        self,
        table: ProcessTable,
        images: ElfImages,
        kernels: KernelTable,
        stacks: StackAddresses,
    ) -> None:
        self._stacks = stacks
        self._table = table
        self._images = images
        self._kernels = kernels
        # By index of the image, then by handle, or by the id of a name.
        self._told: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self._aliases: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._unnamed: dict[tuple[int, str, int], _Unnamed] = {}
        self._symbols: dict[int, dict[int, str]] = {}  # by binary, then virtual address
        self.lost = 0

    def take(self, payload: bytes) -> None:
        """Takes in an event of the kernel half."""
        whole = payload.ljust(abi.KERNEL_NAMED_DTYPE.itemsize, b"\0")
        event = np.frombuffer(whole, abi.KERNEL_NAMED_DTYPE, 1)[0]
        image = self._table.image(int(event["tgid"]), int(event["image"]))
        if not int(event["name_bytes"]):
            self._take_untold(image, event)
            return
        name = bytes(event["name"]).split(b"\0", 1)[0]
        if int(event["name_bytes"]) == abi.KERNEL_NAME_BYTES:
            name = _whole_name(self._memory_of(image), int(event["name_address"]), name)
        _note(self._told[image.index], int(event["name_id"]), _clean(name))

    def _take_untold(self, image: ProcessImage, event: np.void) -> None:
        """Takes in a name that the kernel half could not read, or a handle that has another's."""
        handle = int(event["handle"])
        if not int(event["name_address"]):
            _note(self._aliases[image.index], handle, int(event["alias"]))
            return
        name = _whole_name(self._memory_of(image), int(event["name_address"]), b"")
        if name:
            _note(self._told[image.index], handle, _clean(name))
        else:
            self.lost += 1

    def kernel(
        self, image: ProcessImage, api: str, identity: int, is_named: bool, stack: int
    ) -> int:
        """Returns the row of a launched kernel.

        Args:
            image: Who launched it.
            api: Of the call.
            identity: The id of a name that was told, or a handle or host address.
            is_named: Which of them.
            stack: Id of the launch's stack.
        """
        if is_named:
            told = self._told[image.index]
            name = told.get(identity, "")
            if name:  # of those that it launches, the name is kept
                _note(told, identity, name)
            return self._kernels.id_of(image.index, api, name, "" if name else _LOST)
        if not identity:
            return self._kernels.id_of(image.index, api, "", _UNSAID)
        key = (image.index, api, identity)
        known = self._unnamed.get(key)
        if known is None:
            row = self._kernels.unnamed(image.index, api, _UNTOLD)
            if row is None:
                return self._kernels.id_of(image.index, api, "", _UNTOLD)
            known = _Unnamed(row, image, api, identity, self._candidates(image, identity), {})
            self._unnamed[key] = known
        if stack not in known.stacks and len(known.stacks) < _MAX_STACKS:
            user = self._stacks.user_addresses(stack)
            if len(user):
                known.stacks[stack] = tuple(user[1 : 1 + _STUB_DEPTH].tolist())
        return known.row

    def _memory_of(self, image: ProcessImage) -> ProcessMemory:
        return ProcessMemory(self._table.memory, image.pid)

    def _candidates(self, image: ProcessImage, handle: int) -> Mapping[int, str]:
        """Returns what may be a name among what the memory at a handle points to, by word."""
        if not self._table.is_current(image):
            return {}
        memory = self._memory_of(image)
        found = {}
        try:
            pieces = memory.read_many([(handle, size) for size in _HANDLE_BYTES])
            data = next((piece for piece in pieces if piece is not None), b"")
            addresses = np.frombuffer(data, "<u8").tolist()
            for word, beginning in enumerate(_texts_at(memory, addresses)):
                text = _NAME.match(beginning)
                if text is not None:
                    found[word] = text[0][:-1].decode("ascii")
        except NoMemoryAccess:
            pass  # it has ended: what was found before is what there is
        return found

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets process images that have ended."""
        for index in images:
            self._told.pop(index, None)
            self._aliases.pop(index, None)
        for handle in [handle for handle in self._unnamed if handle[0] in images]:
            del self._unnamed[handle]

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more."""
        for binary in binaries:
            self._symbols.pop(binary, None)

    def finish(
        self, run: Mapping[int, frozenset[str]], images: Collection[int] | None = None
    ) -> None:
        """Names what can be named by now.

        Args:
            run: By index of process image, the names of kernels that it was seen to run.
            images: Only their kernels; None for all.
        """
        unnamed_ones = [
            unnamed
            for unnamed in self._unnamed.values()
            if images is None or unnamed.image.index in images
        ]
        self._ask_symbols(unnamed_ones)
        seen: defaultdict[tuple[int, str], Counter[int]] = defaultdict(Counter)
        for unnamed in unnamed_ones:
            names = run.get(unnamed.image.index, frozenset())
            words = (word for word, name in unnamed.candidates.items() if name in names)
            seen[unnamed.image.index, unnamed.api].update(words)
        for unnamed in unnamed_ones:
            name = self._name(unnamed, seen[unnamed.image.index, unnamed.api])
            if name:
                self._kernels.name(unnamed.row, unnamed.image.index, unnamed.api, name)

    def _name(self, unnamed: _Unnamed, seen: Counter[int]) -> str:
        index, handle = unnamed.image.index, unnamed.handle
        address = self._aliases[index].get(handle, handle)
        told = self._told[index].get(address)
        if told is not None:
            return told
        symbol = self._symbol(unnamed.image, address)
        kernel = name_from_host_symbol(symbol, unnamed.api) if symbol else None
        kernel = kernel or self._name_of_stub(unnamed)
        if kernel:
            return kernel
        # The nearest of those that hold most names: past a small object another one begins.
        word = max(seen, key=lambda word: (seen[word], -word), default=-1)
        return unnamed.candidates.get(word, "")

    def _name_of_stub(self, unnamed: _Unnamed) -> str:
        """Returns the kernel by whose stub all its launches were called, "" where there is none."""
        names = set()
        for callers in unnamed.stacks.values():
            # A caller is looked up one byte before where it goes on.
            symbols = (self._symbol(unnamed.image, address - 1) for address in callers)
            stub = next((symbol for symbol in symbols if is_stub(symbol)), "")
            names.add(name_from_host_symbol(stub, unnamed.api) if stub else "")
        return (names.pop() or "") if len(names) == 1 else ""

    def _ask_symbols(self, unnamed_ones: Sequence[_Unnamed]) -> None:
        """Asks for all symbols that names may come from, each file once."""
        wanted: defaultdict[int, set[int]] = defaultdict(set)
        for unnamed in unnamed_ones:
            aliases = self._aliases[unnamed.image.index]
            handle = aliases.get(unnamed.handle, unnamed.handle)
            callers = (address - 1 for stack in unnamed.stacks.values() for address in stack)
            for address in (handle, *callers):
                found = self._located(unnamed.image, address)
                if found is not None and found[1] not in self._symbols.get(found[0], ()):
                    wanted[found[0]].add(found[1])
        for binary, unsorted in wanted.items():
            addresses = sorted(unsorted)
            known = self._symbols.setdefault(binary, {})
            for begin in range(0, len(addresses), _MOST_ASKED):
                some = addresses[begin : begin + _MOST_ASKED]
                names = self._table.binaries.ask(binary, function_names(some))
                known.update(zip(some, map(clean_name, names or [""] * len(some)), strict=True))

    def _located(self, image: ProcessImage, address: int) -> tuple[int, int] | None:
        """Returns the file at an address of a process, and the virtual address there."""
        found = int(image.find(np.array([address], np.uint64))[0])
        if found < 0 or image.mappings[found].binary == NO_BINARY:
            return None
        mapping = image.mappings[found]
        return mapping.binary, (address - self._images.bias(mapping)) % (1 << 64)

    def _symbol(self, image: ProcessImage, address: int) -> str:
        """Returns the symbol at an address of a process, "" where it has none."""
        found = self._located(image, address)
        return "" if found is None else self._symbols.get(found[0], {}).get(found[1], "")


def _texts_at(memory: ProcessMemory, addresses: Sequence[int]) -> list[bytes]:
    """Reads possible names; each may end just before memory that is not there."""
    ranges = [(address, _NAME_BYTES) for address in addresses]
    ranges += [(address, min(_NAME_BYTES, -address % 4096 or 4096)) for address in addresses]
    texts = memory.read_many(ranges)
    halves = texts[: len(addresses)], texts[len(addresses) :]
    return [text or shorter or b"" for text, shorter in zip(*halves, strict=True)]


def _whole_name(memory: ProcessMemory, address: int, begin: bytes) -> bytes:
    """Reads a name that the kernel half had to cut; what it brought if that is gone."""
    sizes = (_LONGEST_NAME_BYTES, 4096, 2048, -address % 4096)
    try:
        for text in memory.read_many([(address, size) for size in sizes]):
            if text is not None and text.startswith(begin) and b"\0" in text:
                return text.split(b"\0", 1)[0]
    except NoMemoryAccess:
        pass  # it has ended
    return begin


def _note(known: dict[int, T], key: int, value: T) -> None:
    """Notes what is known of a handle or a name, in place of the oldest where that is much."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _MOST_TOLD:
        del known[next(iter(known))]


def _clean(name: bytes) -> str:
    return clean_name(name.decode(errors="replace"))
