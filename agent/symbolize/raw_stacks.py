# SPDX-License-Identifier: Apache-2.0
"""All stacks of a recording as flat arrays, and the pure steps between addresses and frames.

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


@dataclass(frozen=True, slots=True)
class RawStacks:
    """Shapes: n stacks, m addresses in all, u distinct places.

    Attributes:
        ids: Row ids, shape (n,).
        starts: First address of each stack, shape (n + 1,).
        kernel_depths: How many of them are the kernel's, shape (n,).
        ends: StopReason of each, shape (n,).
        positions: Distance from the leaf, shape (m,).
        place: Index of each address among the distinct places, shape (m,).
        owners: Process image or KERNEL_OWNER of each place, shape (u,).
        addresses: Address to look up of each place, shape (u,).
    """

    ids: I64
    starts: I64
    kernel_depths: I64
    ends: npt.NDArray[np.uint8]
    positions: I64
    place: I64
    owners: npt.NDArray[np.uint32]
    addresses: U64

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int, int, int, bytes]]) -> RawStacks:
        """Makes the arrays from (id, process, kernel depth, end, addresses) rows."""
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
        keys, place = np.unique(
            owners << np.uint64(32) | compact.astype(np.uint64), return_inverse=True
        )
        return cls(
            ids=np.array([row[0] for row in rows], np.int64),
            starts=starts,
            kernel_depths=kernel_depths,
            ends=np.array([row[3] for row in rows], np.uint8),
            positions=positions,
            place=place.astype(np.int64),
            owners=(keys >> np.uint64(32)).astype(np.uint32),
            addresses=distinct[(keys & np.uint64(0xFFFF_FFFF)).astype(np.int64)],
        )

    @property
    def lengths(self) -> I64:
        """Addresses in each stack."""
        return np.diff(self.starts)

    def kept_lengths(self, is_mapped: Bools) -> I64:
        """Returns how many addresses of each stack are to be believed.

        A frame pointer that was a general register leads to words that are no code: the walk is
        cut at the first caller in no executable mapping. The leaf stays, whatever it is.

        Args:
            is_mapped: For each place, shape (u,).
        """
        limit = np.iinfo(np.int64).max
        is_user_caller = self.positions > np.repeat(self.kernel_depths, self.lengths)
        bad = np.where(is_user_caller & ~is_mapped[self.place], self.positions, limit)
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
            is_tracing: For each place, shape (u,).
            is_from_switch: For each stack, shape (n,).
        """
        length = self.lengths
        position = np.where(is_tracing[self.place], np.iinfo(np.int64).max, self.positions)
        first = np.zeros(len(self.ids), np.int64)
        filled = length > 0
        if filled.any():
            first[filled] = np.minimum.reduceat(position, self.starts[:-1][filled])
        return np.where(is_from_switch, np.minimum(first, length), 0)

    def judged_ends(self, kept: I64, is_thread_start: Bools) -> npt.NDArray[np.uint8]:
        """Returns how each stack really ended.

        A chain of frame pointers ends in a zero or in junk where code without them takes over; it
        is complete only if its last frame is where threads and processes start.

        Args:
            kept: As from `kept_lengths`.
            is_thread_start: For each place, shape (u,).
        """
        ends = self.ends.copy()
        by_pointer = np.isin(
            ends,
            [
                StopReason.ROOTED,
                StopReason.NO_FRAME_POINTER,
                StopReason.UNREADABLE,
                StopReason.NO_TABLE,
            ],
        )
        ends[(kept < self.lengths) & (ends != StopReason.KERNEL_ONLY)] = StopReason.NO_FRAME_POINTER
        has_user = kept > self.kernel_depths
        last = np.where(has_user, self.starts[:-1] + kept - 1, 0)
        is_rooted = np.zeros(len(ends), bool)
        if len(self.place):
            is_rooted = has_user & is_thread_start[self.place[last]]
        ends[by_pointer & is_rooted] = StopReason.ROOTED
        ends[ends == StopReason.ROOTED_BY_TABLE] = StopReason.ROOTED
        ends[by_pointer & ~is_rooted & (ends == StopReason.ROOTED)] = StopReason.NO_FRAME_POINTER
        return ends

    def frame_blobs(
        self, first: I64, kept: I64, chain_starts: I64, chain_frames: I64
    ) -> list[bytes]:
        """Returns each stack's frame ids, root first, as little-endian u32.

        Args:
            first: As from `first_kept`.
            kept: As from `kept_lengths`.
            chain_starts: Where the frames of each place begin in `chain_frames`, shape (u + 1,).
            chain_frames: Frame ids of all places, innermost inlined function first.
        """
        is_kept = self.positions < np.repeat(kept, self.lengths)
        is_kept &= self.positions >= np.repeat(first, self.lengths)
        places = self.place[is_kept]
        counts = np.diff(chain_starts)[places]
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        flat = chain_frames[np.repeat(chain_starts[places], counts) + within].astype("<u4")
        owners = np.repeat(np.arange(len(self.ids)), self.lengths)[is_kept]
        sizes = np.bincount(owners, weights=counts, minlength=len(self.ids)).astype(np.int64)
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        return [
            flat[begin:end][::-1].tobytes()
            for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]
