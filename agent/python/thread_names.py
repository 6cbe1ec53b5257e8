# SPDX-License-Identifier: Apache-2.0
"""What `threading.Thread(name=...)` called the threads of a running interpreter, 3.8 to 3.13.

Before 3.14 the kernel is not told of these names, and shows all threads as `python3`. They are
read where Lib/threading.py keeps them: `_active` of the module `threading`, a dict of all threads
that run, has the objects with `_name` and `_native_id`. From 3.14 on threads set their name in the
kernel themselves (Modules/_threadmodule.c: set_name), and nothing is read here.

Offsets are those of Include/cpython/dictobject.h, Objects/dict-common.h (3.8 to 3.10),
Include/internal/pycore_dict.h (since 3.11), Include/cpython/object.h and
Include/internal/pycore_object.h of v3.8.18, v3.9.18, v3.10.13, v3.11.7, v3.12.1 and v3.13.0, all
for x86-64; a test reads running interpreters with them.

The process runs on meanwhile and may be hostile: what is read may be torn or made up, and is
bounded.
"""

from __future__ import annotations

import enum
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.layouts import Layout, Version
from aiflame.agent.python.memory import BatchMemory, read_together, read_u64
from aiflame.agent.python.strings import read_str
from aiflame.agent.symbols.frames import clean_name

# A large program has 5,000 modules. Larger tables are read as far as this.
_MAX_ENTRIES = 16384
MAX_THREADS = 4096
_MAX_NAME_CHARS = 127  # and the ellipsis
# Names are among the first attributes that are set; classes of their own may set some before.
_MAX_ATTRIBUTES = 64
# Of all classes of threads together. Whoever has more has made them up.
_MAX_ATTRIBUTE_NAMES = 4096

# PyObject: reference count, type. PyModuleObject: its dict follows.
_TYPE_AT = 8
_MODULE_DICT_AT = 16
# PyDictObject, its head.
_DICT_USED, _DICT_KEYS, _DICT_VALUES, _DICT_BYTES = 16, 32, 40, 48
_KEYS_HEAD_BYTES = 40
# PyTypeObject.
_TYPE_FLAGS, _TYPE_DICT_OFFSET = 168, 288
_MANAGED_DICT, _INLINE_VALUES = 1 << 4, 1 << 2
# Before an object that has its dict managed there are up to four words; after it, its type.
_BEFORE, _HEAD_BYTES = 32, 48
# PyLongObject: its size or tag, and its first digit, of 30 bits: a thread id has no second one.
_INT_SIZE, _INT_DIGIT, _INT_BYTES = 16, 24, 28

_THREADING, _ACTIVE, _NAME, _NATIVE_ID = b"threading", b"_active", b"_name", b"_native_id"
_LONGEST_KEY = max(map(len, (_THREADING, _ACTIVE, _NAME, _NATIVE_ID)))

# What `threading` calls threads that nobody named: the first one, and those that it did not start.
_SAYS_NOTHING = re.compile(r"MainThread|Dummy-\d+")


class _Values(enum.Enum):
    """Where an object of a class has its attributes."""

    DICT = enum.auto()  # in a dict, at the offset that its class tells
    POINTERS = enum.auto()  # values 32 bytes before it, else a dict 24 bytes before it
    TAGGED = enum.auto()  # one or the other 24 bytes before it: an odd number is values - 1
    INLINE = enum.auto()  # a dict 24 bytes before it, else values after its head


@dataclass(frozen=True, slots=True)
class Objects:
    """What of dicts and objects depends on the version.

    Attributes:
        values: Where attributes are.
        has_sized_entries: Tables of keys have a kind, and entries of two words without a hash.
        shared_keys: Pointer to the keys that objects of a class share, in PyHeapTypeObject.
        values_at: First value in PyDictValues.
        one_digit: Size or tag of a positive int of one digit.
    """

    values: _Values
    has_sized_entries: bool
    shared_keys: int
    values_at: int
    one_digit: int


_OBJECTS: Mapping[Version, Objects] = {
    (3, 8): Objects(_Values.DICT, False, 872, 0, 1),
    (3, 9): Objects(_Values.DICT, False, 864, 0, 1),
    (3, 10): Objects(_Values.DICT, False, 872, 0, 1),
    (3, 11): Objects(_Values.POINTERS, True, 872, 0, 1),
    (3, 12): Objects(_Values.TAGGED, True, 880, 0, 1 << 3),
    (3, 13): Objects(_Values.INLINE, True, 880, 8, 1 << 3),
}

# A table of keys: entries of key and value, in the order in which they were set.
_Table = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Namespace:
    """Attributes of an object: a table of keys, and the values if they are not in it."""

    keys: int
    values: int


def shown_name(comm: str, python_name: str, inherited: Collection[str]) -> str:
    """Returns what a thread is called: `worker`, or `worker [comm]` where comm tells more.

    Args:
        comm: Its name in the kernel.
        python_name: Its name in Python, "" where there is none.
        inherited: Names in the kernel that tell nothing of the thread: those of its program. One
            that is cut at 15 bytes is taken for the whole.
    """
    if not python_name or _SAYS_NOTHING.fullmatch(python_name):
        return comm
    raw = os.fsencode(comm)
    if any(os.fsencode(known).startswith(raw) for known in (python_name, *inherited)):
        return python_name
    return f"{python_name} [{comm}]"


class ThreadNameReader:
    """Reads the names of one process's threads.

    Args:
        memory: The process.
        layout: Of its interpreter.
        objects: The same.
        runtime_address: Its _PyRuntime.

    Attributes:
        passed_over: Threads beyond MAX_THREADS when names were read last.
    """

    __slots__ = (
        *("_active", "_layout", "_memory", "_modules_state", "_objects", "_runtime_address"),
        *("_texts", "passed_over"),
    )

    def __init__(
        self, memory: BatchMemory, layout: Layout, objects: Objects, runtime_address: int
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._objects = objects
        self._runtime_address = runtime_address
        self.passed_over = 0
        self._active = 0
        self._modules_state = b""
        self._texts: dict[int, bytes] = {}  # of keys, by address, while one reading lasts

    def state(self) -> bytes:
        """Returns what changes when a thread begins or ends, b"" before any was made.

        Raises:
            NoMemoryAccess: The process is gone, or may not be read.
        """
        if self._active or self._find_active():
            return self._dict_state(self._active)
        return b""

    def read(self) -> dict[int, str]:
        """Returns names by native thread id, as the process's own pid namespace has it.

        Raises:
            NoMemoryAccess: The process is gone, or may not be read.
        """
        self._texts.clear()
        if not self._active and not self._find_active():
            return {}
        threads = [value for _, value in self._dict(self._active) if value]
        self.passed_over = max(len(threads) - MAX_THREADS, 0)
        found = self._attributes(threads[:MAX_THREADS])
        ids = self._memory.read_many([(own.get(_NATIVE_ID, 0), _INT_BYTES) for own in found])
        texts = read_together(
            self._memory,
            (read_str(self._layout, own.get(_NAME, 0), _MAX_NAME_CHARS) for own in found),
        )
        names: dict[int, str] = {}
        for data, text in zip(ids, texts, strict=True):
            tid = self._thread_id(data)
            if tid and text is not None and text.characters:
                # Of green threads, which share one, the first in the dict is the thread itself.
                names.setdefault(tid, clean_name(text.characters + "…" * text.is_cut))
        return names

    def _thread_id(self, data: bytes | None) -> int:
        if data is None:
            return 0
        if struct.unpack_from("<Q", data, _INT_SIZE)[0] != self._objects.one_digit:
            return 0
        return int(struct.unpack_from("<I", data, _INT_DIGIT)[0])

    def _find_active(self) -> bool:
        """Finds `threading._active`; modules are looked through only where some are new."""
        main = read_u64(self._memory, self._runtime_address + self._layout.runtime_interpreters + 8)
        modules = read_u64(self._memory, (main or 0) + self._layout.interpreter_modules)
        state = self._dict_state(modules or 0)
        if not state or state == self._modules_state:
            return False
        self._texts.clear()
        self._modules_state = state
        module = self._item(self._dict(modules or 0), _THREADING)
        names = read_u64(self._memory, module + _MODULE_DICT_AT) if module else 0
        self._active = self._item(self._dict(names), _ACTIVE) if names else 0
        if not self._active:
            self._modules_state = b""  # it is being imported
        return bool(self._active)

    def _dict_state(self, address: int) -> bytes:
        head = self._memory.read(address, _DICT_BYTES)
        if head is None:
            return b""
        keys = self._memory.read(_word(head, _DICT_KEYS), _KEYS_HEAD_BYTES)
        return b"" if keys is None else head[_DICT_USED : _DICT_USED + 8] + head[32:] + keys[8:]

    def _dict(self, address: int) -> _Table:
        """Returns the entries of a dict that has its values in its table of keys."""
        head = self._memory.read(address, _DICT_BYTES)
        keys = 0 if head is None else _word(head, _DICT_KEYS)
        return self._tables([keys], _MAX_ENTRIES)[keys]

    def _item(self, table: _Table, name: bytes) -> int:
        """Returns the address of what a name stands for, 0 where it is not there."""
        texts = self._key_texts({key for key, _ in table}, _MAX_ENTRIES)
        return next((value for key, value in table if texts.get(key) == name), 0)

    def _tables(self, addresses: Collection[int], most: int) -> dict[int, _Table]:
        """Returns tables of keys by their address, empty where they cannot be read."""
        places = list(addresses)
        heads = self._memory.read_many([(place, _KEYS_HEAD_BYTES) for place in places])
        spans = [(0, 0, 0) if head is None else self._entries(head, most) for head in heads]
        found = self._memory.read_many(
            [(place + at, size) for place, (at, size, _) in zip(places, spans, strict=True)]
        )
        return {
            place: [] if data is None or not words else _pairs(data, words)
            for place, data, (_, _, words) in zip(places, found, spans, strict=True)
        }

    def _entries(self, head: bytes, most: int) -> tuple[int, int, int]:
        """Returns where entries begin in a table of keys, their bytes, and the words of each."""
        if self._objects.has_sized_entries:
            (count,) = struct.unpack_from("<Q", head, 24)
            words, at = 2 if head[10] else 3, 32 + (1 << min(head[9], 32))
        else:
            slots, count = _word(head, 8), _word(head, 32)
            width = 1 if slots <= 0xFF else 2 if slots <= 0xFFFF else 4
            words, at = 3, 40 + min(slots, 1 << 32) * width
        return at, 8 * words * min(count, most), words

    def _key_texts(self, keys: Collection[int], most: int) -> dict[int, bytes]:
        """Returns ASCII keys of up to `_LONGEST_KEY` characters by their address."""
        at = self._layout
        missing = [key for key in keys if key not in self._texts][: max(most - len(self._texts), 0)]
        size = at.str_ascii_data + _LONGEST_KEY
        for key, data in zip(
            missing, self._memory.read_many([(key, size) for key in missing]), strict=True
        ):
            length = _LONGEST_KEY + 1 if data is None else _word(data, at.str_length)
            is_short = data is not None and length <= _LONGEST_KEY
            begin = at.str_ascii_data
            self._texts[key] = data[begin : begin + length] if data and is_short else b""
        return self._texts

    def _attributes(self, threads: Sequence[int]) -> list[dict[bytes, int]]:
        """Returns the addresses of `_name` and `_native_id` of each thread, as far as found."""
        spaces = self._namespaces(threads)
        self._texts.clear()
        tables = self._tables({space.keys for space in spaces}, _MAX_ATTRIBUTES)
        texts = self._key_texts(
            {key: None for table in tables.values() for key, _ in table}.keys(),
            _MAX_ATTRIBUTE_NAMES,
        )
        found: list[dict[bytes, int]] = []
        wanted: list[tuple[dict[bytes, int], bytes, int]] = []
        for space in spaces:
            own: dict[bytes, int] = {}
            found.append(own)
            for index, (key, value) in enumerate(tables[space.keys]):
                name = texts.get(key)
                if name != _NAME and name != _NATIVE_ID:
                    continue
                own[name] = value
                if space.values:
                    wanted.append((own, name, space.values + 8 * index))
        values = self._memory.read_many([(address, 8) for _, _, address in wanted])
        for (own, name, _), data in zip(wanted, values, strict=True):
            own[name] = 0 if data is None else _word(data, 0)
        return found

    def _namespaces(self, threads: Sequence[int]) -> list[_Namespace]:
        heads = self._memory.read_many([(thread - _BEFORE, _HEAD_BYTES) for thread in threads])
        types = [0 if head is None else _word(head, _BEFORE + _TYPE_AT) for head in heads]
        distinct = list(dict.fromkeys(types))
        size = self._objects.shared_keys + 8
        read = self._memory.read_many([(address, size) for address in distinct])
        types_data = dict(zip(distinct, read, strict=True))
        found = [
            _Namespace(0, 0) if head is None else self._place(thread, head, types_data[of])
            for thread, head, of in zip(threads, heads, types, strict=True)
        ]
        return self._opened(found)

    def _place(self, thread: int, head: bytes, of_type: bytes | None) -> _Namespace:
        """Returns where a thread has its attributes; keys of 0: `values` points to a dict."""
        if of_type is None:
            return _Namespace(0, 0)
        flags, shared = _word(of_type, _TYPE_FLAGS), _word(of_type, self._objects.shared_keys)
        kind, managed = self._objects.values, _word(head, _BEFORE - 24)
        if kind is _Values.DICT or not flags & _MANAGED_DICT:
            offset = struct.unpack_from("<q", of_type, _TYPE_DICT_OFFSET)[0]
            return _Namespace(0, thread + offset if offset > 0 else 0)
        in_dict = _Namespace(0, thread - 24)
        if kind is _Values.POINTERS:
            values = _word(head, 0)
            return _Namespace(shared, values) if values else in_dict
        if kind is _Values.TAGGED:
            return _Namespace(shared, managed + 1) if managed & 1 else in_dict
        if managed or not flags & _INLINE_VALUES:
            return in_dict
        return _Namespace(shared, thread + 16 + self._objects.values_at)

    def _opened(self, found: Sequence[_Namespace]) -> list[_Namespace]:
        """Returns what dicts refer to, in place of pointers to the dicts."""
        slots = self._memory.read_many([(space.values, 8) for space in found if not space.keys])
        dicts = [0 if slot is None else _word(slot, 0) for slot in slots]
        heads = iter(self._memory.read_many([(address, _DICT_BYTES) for address in dicts]))
        opened: list[_Namespace] = []
        for space in found:
            head = None if space.keys else next(heads)
            if space.keys:
                opened.append(space)
            elif head is None:
                opened.append(_Namespace(0, 0))
            else:
                values = _word(head, _DICT_VALUES)
                first = values + self._objects.values_at if values else 0
                opened.append(_Namespace(_word(head, _DICT_KEYS), first))
        return opened


def thread_name_reader(
    memory: BatchMemory, interpreter: LoadedInterpreter
) -> ThreadNameReader | None:
    """Returns what reads the names of a process's threads; None where the kernel knows them."""
    layout = interpreter.layout
    objects = None if layout.free_threaded else _OBJECTS.get(layout.version)
    if objects is None:
        return None
    return ThreadNameReader(memory, layout, objects, interpreter.runtime_address)


def _pairs(data: bytes, words: int) -> _Table:
    found = struct.unpack(f"<{len(data) // 8}Q", data)
    return list(zip(found[words - 2 :: words], found[words - 1 :: words], strict=True))


def _word(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", data, offset)[0])
