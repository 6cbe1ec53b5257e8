# SPDX-License-Identifier: Apache-2.0
"""The stacks of a window as flat arrays, and the pure steps between addresses and frames.

Every address becomes (owner, address to look up): the owner is a process image or the kernel, and
callers are looked up one byte before their return address, so that a call at a function's very
end is not taken for the next function. Equal pairs are resolved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import StopReason

KERNEL_OWNER = 0xFFFF_FFFF

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# (id, process, kernel depth, stop reason, addresses).
RawRow = tuple[int, int, int, int, bytes]

# How walks end that may go on elsewhere: at what they cannot read, or have no table of.
_CUT_REASONS = (
    StopReason.NO_FRAME_POINTER,
    StopReason.UNREADABLE,
    StopReason.NO_TABLE,
    StopReason.NO_TABLE_YET,
)


@dataclass(frozen=True, slots=True)
class RawStacks:
    """Shapes: n stacks, m addresses in all, u distinct locations.

    Attributes:
        ids: Row ids, shape (n,).
        starts: First address of each stack, shape (n + 1,).
        kernel_depths: How many of them are the kernel's, shape (n,).
        stop_reasons: StopReason of each, shape (n,).
        positions: Distance from the leaf, shape (m,).
        location: Index of each address among the distinct locations, shape (m,).
        owners: Process image or KERNEL_OWNER of each location, shape (u,).
        addresses: Address to look up of each location, shape (u,).
    """

    ids: I64
    starts: I64
    kernel_depths: I64
    stop_reasons: npt.NDArray[np.uint8]
    positions: I64
    location: I64
    owners: npt.NDArray[np.uint32]
    addresses: U64

    @classmethod
    def of_rows(cls, rows: Sequence[RawRow]) -> RawStacks:
        """Makes the arrays from rows."""
        lengths = np.array([len(row[4]) // 8 for row in rows], np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        raw = np.frombuffer(b"".join(row[4] for row in rows), "<u8").astype(np.uint64)
        kernel_depths = np.array([row[2] for row in rows], np.int64)
        positions = np.arange(len(raw), dtype=np.int64) - np.repeat(starts[:-1], lengths)
        depth_of = np.repeat(kernel_depths, lengths)
        is_kernel = positions < depth_of
        is_exact = (positions == 0) | (positions == depth_of)
        processes = np.repeat(np.array([row[1] for row in rows], np.uint64), lengths)
        owners = np.where(is_kernel, np.uint64(KERNEL_OWNER), processes)
        lookups = np.where(is_exact, raw, raw - np.uint64(1))
        distinct, compact = np.unique(lookups, return_inverse=True)
        keys, location = np.unique(
            owners << np.uint64(32) | compact.astype(np.uint64), return_inverse=True
        )
        return cls(
            ids=np.array([row[0] for row in rows], np.int64),
            starts=starts,
            kernel_depths=kernel_depths,
            stop_reasons=np.array([row[3] for row in rows], np.uint8),
            positions=positions,
            location=location.astype(np.int64),
            owners=(keys >> np.uint64(32)).astype(np.uint32),
            addresses=distinct[(keys & np.uint64(0xFFFF_FFFF)).astype(np.int64)],
        )

    @property
    def lengths(self) -> I64:
        """Addresses in each stack."""
        return np.diff(self.starts)

    def kept_lengths(self, is_mapped: Bools) -> I64:
        """Returns how many addresses of each stack are code.

        Where a frame pointer was used as a general register, a walk follows words that are no code:
        it is truncated at the first caller in no executable mapping. The leaf stays, whatever it
        is.

        Args:
            is_mapped: For each location, shape (u,).
        """
        limit = np.iinfo(np.int64).max
        is_user_caller = self.positions > np.repeat(self.kernel_depths, self.lengths)
        bad = np.where(is_user_caller & ~is_mapped[self.location], self.positions, limit)
        first_bad = np.full(len(self.ids), limit, np.int64)
        filled = self.lengths > 0
        if filled.any():
            first_bad[filled] = np.minimum.reduceat(bad, self.starts[:-1][filled])
        return np.minimum(self.lengths, first_bad)

    def first_kept(self, is_tracing: Bools, is_from_switch: Bools) -> I64:
        """Returns how many leafmost addresses of each stack are the profiler's own.

        A stack taken at a context switch begins in the BPF program and in what called it. In an
        on-CPU sample such frames are real time and stay.

        Args:
            is_tracing: For each location, shape (u,).
            is_from_switch: For each stack, shape (n,).
        """
        length = self.lengths
        position = np.where(is_tracing[self.location], np.iinfo(np.int64).max, self.positions)
        first = np.zeros(len(self.ids), np.int64)
        filled = length > 0
        if filled.any():
            first[filled] = np.minimum.reduceat(position, self.starts[:-1][filled])
        return np.where(is_from_switch, np.minimum(first, length), 0)

    def taken_by_exec(self, kept: I64, is_exec: Bools, is_past: Bools) -> Bools:
        """Tells which stacks exec had taken away, so that only their leaf, a register, is known.

        exec gives the thread another address space and frees the one that its caller's stack was in
        (exec_mmap in fs/exec.c), which takes as long as a short program runs. From there to its end
        there is no user stack: neither the caller's, nor one of the new program.

        Args:
            kept: As from `kept_lengths`.
            is_exec: For each location, whether it is in exec at all, shape (u,).
            is_past: The same, whether it is in what exec does only after that.
        """
        is_leaf_alone = kept - self.kernel_depths == 1
        is_unreadable = self.stop_reasons == StopReason.UNREADABLE
        is_cut = np.isin(self.stop_reasons, _CUT_REASONS)
        is_past_it = is_unreadable | (is_cut & self._have_kernel_frame(is_past))
        found: Bools = is_leaf_alone & is_past_it & self._have_kernel_frame(is_exec)
        return found

    def _have_kernel_frame(self, is_one: Bools) -> Bools:
        """Tells which stacks have a kernel frame at one of some locations."""
        stack_of = np.repeat(np.arange(len(self.ids)), self.lengths)
        is_kernel = self.positions < self.kernel_depths[stack_of]
        found = np.zeros(len(self.ids), bool)
        found[stack_of[is_kernel & is_one[self.location]]] = True
        return found

    def final_stop_reasons(self, kept: I64, is_thread_start: Bools) -> npt.NDArray[np.uint8]:
        """Returns the stop reason of each stack, now that its last frame is known.

        A chain of frame pointers ends at a zero or at an arbitrary word where code without them
        begins; it is complete only if its last frame is where threads and processes start.

        Args:
            kept: As from `kept_lengths`.
            is_thread_start: For each location, shape (u,).
        """
        found = self.stop_reasons.copy()
        by_pointer = np.isin(found, [StopReason.ROOTED, *_CUT_REASONS])
        is_cut = (kept < self.lengths) & (found != StopReason.KERNEL_ONLY)
        found[is_cut] = StopReason.NO_FRAME_POINTER
        has_user = kept > self.kernel_depths
        last = np.where(has_user, self.starts[:-1] + kept - 1, 0)
        is_rooted = np.zeros(len(found), bool)
        if len(self.location):
            is_rooted = has_user & is_thread_start[self.location[last]]
        found[by_pointer & is_rooted] = StopReason.ROOTED
        found[found == StopReason.ROOTED_BY_TABLE] = StopReason.ROOTED
        found[by_pointer & ~is_rooted & (found == StopReason.ROOTED)] = StopReason.NO_FRAME_POINTER
        return found

    def without_clone(self, kept: I64, is_clone: Bools, is_thread_start: Bools) -> I64:
        """Returns how many addresses of each stack to show: all but what calls a thread's start.

        That is clone3 or clone, in assembly. Some walks end before it: the root is to be the same.

        Args:
            kept: As from `kept_lengths`.
            is_clone: For each location, shape (u,).
            is_thread_start: The same, whether it is in what the C library starts threads with.
        """
        has_two = kept - self.kernel_depths >= 2
        if not has_two.any():
            return kept
        last = np.where(has_two, self.starts[:-1] + kept - 1, 1)
        is_pair = is_clone[self.location[last]] & is_thread_start[self.location[last - 1]]
        shown: I64 = kept - (has_two & is_pair)
        return shown

    def frame_ids(self, first: I64, kept: I64, chain_starts: I64, chain_frames: I64) -> list[bytes]:
        """Returns each stack's frame ids, root first, as little-endian u32.

        Args:
            first: As from `first_kept`.
            kept: As from `kept_lengths`.
            chain_starts: Where the frames of each location begin in `chain_frames`, shape (u + 1,).
            chain_frames: Frame ids of all locations, innermost inlined function first.
        """
        is_kept = self.positions < np.repeat(kept, self.lengths)
        is_kept &= self.positions >= np.repeat(first, self.lengths)
        locations = self.location[is_kept]
        counts = np.diff(chain_starts)[locations]
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        flat = chain_frames[np.repeat(chain_starts[locations], counts) + within].astype("<u4")
        owners = np.repeat(np.arange(len(self.ids)), self.lengths)[is_kept]
        sizes = np.bincount(owners, weights=counts, minlength=len(self.ids)).astype(np.int64)
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        return [
            flat[begin:end][::-1].tobytes()
            for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]
