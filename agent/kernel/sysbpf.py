# SPDX-License-Identifier: Apache-2.0
"""bpf(2) and perf_event_open(2), as far as a recorder needs them once programs are loaded.

The recorder holds plain file descriptors and no compiler, which would take some 120 MB: programs
come compiled, or a child compiles them (see loader.py).

Layouts: include/uapi/linux/bpf.h and perf_event.h (v6.1); both are stable ABI.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent import kernelfs
from aiflame.agent.kernel.arch import this_architecture
from aiflame.agent.kernel.syscalls import MapShape, bpf, create_map, ioctl, syscall, try_bpf
from aiflame.agent.rows import join_rows

_MAP_TYPE_ARRAY = 2
_MAP_LOOKUP_ELEM, _MAP_UPDATE_ELEM, _MAP_DELETE_ELEM = 1, 2, 3
_ELEMENT = struct.Struct("<IIQQQ")  # map, padding, key, value, flags
_OBJ_GET_INFO_BY_FD, _RAW_TRACEPOINT_OPEN = 15, 17
_MAP_LOOKUP_BATCH, _MAP_LOOKUP_AND_DELETE_BATCH = 24, 25
_MAP_UPDATE_BATCH, _MAP_DELETE_BATCH = 26, 27
# What kernels say of instructions that they cannot probe and, before v5.19, of batches on maps of
# maps (include/linux/errno.h).
ENOTSUPP = 524
_LINK_CREATE, _ENABLE_STATS, _ITER_CREATE = 28, 32, 33
_STATS_RUN_TIME = 0  # enum bpf_stats_type
_TRACE_ITER, _ATTACH_PERF_EVENT = 28, 41  # enum bpf_attach_type
TRACE_UPROBE_MULTI = 48
_UPROBE_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")

BPF_ANY, BPF_NOEXIST, BPF_EXIST = 0, 1, 2

# Entries moved by one system call: a chunk of 2 KB stacks stays about 1 MB.
_CHUNK_ENTRIES = 512

_PERF_TYPE_SOFTWARE, _PERF_COUNT_SW_CPU_CLOCK, _PERF_COUNT_SW_DUMMY = 1, 0, 9
_PERF_SAMPLE_TIME = 1 << 2
_PERF_FLAG_FD_CLOEXEC = 8
_PERF_EVENT_IOC_ENABLE = 0x2400
_PERF_EVENT_IOC_SET_BPF = 0x40042408
_PERF_ATTR_BYTES = 112  # PERF_ATTR_SIZE_VER5: every kernel since v4.1 knows it
_PERF_ATTR_DISABLED = 1
# Bits of the flags: mmap, comm, task; the wake-up is by bytes (watermark); each record has a time
# (sample_id_all); mmap2, comm_exec, use_clockid. All of them are there since v4.1.
_PERF_ATTR_LIVES = 1 << 8 | 1 << 9 | 1 << 13 | 1 << 14 | 1 << 18 | 1 << 23 | 1 << 24 | 1 << 25


def _address(array: npt.NDArray[Any] | ctypes.Array[ctypes.c_char]) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else ctypes.addressof(array)


def _buffer(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(data, len(data))


def create_array(value_bytes: int, entries: int, flags: int) -> int:
    """Makes an array map; returns its descriptor. Flags are BPF_F_*."""
    return create_map(MapShape(_MAP_TYPE_ARRAY, 4, value_bytes, entries, flags))


def is_map_memory_limited() -> bool:
    """Whether the kernel counts maps as locked memory; tried by a map under a limit of nothing."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        os.close(create_array(4, 1, 0))
    except PermissionError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    return False


# A position in a map, as the kernel tells it: a number for a hash, a key for some other kinds.
_TOKEN_BYTES = 64
# Struct `batch` of union bpf_attr: in_batch, out_batch, keys, values, count, map_fd, elem_flags,
# flags; and its count, where the kernel tells how many it did.
_BATCH = struct.Struct("<QQQQIIQQ")
_BATCH_COUNT = struct.Struct("<32xI")


class _Batch:
    """Room for some entries of a map, and what the kernel is asked for them with.

    Args:
        of: The map.
        room: Entries.
        begin: Where the kernel said that it begins; None: with the map.
    """

    def __init__(
        self, of: Map, room: int, begin: ctypes.Array[ctypes.c_char] | None = None
    ) -> None:
        self.room = room
        self.keys, self.values = np.zeros(room, of.key_dtype), np.zeros(room, of.value_dtype)
        self.begin, self.end = begin, _buffer(bytes(_TOKEN_BYTES))
        self._asked = _BATCH.pack(
            0 if begin is None else ctypes.addressof(begin),
            *(ctypes.addressof(self.end), _address(self.keys), _address(self.values)),
            *(room, of.fd, 0, 0),
        )
        self._attributes = _buffer(self._asked)

    def ask(self, command: int) -> int:
        """Has the kernel fill it; returns 0 or the error number."""
        self._attributes.raw = self._asked  # the kernel has written its answer there
        return try_bpf(command, self._attributes)

    @property
    def filled(self) -> int:
        """How many entries the kernel has put there."""
        return int(_BATCH_COUNT.unpack_from(self._attributes)[0])


class Map:
    """A BPF hash or array, read and written in bulk.

    Args:
        fd: Owned by the map from here on.
        key_dtype: Layout of a key.
        value_dtype: Layout of a value; per-CPU maps hold one value for each possible CPU.
        max_entries: As created.
    """

    def __init__(
        self, fd: int, key_dtype: np.dtype[Any], value_dtype: np.dtype[Any], max_entries: int
    ) -> None:
        self.fd = fd
        self.key_dtype = key_dtype
        self.value_dtype = value_dtype
        self.max_entries = max_entries
        self._spare: _Batch | None = None

    def _element(self, command: int, key: bytes, value: Any, flags: int) -> None:
        key_buffer = _buffer(key)
        value_address = 0 if value is None else _address(value)
        bpf(
            command,
            _ELEMENT.pack(self.fd, 0, ctypes.addressof(key_buffer), value_address, flags),
        )

    def lookup(self, key: bytes, copies: int = 1) -> npt.NDArray[Any] | None:
        """Returns the value(s) under a key, or None. `copies` is the CPU count of a per-CPU map."""
        value = bytearray(copies * self.value_dtype.itemsize)
        held = (ctypes.c_char * len(value)).from_buffer(value)
        key_buffer = _buffer(key)
        code = try_bpf(
            _MAP_LOOKUP_ELEM,
            _ELEMENT.pack(self.fd, 0, ctypes.addressof(key_buffer), ctypes.addressof(held), 0),
        )
        if code == errno.ENOENT:
            return None
        if code:
            raise OSError(code, os.strerror(code))
        return np.frombuffer(value, self.value_dtype)

    def update(self, key: bytes, value: bytes, flags: int = BPF_ANY) -> bool:
        """Writes one entry; False where `flags` forbids it. Raises OSError when the map is full."""
        try:
            self._element(_MAP_UPDATE_ELEM, key, _buffer(value), flags)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOENT):
                return False
            raise
        return True

    def delete(self, key: bytes) -> None:
        """Removes one entry, if it is there."""
        try:
            self._element(_MAP_DELETE_ELEM, key, None, 0)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def update_many(self, entries: Mapping[int, int]) -> list[int]:
        """Writes u32 values under u32 keys by one system call; returns the keys that were refused.

        What was there under a key that is refused stays.
        """
        keys = np.fromiter(entries.keys(), np.uint32, len(entries))
        values = np.fromiter(entries.values(), np.uint32, len(entries))
        refused: list[int] = keys[self._many(_MAP_UPDATE_BATCH, keys, values)].tolist()
        return refused

    def write(self, values: npt.NDArray[Any]) -> None:
        """Writes the first entries of an array.

        Raises:
            OSError: The kernel does not take all of them.
        """
        keys = np.arange(len(values), dtype=np.uint32)
        if self._many(_MAP_UPDATE_BATCH, keys, values):
            raise OSError(errno.EINVAL, "an array takes no values")

    def delete_many(self, keys: Collection[int]) -> None:
        """Removes u32 keys by one system call, as far as they are there."""
        self._many(_MAP_DELETE_BATCH, np.fromiter(keys, np.uint32, len(keys)), None)

    def _many(
        self, command: int, keys: npt.NDArray[Any], values: npt.NDArray[Any] | None
    ) -> list[int]:
        """Goes on after an entry that is refused; one by one where the kernel has no batches.

        Returns:
            The indexes of those that were refused.
        """
        refused: list[int] = []
        begin = 0
        while begin < len(keys):
            values_left = None if values is None else values[begin:]
            batch = _buffer(
                _BATCH.pack(
                    *(0, 0, _address(keys[begin:])),
                    0 if values_left is None else _address(values_left),
                    *(len(keys) - begin, self.fd, 0, 0),
                )
            )
            try:
                bpf(command, batch)
                break
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, ENOTSUPP):
                    return refused + self._one_by_one(keys, values, begin)
            filled = int(_BATCH_COUNT.unpack_from(batch)[0])
            refused.append(begin + filled)
            begin += filled + 1
        return refused

    def _one_by_one(
        self, keys: npt.NDArray[Any], values: npt.NDArray[Any] | None, begin: int
    ) -> list[int]:
        refused = []
        for index in range(begin, len(keys)):
            value = None if values is None else _buffer(values[index].tobytes())
            command = _MAP_DELETE_ELEM if values is None else _MAP_UPDATE_ELEM
            try:
                self._element(command, keys[index].tobytes(), value, BPF_ANY)
            except OSError:
                refused.append(index)
        return refused

    def chunks(self, take: bool = False) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yields all entries as (keys, values), a bounded number at a time.

        Args:
            take: Also removes them (v5.6).
        """
        command = _MAP_LOOKUP_AND_DELETE_BATCH if take else _MAP_LOOKUP_BATCH
        spare, self._spare = self._spare, None  # a caller may stop in the midst of it
        batch = spare or _Batch(self, min(self.max_entries, _CHUNK_ENTRIES))
        while True:
            code = batch.ask(command)
            if code == errno.ENOSPC:  # one hash bucket holds more than the room
                batch = _Batch(self, 2 * batch.room, batch.begin)
                continue
            if code not in (0, errno.ENOENT):
                raise OSError(code, os.strerror(code))
            filled = batch.filled
            if filled:
                yield batch.keys[:filled], batch.values[:filled]
            if code == errno.ENOENT:
                break
            batch = _Batch(self, batch.room, batch.end)
        if not filled and batch.begin is None:  # nobody has seen it: maps are often asked in vain
            self._spare = batch

    def take_all(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns all entries and removes them; for maps whose entries are small."""
        return self._joined(take=True)

    def read_all(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns all entries; for maps whose entries are small."""
        return self._joined(take=False)

    def _joined(self, take: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        parts = list(self.chunks(take))
        return (
            join_rows([keys for keys, _ in parts], self.key_dtype),
            join_rows([values for _, values in parts], self.value_dtype),
        )

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """The kernel's own account of one program.

    `run_time_ns` and `run_count` move only while kernel.bpf_stats_enabled is 1 (v5.1);
    `recursion_misses` counts events the kernel skipped because they hit a BPF program (v5.12).
    """

    run_time_ns: int
    run_count: int
    recursion_misses: int


def program_cost(fd: int) -> ProgramCost:
    """Reads struct bpf_prog_info; fields that an older kernel lacks are 0."""
    info = _buffer(bytes(232))
    bpf(_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    run_time_ns, run_count, misses = struct.unpack_from("<QQQ", info, 192)
    return ProgramCost(run_time_ns, run_count, misses)


def count_run_times() -> int:
    """Has the kernel count the time of all programs while the returned descriptor is open.

    Raises:
        OSError: It takes CAP_SYS_ADMIN, and Linux v5.8.
    """
    return bpf(_ENABLE_STATS, struct.pack("<I", _STATS_RUN_TIME))


def open_raw_tracepoint(name: str, program_fd: int) -> int:
    """Attaches a program to a raw tracepoint; it stays while the returned descriptor is open."""
    name_buffer = ctypes.create_string_buffer(name.encode())
    return bpf(
        _RAW_TRACEPOINT_OPEN, struct.pack("<QII", ctypes.addressof(name_buffer), program_fd, 0)
    )


def open_cpu_clock(cpu: int, period_ns: int) -> int:
    """Opens a disabled cpu-clock event that fires every `period_ns` on one CPU, for all tasks."""
    attributes = bytearray(_PERF_ATTR_BYTES)
    struct.pack_into(
        "<IIQQ", attributes, 0, _PERF_TYPE_SOFTWARE, _PERF_ATTR_BYTES, _PERF_COUNT_SW_CPU_CLOCK,
        period_ns,
    )  # fmt: skip
    struct.pack_into("<Q", attributes, 40, _PERF_ATTR_DISABLED)
    return _open_for_all_tasks(attributes, cpu)


def open_life_events(cpu: int, wakeup_bytes: int) -> int:
    """Opens an event that counts nothing, and tells of forks, execs and executable mappings.

    Args:
        cpu: On which they happen, in any process.
        wakeup_bytes: It is readable once so much was written to the ring that is mapped of it.

    Returns:
        Its descriptor. The times are those of bpf_ktime_get_ns.

    Raises:
        OSError: The kernel refuses it.
    """
    attributes = bytearray(_PERF_ATTR_BYTES)
    struct.pack_into(
        "<IIQQQQQI", attributes, 0, _PERF_TYPE_SOFTWARE, _PERF_ATTR_BYTES, _PERF_COUNT_SW_DUMMY,
        *(0, _PERF_SAMPLE_TIME, 0, _PERF_ATTR_LIVES, wakeup_bytes),
    )  # fmt: skip
    struct.pack_into("<i", attributes, 92, time.CLOCK_MONOTONIC)
    return _open_for_all_tasks(attributes, cpu)


def _open_for_all_tasks(attributes: bytearray, cpu: int) -> int:
    """Opens a perf event of one CPU; returns its descriptor."""
    return syscall(
        this_architecture().syscall_perf_event_open,
        bytes(attributes),
        ctypes.c_int(-1),
        ctypes.c_int(cpu),
        ctypes.c_int(-1),
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )


def uprobe_event_type() -> int:
    """Returns the kernel's number for uprobes as perf events (v4.17).

    Raises:
        OSError: It has none.
    """
    return int(kernelfs.read_bytes(_UPROBE_TYPE))


def open_uprobe(path: str, offset: int, event_type: int, is_return: bool = False) -> int:
    """Opens an event that fires wherever any process executes one offset of a file.

    Args:
        path: Of the file; a link in /proc/self/fd will do.
        offset: Of the instruction in the file, in bytes; of a function's first where the event is
            to fire when it returns.
        event_type: As uprobe_event_type returns it.
        is_return: At the return.

    Raises:
        OSError: The kernel refuses it: no regular file, or no instruction there.
    """
    path_buffer = ctypes.create_string_buffer(os.fsencode(path))
    attributes = bytearray(_PERF_ATTR_BYTES)
    # struct perf_event_attr: uprobe_path and probe_offset are its config1 and config2; the lowest
    # bit of config says "return" (/sys/bus/event_source/devices/uprobe/format).
    struct.pack_into("<IIQ", attributes, 0, event_type, _PERF_ATTR_BYTES, int(is_return))
    struct.pack_into("<QQ", attributes, 56, ctypes.addressof(path_buffer), offset)
    # A CPU has to be named; BPF programs run on all of them.
    return syscall(
        this_architecture().syscall_perf_event_open,
        bytes(attributes),
        ctypes.c_int(-1),
        ctypes.c_int(0),
        ctypes.c_int(-1),
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )


def link_event(event_fd: int, program_fd: int, cookie: int) -> int:
    """Runs a program at each firing of an event, with a number that it can ask for (v5.15).

    Returns:
        The link, which lives as long as its descriptor.

    Raises:
        OSError: The kernel refuses it.
    """
    return bpf(
        _LINK_CREATE, struct.pack("<IIIIQ24x", program_fd, event_fd, _ATTACH_PERF_EVENT, 0, cookie)
    )


def link_uprobes(
    path: str, sites: Sequence[tuple[int, int]], program_fd: int, is_return: bool = False
) -> int:
    """Runs a program at many sites of a file, as open_uprobe and link_event do at one.

    The kernel takes all off at once, where each event has it wait for all processors.

    Args:
        path: As for open_uprobe.
        sites: Offset and number of each.
        program_fd: Loaded for TRACE_UPROBE_MULTI.
        is_return: At the return.

    Returns:
        The link, which lives as long as its descriptor.

    Raises:
        OSError: The kernel refuses one of them, and takes none.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    offsets = ctypes.create_string_buffer(struct.pack(f"<{len(sites)}Q", *(p[0] for p in sites)))
    cookies = ctypes.create_string_buffer(struct.pack(f"<{len(sites)}Q", *(p[1] for p in sites)))
    # uprobe_multi of union bpf_attr: path, offsets, ref_ctr_offsets, cookies, cnt, flags, pid.
    pointers = (ctypes.addressof(name), ctypes.addressof(offsets), 0, ctypes.addressof(cookies))
    return bpf(
        _LINK_CREATE,
        struct.pack("<IIII", program_fd, 0, TRACE_UPROBE_MULTI, 0)
        + struct.pack("<QQQQIII4x", *pointers, len(sites), int(is_return), 0),
    )


def set_event_program(event_fd: int, program_fd: int) -> None:
    """Runs a program at each overflow of a perf event."""
    ioctl(event_fd, _PERF_EVENT_IOC_SET_BPF, program_fd)


def enable_event(event_fd: int) -> None:
    """Starts a perf event."""
    ioctl(event_fd, _PERF_EVENT_IOC_ENABLE, 0)


def open_task_iterator(program_fd: int, pid: int | None) -> int:
    """Opens what runs an iterator program over tasks when it is read; returns the descriptor.

    Args:
        program_fd: The program.
        pid: The process whose threads are visited, None for all tasks.

    Raises:
        OSError: E2BIG where the kernel cannot be told a process (before v6.1).
    """
    # union bpf_iter_link_info, its member task: tid, pid, pid_fd.
    which = b"" if pid is None else struct.pack("<III", 0, pid, 0)
    which_buffer = _buffer(which)
    which_address = ctypes.addressof(which_buffer) if which else 0
    link_fd = bpf(
        _LINK_CREATE,
        struct.pack("<IIIIQI4x", program_fd, 0, _TRACE_ITER, 0, which_address, len(which)),
    )
    try:
        return bpf(_ITER_CREATE, struct.pack("<II", link_fd, 0))
    finally:
        os.close(link_fd)  # the iterator holds the link
