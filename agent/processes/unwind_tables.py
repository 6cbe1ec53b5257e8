# SPDX-License-Identifier: Apache-2.0
"""Decides which unwind tables and mappings the kernel half has, so that it can walk any code.

Tables come from the cache on disk at once; one that has to be built is built by a child process,
those that samples need most first, while the recorder goes on draining and stacks are walked by
frame pointer. When the kernel's share of memory is used up, tables that no sample has needed for
the longest time make room, then those of users, containers and processes that have more than their
share. After an exec the kernel half uses no mappings until the new image's
are there.

Changes are collected, and made by `poll`: `kernel/unwind_tables` tells why.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.kernel.unwind_tables import KernelTables, table_bytes
from aiflame.agent.losses import LossKind, blame
from aiflame.agent.processes.cached_tables import CachedTables
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.table import DAMAGE, PAGE_SHIFT, RULES_CUT, UnwindTable

# A process may have 65,530 mappings (vm.max_map_count); the kernel half halves 17 times.
_MAX_MAPPINGS = (1 << 16) - 1

# A table needed in one of the last three drains is in use: it is not taken out.
_DRAINS_IN_USE = 3


# How long a recording may begin later so that its first samples find their tables. Those of Python
# with numpy take 0.6 s of CPU time, and those of PyTorch 4.4 s, 3.4 s of that for libtorch_cpu; a
# target that keeps all processors busy leaves the builders half of one each. Past it, stacks in
# what is left are walked when its table comes.
_BEFORE_START_NS = 4_000_000_000
# When it is said what takes so long.
_SILENT_NS = 1_000_000_000
# How long a Ctrl-C may go unnoticed meanwhile.
_LOOK_NS = 100_000_000

# A table that could not be made is tried again after so long, if samples need it: the disk may have
# been full, or memory short, when it was.
_TRY_AGAIN_NS = 3_600_000_000_000

# Of whom it is known how long their tables took: services come and go.
_MAX_PAYERS = 1024

# What shares are counted in: fine enough for the smallest table.
_WHOLE = 1 << 32


def _payer(image: ProcessImage) -> Hashable:
    return image.payer


def _process(image: ProcessImage) -> Hashable:
    return image.pid


class UnwindTables:
    """The tables and mappings in the kernel.

    Args:
        programs: Loaded programs.
        table: Process table; says who maps what, and which images are current.
        cache: Directory of the cache on disk, None for none.
        limit_bytes: Bound of kernel memory for tables and mappings.
        watch: Told of a descriptor that becomes readable when `poll` has something to do.
        builder_bytes: What a process that makes tables may have of its own; 0 for what any takes.

    Attributes:
        late: Tables that were made since the recording goes on.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        cache: Path | None,
        limit_bytes: int,
        watch: Callable[[int], None],
        builder_bytes: int = 0,
    ) -> None:
        self._table = table
        self.images = ElfImages(table.binaries)
        self._cache = CachedTables(
            table.binaries, self.images, cache, watch, self._urgency, builder_bytes
        )
        self.late = 0
        self.losses: Counter[LossKind] = Counter()
        self.loss_files: dict[LossKind, set[str]] = {}
        self._limit_bytes = limit_bytes
        self._kernel = KernelTables(programs, limit_bytes, self.losses)
        self._hits: Counter[int] = Counter()  # stacks that each binary was in, over all drains
        self._last_ns = abi.NEVER_NS
        self._settled: set[int] = set()  # binaries whose table is in the cache, or cannot be
        self._building: set[int] = set()
        self._failed_ns: dict[int, int] = {}  # when a table could not be made, monotonic
        self._payers: defaultdict[int, set[str]] = defaultdict(set)  # who maps a binary
        self._spent_s: defaultdict[str, float] = defaultdict(float)  # on tables of a payer
        self._noted: set[int] = set()  # those of which it was counted what is missing
        self._without: set[int] = set()  # those among them that have none
        self._wanted: set[int] = set()  # needed by samples, but out of the kernel
        self._short: set[int] = set()  # those for which there was no room
        self._used_at: dict[int, int] = {}  # the last drain that needed a binary's table
        self._drains = 0
        self._queued: dict[int, ProcessImage] = {}  # by pid
        self._over: list[ProcessImage] = []  # images that are over, of which tables are wanted
        self._gone: set[int] = set()
        self._pushed: dict[int, ProcessImage] = {}  # by pid
        self._told: set[int] = set()

    @property
    def kernel_bytes(self) -> int:
        """What tables and mappings have of the kernel's memory."""
        return self._limit_bytes - self._kernel.free_bytes

    def push(self, image: ProcessImage) -> None:
        """Has `poll` bring a process's mappings, and the tables of what it maps.

        Of an image that is over, the tables alone: others like it, and late walks, need them.
        """
        if self._table.is_current(image):
            self._queued[image.pid] = image
            self._gone.discard(image.pid)
        else:
            self._over.append(image)

    def maps_new_files(self, image: ProcessImage) -> bool:
        """Whether a process maps files that none maps of which `poll` has brought anything."""
        binaries = {mapping.binary for mapping in image.mappings} - {NO_BINARY}
        return not binaries <= self._payers.keys()

    def forget(self, pid: int) -> None:
        """Has `poll` take a process's mappings out."""
        self._queued.pop(pid, None)
        self._told.discard(pid)
        if pid in self._pushed:
            self._gone.add(pid)

    def forget_images(self, images: Collection[int]) -> None:
        """Has `poll` take out the mappings of images that are over, of whose end nobody told.

        As of one that called exec, where the next program ended before anybody heard of it.
        """
        over = [pid for pid, image in self._pushed.items() if image.index in images]
        self._told.difference_update(over)
        self._gone.update(over)

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more; their tables leave the kernel."""
        for binary in binaries:
            self._hits.pop(binary, None)
            self._used_at.pop(binary, None)
            self._payers.pop(binary, None)
            self._failed_ns.pop(binary, None)
        known = (self._settled, self._noted, self._without, self._wanted, self._short)
        for some in (*known, self._building):
            some.difference_update(binaries)
        # What all map, as the vDSO, is never forgotten: who has paid for it is.
        there = {image.payer for image in self._table.images.values()}
        for payers in self._payers.values():
            payers &= there
        self._cache.forget_binaries(binaries)
        self._kernel.remove([binary for binary in binaries if binary in self._kernel.loaded])
        self.images.forget_binaries(binaries)

    def renew(self, binaries: Collection[int]) -> None:
        """Asks anew about files that have no table, once their mappings are pushed again."""
        self.forget_binaries([one for one in binaries if one not in self._kernel.loaded])

    def note_used(self, hits: Counter[int]) -> None:
        """Takes note of how many of a drain's stacks each binary is in."""
        self._drains += 1
        # Stacks may be those of files that nobody maps any more.
        files = self._table.binaries.files
        hits = Counter({binary: count for binary, count in hits.items() if binary in files})
        self._hits.update(hits)
        self._try_again(hits.keys() & self._failed_ns.keys())
        for binary in hits:
            self._used_at[binary] = self._drains
            is_out = binary in self._settled and binary not in self._without
            if is_out and binary not in self._kernel.loaded:
                self._wanted.add(binary)

    def _try_again(self, binaries: Collection[int]) -> None:
        """Has tables asked for again that could not be made long ago."""
        now_ns = time.monotonic_ns()
        for binary in binaries:
            if now_ns - self._failed_ns[binary] >= _TRY_AGAIN_NS:
                del self._failed_ns[binary]
                for known in (self._settled, self._noted, self._without):
                    known.discard(binary)
                self._cache.forget_binaries([binary])
                self._wanted.add(binary)

    def poll(self) -> None:
        """Makes the changes that are due, and takes in tables that were built; never waits."""
        built = self._cache.finished()
        self.late += len(built)
        for binary, spent_s in self._cache.take_spent_s().items():
            self._charge(self._payers.get(binary, ()), spent_s)
        self._settled.update(built)
        self._building.difference_update(built)
        if built or self._wanted:
            renewed = {*built, *self._wanted}
            for image in list(self._pushed.values()):
                # Gone, or another program by now: its mappings must not take the new ones' place.
                maps_one = any(mapping.binary in renewed for mapping in image.mappings)
                if maps_one and self._table.is_current(image):
                    self._queued.setdefault(image.pid, image)
        if self._gone:
            self._kernel.drop_mappings(self._gone)
            for pid in self._gone:
                self._pushed.pop(pid, None)
            self._gone.clear()
        if self._queued or self._over or self._wanted:
            self._enter_tables([*self._queued.values(), *self._over])
            self._over.clear()
            there = self._kernel.loaded.keys() | self._building | self._without
            for binary in self._wanted - there - self._short:
                self._short.add(binary)
                self._blame(binary, LossKind.UNWIND_MEMORY_FULL, 1)
            images, self._queued = self._queued, {}
            self._kernel.set_mappings({pid: self._slots(image) for pid, image in images.items()})
            self._pushed.update(images)
            self._told.update(images)
        self._wanted.clear()

    def take_pushed(self) -> set[int]:
        """Returns the processes whose mappings or tables have come since last, by pid."""
        told, self._told = self._told, set()
        return told

    def _enter_tables(self, images: Collection[ProcessImage]) -> None:
        """Brings what the cache has of the tables that images map, or that samples need.

        As far as there is room.
        """
        found: dict[int, UnwindTable] = {}
        size_bytes = wanted_bytes = 0
        # An image that is over may have mappings of files that were closed meanwhile, as nobody who
        # is known maps them.
        files = self._table.binaries.files
        mapped = set()
        for image in images:
            for mapping in image.mappings:
                if mapping.binary in files:
                    mapped.add(mapping.binary)
                    self._payers[mapping.binary].add(image.payer)
        for binary in mapped | self._wanted:
            if binary in self._kernel.loaded or binary in self._without:
                continue
            table = self._cached(binary)
            if table is None:
                continue
            found[binary] = table
            size_bytes += table_bytes(table)
            wanted_bytes += table_bytes(table) * (binary in self._wanted)
        if wanted_bytes and not self._kernel.has_room(size_bytes, len(found)):
            self._evict(size_bytes, len(found))
        # Those that samples need first, in case there is not room for all.
        order = sorted(found, key=lambda binary: -self._hits[binary])
        self._kernel.enter({binary: found[binary] for binary in order})

    def _cached(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table from the cache; has it built where it is not there."""
        if binary in self._building:
            return None
        try:
            table = self._cache.load(binary)
        except BadUnwindInfo:
            self._blame(binary, LossKind.BAD_UNWIND_INFO, 1)
            self._settled.add(binary)
            self._without.add(binary)
            return None
        if table is None and binary in self._noted:  # it was there: the cache has let go of it
            self._noted.discard(binary)
            self._settled.discard(binary)
            self._cache.forget_binaries([binary])
        if table is not None:
            self._note_drops(binary, table)
            self._settled.add(binary)
        elif binary in self._settled:  # it was to be built, and could not be
            is_given_up = self._cache.is_given_up(binary)
            kind = LossKind.UNWIND_TABLE_NOT_BUILT if is_given_up else LossKind.BAD_UNWIND_INFO
            self._blame(binary, kind, 1)
            self._without.add(binary)
            self._failed_ns[binary] = time.monotonic_ns()
        elif self._cache.build(binary):
            self._building.add(binary)
        else:
            self._settled.add(binary)
            self._without.add(binary)
        return table

    def _note_drops(self, binary: int, table: UnwindTable) -> None:
        """Counts what is missing in a table, once."""
        if binary in self._noted:
            return
        self._noted.add(binary)
        damage = sum(table.drops.get(reason, 0) for reason in DAMAGE)
        if damage:
            self._blame(binary, LossKind.BAD_UNWIND_RECORDS, damage)
        if table.drops.get(RULES_CUT):
            self._blame(binary, LossKind.UNWIND_RULES_CUT, table.drops[RULES_CUT])

    def _charge(self, payers: Collection[str], spent_s: float) -> None:
        for payer in payers:
            self._spent_s[payer] += spent_s / len(payers)
        while len(self._spent_s) > _MAX_PAYERS:
            del self._spent_s[min(self._spent_s, key=self._spent_s.__getitem__)]

    def _urgency(self, binary: int) -> float:
        """What building a table is worth: samples that need it, by the time that it takes.

        Less for whoever has had much built: one file may be made to take a minute.
        """
        payers = self._payers.get(binary, ())
        spent_s = min((self._spent_s.get(payer, 0.0) for payer in payers), default=0.0)
        return (self._hits[binary] + 1) / self._cache.size_bytes(binary) / (1 + spent_s)

    def _blame(self, binary: int, kind: LossKind, count: int) -> None:
        self.losses[kind] += count
        blame(self.loss_files, kind, self._table.binaries.files[binary].path)

    def _evict(self, size_bytes: int, tables: int) -> None:
        """Makes room for tables of that size together.

        It takes the least used ones out, and first all mappings that lead to them.
        """
        needed_bytes = size_bytes - self._kernel.free_bytes
        needed_slots = tables - self._kernel.free_slots
        oldest = sorted(self._kernel.loaded, key=lambda binary: self._used_at.get(binary, 0))
        leaving: set[int] = set()
        for binary in oldest:
            is_enough = needed_bytes <= 0 and needed_slots <= 0
            if is_enough or self._used_at.get(binary, 0) > self._drains - _DRAINS_IN_USE:
                break
            leaving.add(binary)
            needed_bytes -= self._kernel.size_bytes(binary)
            needed_slots -= 1
        for payer in (_payer, _process):  # one user or container, then one process of it
            for binary in self._excess(payer, leaving):
                if needed_bytes <= 0 and needed_slots <= 0:
                    break
                leaving.add(binary)
                needed_bytes -= self._kernel.size_bytes(binary)
                needed_slots -= 1
        if not leaving:
            return
        users = [
            image
            for image in self._pushed.values()
            if any(mapping.binary in leaving for mapping in image.mappings)
        ]
        self._kernel.drop_mappings([image.pid for image in users])
        self._kernel.remove(leaving)
        for image in users:
            self._queued.setdefault(image.pid, image)

    def _excess(
        self, payer_of: Callable[[ProcessImage], Hashable], leaving: Collection[int]
    ) -> list[int]:
        """Returns tables in use of those that have more than their share, as others need room.

        Only what nobody else maps; those that samples need least come first. None where all that
        is wanted is of those that have their share themselves.
        """
        wanted = self._wanted - self._short  # once each: it takes a look at all mappings
        if not wanted:
            return []
        payers: defaultdict[int, set[Hashable]] = defaultdict(set)
        for image in {**self._pushed, **self._queued}.values():
            for mapping in image.mappings:
                payers[mapping.binary].add(payer_of(image))
        held: Counter[Hashable] = Counter()
        own = {}
        for binary in self._kernel.loaded.keys() - leaving:
            if len(payers[binary]) == 1:
                (own[binary],) = payers[binary]
                held[own[binary]] += self._part(binary)
        share = _WHOLE // max(len(set().union(*payers.values())), 1)
        asking = set().union(*(payers[binary] for binary in wanted))
        if all(held[payer] >= share for payer in asking):
            return []
        found = []
        for binary in sorted(own, key=lambda binary: self._hits[binary]):
            payer = own[binary]
            if payer not in asking and held[payer] - self._part(binary) >= share:
                held[payer] -= self._part(binary)
                found.append(binary)
        return found

    def _part(self, binary: int) -> int:
        """How much of the memory for tables, or of the slots, a table takes; of `_WHOLE`."""
        of_bytes = _WHOLE * self._kernel.size_bytes(binary) // max(self._limit_bytes, 1)
        return max(of_bytes, _WHOLE // abi.TABLES_MAX)

    def _slots(self, image: ProcessImage) -> npt.NDArray[np.void]:
        """A process's mappings as the kernel half reads them."""
        count = min(len(image.mappings), _MAX_MAPPINGS)
        self.losses[LossKind.TOO_MANY_MAPPINGS] += len(image.mappings) - count
        slots = np.zeros(count + 1, abi.MAPPING_SLOT_DTYPE)
        # Random, so that no target can make addresses that look like another one's (bpf/unwind.h).
        identity = secrets.randbits(64)
        slots[0]["start"], slots[0]["end"], slots[0]["bias"] = image.image, count, identity
        slots["start"][1:], slots["end"][1:] = image.bounds[:, :count]
        for row, mapping in enumerate(image.mappings[:count], 1):
            loaded = self._kernel.loaded.get(mapping.binary)
            if loaded is not None:
                bias = self.images.bias(mapping) + (loaded.base_page << PAGE_SHIFT)
                slots[row]["bias"] = bias % (1 << 64)
                slots[row]["table"], slots[row]["pages"] = loaded.slot, loaded.pages
            elif mapping.binary == NO_BINARY:
                slots[row]["table"] = abi.TABLE_IS_NONE
            elif mapping.binary not in self._without:
                slots[row]["table"] = abi.TABLE_IS_MISSING
        return slots

    def table_of(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table for a walk in Python, None where there is none in the cache."""
        with contextlib.suppress(BadUnwindInfo):  # counted when it was to be entered
            return self._cache.load(binary)
        return None

    def is_being_built(self, binary: int) -> bool:
        """Whether a binary's table is on its way; it is asked for if it is not in the cache."""
        if binary not in self._table.binaries.files:  # it was closed, and nobody opens it again
            return False
        if binary not in self._settled:
            self._cached(binary)
        return binary not in self._settled

    def are_settled(self, binaries: Collection[int]) -> bool:
        """Whether of each of some binaries there is a table, or will be none."""
        files = self._table.binaries.files
        return all(binary in self._settled or binary not in files for binary in binaries)

    def wait(
        self,
        binaries: Collection[int],
        deadline_ns: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Waits for tables that are being built; returns whether all are done.

        One that cannot be built is done as well.

        Args:
            binaries: Those to wait for.
            deadline_ns: Until when, monotonic.
            is_over: Whether nobody needs them any more.
        """
        deadline_ns = min(deadline_ns, self._last_ns)
        return self._wait(lambda: not self.are_settled(binaries), deadline_ns, is_over)

    def end_by(self, deadline_ns: int) -> None:
        """Lets nobody `wait` past a time, monotonic."""
        self._last_ns = deadline_ns

    def _wait(
        self, is_missing: Callable[[], bool], deadline_ns: int, is_over: Callable[[], bool]
    ) -> bool:
        while is_missing():
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0 or is_over() or not self._cache.is_at_work:
                return False
            self._cache.wait(min(left_ns, _LOOK_NS) / 1e9)
            self.poll()
        return True

    def wait_before_start(self, say: Callable[[str], None], is_over: Callable[[], bool]) -> None:
        """Waits for tables of files never recorded before: first stacks need them.

        Args:
            say: Takes a line when it takes long.
            is_over: Whether the recording is to end before it has begun.
        """
        images = self._table.images
        wanted = {mapping.binary for image in images.values() for mapping in image.mappings}
        wanted |= self._building  # those that were asked for before anybody was seen to map them
        wanted.discard(NO_BINARY)
        begun_ns = time.monotonic_ns()

        def is_missing() -> bool:
            return self._cache.is_expecting or not self.are_settled(wanted)

        if not self._wait(is_missing, begun_ns + _SILENT_NS, is_over) and self._cache.is_at_work:
            say("unwind tables of files that were never recorded before are being made ...")
            self._wait(is_missing, begun_ns + _BEFORE_START_NS, is_over)

    def expect(self, fd: int) -> None:
        """As `CachedTables.expect`."""
        self._cache.expect(fd)

    def go_beside(self) -> None:
        """Waits for no change in the kernel any more: to be called once the recording goes on."""
        self.late = 0
        self._kernel.go_beside()

    def close(self) -> None:
        """Ends the builder of tables. The kernel frees the tables with the maps that hold them."""
        self._kernel.close()
        self._cache.close()
