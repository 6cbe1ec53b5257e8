# SPDX-License-Identifier: Apache-2.0
"""The unwind table of one binary, as the kernel half searches it and as it lies in the cache.

An address is (page of 512 bytes, offset in it), so a row takes 4 bytes: its offset and the index of
its rule. Rules are few (a thousand in libtorch_cpu) and stored once. Each page that has code begins
with a row at offset 0, so a search never leaves its page; in pages this small it takes three steps.

Not here: reading CFI (`records`), and the life of tables in the kernel.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.records import I64, MAX_ROWS, U64, BadUnwindInfo
from aiflame.agent.unwind.x86_64 import RULE, RbpKind, Rule, RuleKind

PAGE_SHIFT = 9
PAGE_BYTES = 1 << PAGE_SHIFT
ROW = np.dtype([("offset", "<u2"), ("rule", "<u2")])
# A row has 16 bits for the number of one; libtorch_cpu has 1,000.
MAX_RULES = 1 << 16
# 2 GiB between the first and the last function: what relative calls reach.
MAX_PAGES = 1 << 31 - PAGE_SHIFT

# Why an FDE or a row is not in the table. The order is that of the cache file: append only.
DROP_REASONS = (
    "bad CIE",
    "bad record",
    "bad program",
    "costly program",
    "long program",
    "unknown pointer encoding",
    "records not reached",
    "outside code",
    "overlapped",
    "rule over the limit",
    "compressed section",
    "function without CFI",
    "table of Go",
)

RULES_CUT = "rule over the limit"
# Those that tell of damage; the others come with sound files, too.
DAMAGE = DROP_REASONS[:7]

_MAGIC = b"aifunw02"
# magic, CRC-32 of all that follows the header, base page, pages, rows, rules
_HEADER = struct.Struct("<8sIIQIII4x")
_IDENTITY_BYTES = 32
_DROPS = np.dtype("<u4")


class CorruptTable(BadUnwindInfo):
    """A cache file is cut, damaged, of another version, or was made from another binary."""


@dataclass(frozen=True, slots=True)
class UnwindTable:
    """Rules by virtual address of the binary. All arrays may be views of a cache file.

    Attributes:
        base_page: Number (address >> PAGE_SHIFT) of the first page.
        page_first_row: Rows of page p are rows[page_first_row[p]:page_first_row[p + 1]], u32 of
            shape (pages + 1,).
        rows: ROW of shape (n,), sorted within each page.
        rules: RULE of shape (r,), distinct; rule 0 is NO_CFI, rule 1 UNSUPPORTED.
        drops: What is missing, by DROP_REASONS; only counts above 0.
    """

    base_page: int
    page_first_row: npt.NDArray[np.uint32]
    rows: npt.NDArray[np.void]
    rules: npt.NDArray[np.void]
    drops: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Memory in the kernel, in bytes."""
        return self.page_first_row.nbytes + self.rows.nbytes + self.rules.nbytes

    def lookup(self, address: int) -> Rule:
        """The rule for an instruction at a virtual address of the binary."""
        page = (address >> PAGE_SHIFT) - self.base_page
        if not 0 <= page < len(self.page_first_row) - 1:
            return arch.NO_CFI_RULE
        first, end = int(self.page_first_row[page]), int(self.page_first_row[page + 1])
        offset = np.uint16(address % PAGE_BYTES)
        row = first + int(np.searchsorted(self.rows["offset"][first:end], offset, "right")) - 1
        if row < first:
            return arch.NO_CFI_RULE
        kind, rbp_kind, rbp_offset, cfa_offset = self.rules[int(self.rows["rule"][row])].tolist()
        return Rule(RuleKind(kind), RbpKind(rbp_kind), rbp_offset, cfa_offset)

    @classmethod
    def of_states(cls, addresses: U64, states: U64, drops: Mapping[str, int]) -> UnwindTable:
        """Make the table from where each state begins.

        Args:
            addresses: Ascending and distinct, shape (n,).
            states: See `x86_64`, shape (n,); NO_CFI_STATE where nothing is known.
            drops: What is missing so far.

        Raises:
            BadUnwindInfo: It would have more than MAX_PAGES or MAX_ROWS.
        """
        rules, rule_rows, cut = _rules(states)
        differs = np.ones(len(rule_rows), bool)
        differs[1:] = rule_rows[1:] != rule_rows[:-1]
        addresses, rule_rows = addresses[differs], rule_rows[differs]
        base, first_rows, rows = _pages(addresses, rule_rows)
        counts = {**drops, RULES_CUT: cut}
        kept = {reason: counts[reason] for reason in DROP_REASONS if counts.get(reason)}
        return cls(base, first_rows, rows, rules, kept)

    def to_chunks(self, identity: bytes) -> list[bytes | memoryview]:
        """The contents of a cache file, for `from_mapping`.

        Args:
            identity: 32 bytes that tell this binary from all others.
        """
        drops = np.array([self.drops.get(reason, 0) for reason in DROP_REASONS], _DROPS)
        body: list[bytes | memoryview] = [identity, drops.tobytes()]
        arrays = (self.rules, self.page_first_row, self.rows)
        body += [np.ascontiguousarray(array).view(np.uint8).data for array in arrays]
        crc = 0
        for chunk in body:
            crc = zlib.crc32(chunk, crc)
        pages = len(self.page_first_row) - 1
        counts = (pages, len(self.rows), len(self.rules))
        return [_HEADER.pack(_MAGIC, crc, len(DROP_REASONS), self.base_page, *counts), *body]

    @classmethod
    def from_mapping(cls, mapping: mmap.mmap | bytes, identity: bytes) -> UnwindTable:
        """Use a cache file in place.

        Raises:
            CorruptTable: It is damaged or of another binary.
        """
        data = memoryview(mapping)
        if len(data) < _HEADER.size + _IDENTITY_BYTES:
            raise CorruptTable("cut inside the header")
        magic, crc, reasons, base, pages, count, rule_count = _HEADER.unpack_from(data)
        drops_at = _HEADER.size + _IDENTITY_BYTES
        rules_at = drops_at + 4 * reasons
        pages_at = rules_at + RULE.itemsize * rule_count
        rows_at = pages_at + 4 * (pages + 1)
        if magic != _MAGIC or len(data) != rows_at + ROW.itemsize * count:
            raise CorruptTable("another version, or cut")
        if data[_HEADER.size : drops_at] != identity:
            raise CorruptTable("made from another binary")
        if reasons != len(DROP_REASONS) or zlib.crc32(data[_HEADER.size :]) != crc:
            raise CorruptTable("it does not match its checksum")
        drops = np.frombuffer(data, _DROPS, reasons, drops_at).tolist()
        table = cls(
            base_page=base,
            page_first_row=np.frombuffer(data, "<u4", pages + 1, pages_at),
            rows=np.frombuffer(data, ROW, count, rows_at),
            rules=np.frombuffer(data, RULE, rule_count, rules_at),
            drops={r: n for r, n in zip(DROP_REASONS, drops, strict=True) if n},
        )
        table.check()
        return table

    def check(self) -> None:
        """Make sure that a search stays inside the arrays, and finds a rule that there is.

        Raises:
            CorruptTable: It would not.
        """
        first = self.page_first_row
        sound = len(first) > 0 and first[0] == 0 and first[-1] == len(self.rows)
        sound = sound and bool((first[1:] >= first[:-1]).all())
        highest = int(self.rows["rule"].max()) if len(self.rows) else 0
        if not sound or highest >= len(self.rules):
            raise CorruptTable("indexes reach outside the table")
        kinds, rbp_kinds = self.rules["kind"], self.rules["rbp_kind"]
        if (kinds > max(arch.RuleKind)).any() or (rbp_kinds > max(arch.RbpKind)).any():
            raise CorruptTable("rules of kinds that there are not")


def _rules(states: U64) -> tuple[npt.NDArray[np.void], I64, int]:
    """Distinct rules, the rule of each state, and how many rules found no room."""
    distinct, which, counts = _unique(states)
    index_of: dict[Rule, int] = {arch.NO_CFI_RULE: 0, arch.UNSUPPORTED_RULE: 1}
    rule_rows = np.ones(len(distinct), np.int64)
    # The most used first, so that no table with too many rules loses an important one. Some states
    # have a rule in common, few of them.
    order = np.argsort(-counts, kind="stable")
    cut = max(len(order) - 2 * MAX_RULES, 0)
    for position in order[: 2 * MAX_RULES].tolist():
        rule = arch.rule_of(int(distinct[position]))
        if rule not in index_of and len(index_of) == MAX_RULES:
            rule = arch.UNSUPPORTED_RULE
            cut += 1
        rule_rows[position] = index_of.setdefault(rule, len(index_of))
    rules = np.array([tuple(rule) for rule in index_of], RULE)
    return rules, rule_rows[which], cut


def _unique(states: U64) -> tuple[U64, I64, I64]:
    """Distinct words, the index of each word among them, and how often each occurs.

    Programs repeat the same few hundred states, so looking all words up in the sorted states of a
    sample is several times faster than sorting millions; words that the sample missed are sorted.
    """
    distinct = np.unique(states[:: max(1, len(states) // 65_536)])
    for _ in range(2):
        which = np.searchsorted(distinct, states)
        which[which == len(distinct)] = 0
        missed = distinct[which] != states if len(distinct) else np.zeros(0, bool)
        if not missed.any():
            break
        distinct = np.union1d(distinct, states[missed])
    return distinct, which, np.bincount(which, minlength=len(distinct))


def _pages(
    addresses: U64, rule_rows: I64
) -> tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.void]]:
    """Cut the rows into pages and repeat the rule in force at the start of each."""
    if not len(addresses):
        return 0, np.zeros(1, np.uint32), np.zeros(0, ROW)
    base = int(addresses[0]) >> PAGE_SHIFT
    count = (int(addresses[-1]) >> PAGE_SHIFT) - base + 1
    if count > MAX_PAGES or len(addresses) > MAX_ROWS:
        raise BadUnwindInfo(f"code in {count} pages with {len(addresses)} rows, over the limit")
    starts = (np.arange(count + 1, dtype=np.uint64) + np.uint64(base)) << np.uint64(PAGE_SHIFT)
    bounds = np.searchsorted(addresses, starts)
    begins, ends = bounds[:-1], bounds[1:]
    in_force = np.where(begins > 0, rule_rows[np.maximum(begins, 1) - 1], 0)
    has_own = (begins < ends) & (addresses[np.minimum(begins, len(addresses) - 1)] == starts[:-1])
    added = ~has_own & ((begins < ends) | (in_force != 0))
    rows = np.empty(len(addresses), ROW)
    rows["offset"] = addresses & np.uint64(PAGE_BYTES - 1)
    rows["rule"] = rule_rows
    carried = np.zeros(int(added.sum()), ROW)
    carried["rule"] = in_force[added]
    first_rows = bounds + np.concatenate([[0], np.cumsum(added)])
    return base, first_rows.astype(np.uint32), np.insert(rows, begins[added], carried)
