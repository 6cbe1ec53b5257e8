# SPDX-License-Identifier: Apache-2.0
"""The machine code of what was sampled: kept while a recording runs, listed when it is over.

Code that no helper could tell of is looked for in the files of its process then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import NamedTuple

from aiflame.agent.losses import LossKind
from aiflame.gpu.base import CodeKey, Host, KernelSample, Listing
from aiflame.gpu.nvidia.cubin import unneeded_for, without
from aiflame.gpu.nvidia.late import Missing, Object, find
from aiflame.gpu.nvidia.listings import Listings, most_sampled

# Of a recording, in the recorder's memory, and of one process. What is sampled is a part of a
# library's, but a cubin of cuBLAS with one hot kernel may have some 10 MB, and its largest 50.
_MAX_BYTES, _MAX_BYTES_OF_PROCESS = 96 << 20, 64 << 20
# At least so much of it goes to each object, for what is kept beside its bytes: 24,576 at most.
_LEAST_BYTES = 4096
# What is known of objects, also of those that were not kept and of equal ones of many processes,
# and their kernels that were sampled: 25 MB, and the names are those of samples.
_MAX_OBJECTS, _MAX_NAMES = 1 << 16, 1 << 17
# Of those that are looked for when the recording is over, and whose process may be over before.
_MAX_MISSING = 1 << 14
# Of the code of one process, and of all in one second, as much is read and the object with which it
# becomes more: it takes 1 ms a MiB, in which the recorder does nothing else. More of one process
# would find no room; what one second has no time for is read when it is sampled again.
_MAX_READ_OF_PROCESS, _MAX_READ_AT_ONCE = _MAX_BYTES_OF_PROCESS, 256 << 20
# A capture has the whole of a cubin that is no larger; of others what listing the sampled kernels
# takes: nobody looks at the other ones of a library.
_MAX_WHOLE_BYTES = 1 << 20


class _Stored(NamedTuple):
    """What a capture keeps of a large cubin, and for which kernels: others cannot be listed."""

    data: bytes
    names: frozenset[str]


class KeptCode:
    """Code objects of which kernels were sampled.

    Args:
        host: Takes losses, and has what reads code.
        sm_of: Has the architecture of a device, 90 for sm_90.
    """

    def __init__(self, host: Host, sm_of: Callable[[int], int]) -> None:
        self._host = host
        self._sm_of = sm_of
        self._bytes: dict[Object, bytes] = {}
        # Processes of one program have the same code, which is kept once.
        self._distinct: dict[bytes, bytes] = {}
        self._samples: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
        self._names = 0  # of all samples
        self._missing: dict[Object, Missing] = {}
        self._files: defaultdict[int, set[int]] = defaultdict(set)  # by process
        self._found_in: dict[Object, int] = {}
        self._left = _MAX_BYTES
        self._kept: Counter[int] = Counter()  # bytes, by the process that brought them
        self._read: Counter[int] = Counter()  # bytes, by process
        self._read_at_once = 0
        self._interval = -1
        self._listings: Listings | None = None
        self._stored: dict[bytes, _Stored] = {}

    def keep(self, samples: Collection[KernelSample], read: Callable[[int], bytes]) -> None:
        """Keeps the code of what was sampled in one process.

        Args:
            samples: Of the process.
            read: Has the bytes of a code object, b"" where they were not kept there.
        """
        missing_before = len(self._missing)
        refused: set[Object] = set()
        for sample in samples:
            key = sample.code
            if not key.object:
                continue
            one = key.process, key.object
            if one not in self._bytes and len(self._bytes) >= _MAX_OBJECTS:
                refused.add(one)
                continue
            if one not in self._bytes and not self._keep(one, sample, read):
                continue
            if self._bytes[one]:
                self._count(self._samples[self._bytes[one]], key.name, sample.count)
            elif one in self._missing:
                self._miss(self._missing[one], sample)
        if len(self._missing) > missing_before:
            process = next(iter(samples)).code.process
            self._files[process].update(self._host.files(process))
        if refused:
            self._host.lose(LossKind.DEVICE_CODE_NOT_KEPT, len(refused))

    def _count(self, known: Counter[str], name: str, count: int) -> bool:
        """Counts samples of a kernel, unless there are too many; its listing says so then."""
        if name not in known:
            if self._names >= _MAX_NAMES:
                return False
            self._names += 1
        known[name] += count
        return True

    def _miss(self, missing: Missing, sample: KernelSample) -> None:
        name = sample.code.name
        if self._count(missing.counts, name, sample.count):
            missing.last[name] = max(missing.last.get(name, 0), sample.offset)

    def _keep(self, one: Object, sample: KernelSample, read: Callable[[int], bytes]) -> bool:
        """Reads a code object, unless this second has no time for it."""
        if sample.interval != self._interval:
            self._interval, self._read_at_once = sample.interval, 0
        if self._read_at_once >= _MAX_READ_AT_ONCE:
            return False
        process, code = one
        self._bytes[one] = b""
        if self._read[process] >= _MAX_READ_OF_PROCESS:
            self._host.lose(LossKind.DEVICE_CODE_NOT_KEPT)
            return True
        data = read(code)
        self._read[process] += len(data)
        self._read_at_once += len(data)
        if data:
            self._bytes[one] = self._stored_once(process, data)
        elif len(self._missing) < _MAX_MISSING:
            self._missing[one] = Missing(self._sm_of(sample.device))
        else:
            self._host.lose(LossKind.DEVICE_CODE_NOT_FOUND)
        return True

    def _stored_once(self, process: int, data: bytes) -> bytes:
        """Returns code that may be kept, equal ones the same; b"" where there is no room."""
        if data in self._distinct:
            return self._distinct[data]
        cost = max(len(data), _LEAST_BYTES)
        if cost > min(self._left, _MAX_BYTES_OF_PROCESS - self._kept[process]):
            self._host.lose(LossKind.DEVICE_CODE_NOT_KEPT)
            return b""
        self._left -= cost
        self._kept[process] += cost
        return self._distinct.setdefault(data, data)

    def forget(self, process: int) -> None:
        """Forgets what is known of a process that is over, but for the code that was sampled."""
        self._read.pop(process, None)
        self._kept.pop(process, None)
        for one in [one for one, data in self._bytes.items() if one[0] == process and not data]:
            del self._bytes[one]

    def listing(self, key: CodeKey, offsets: frozenset[int]) -> Listing | None:
        """Returns a kernel's instructions, as far as there are any, and its source lines."""
        if self._listings is None:
            self._find_missing()
            self._listings = Listings(self._host, self._samples)
        data = self._of(key)
        if key.object and not data:
            return None  # counted by why there is none
        return self._listings.of(data, key.name, offsets)

    def _find_missing(self) -> None:
        for one, found in find(self._host, self._missing, self._files):
            data = self._bytes[one] = self._stored_once(one[0], found.data)
            if data:
                self._samples[data].update(self._missing[one].counts)
                self._found_in[one] = found.file

    def found_in(self, key: CodeKey) -> int | None:
        """Returns the file in which a kernel's code was found, None where a helper has told it."""
        return self._found_in.get((key.process, key.object))

    def code(self, key: CodeKey) -> bytes:
        """Returns what a capture keeps of the cubin that has a kernel, b"" where it was not kept.

        It is the same for all sampled kernels of a cubin, which can be listed from it.
        """
        data = self._of(key)
        samples = self._samples.get(data)
        if samples is None or key.name not in samples:
            return b""
        if len(data) <= _MAX_WHOLE_BYTES:
            return data
        if data not in self._stored:
            names = most_sampled(samples)
            parts = self._host.about(names[0], data, unneeded_for(names, len(data)))
            found = without(data, parts) if parts else data
            self._stored[data] = _Stored(found, frozenset(names))
        stored = self._stored[data]
        return stored.data if key.name in stored.names else b""

    def _of(self, key: CodeKey) -> bytes:
        return self._bytes.get((key.process, key.object), b"")
