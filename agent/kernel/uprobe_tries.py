# SPDX-License-Identifier: Apache-2.0
"""What this kernel does with uprobes, found out by trying: versions tell little of it.

Debian's 5.10 and 6.1 take a probe on `66 90`, which came with v6.2, and RHEL's 5.14 has links of
many probes, which came with v6.6. So a page of code of our own is probed and run. It is a memfd:
uprobes belong to files, and no folder need be writable for this one.

A probe on an emulated instruction costs one trap, one on a stepped instruction two and more: 0.57
against 11.4 us in a virtual machine on Linux 6.18, 2.6 against 18.7 us on 5.10 under QEMU's
software emulation. Each no-operation is compared with an instruction of either kind at the same
time, and the shortest of several runs counts, so a busy machine does not change the answer.

It takes 9 ms, half of that for the kernel to put on the first uprobe of all. The answers are kept
until the next boot.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from aiflame.agent import kernelfs
from aiflame.agent.kernel import sysbpf, syscalls
from aiflame.agent.kernel.bytecode import Refused
from aiflame.agent.symbols.store import Store

# What is probed, by what it is tried for. The first two are the measures: `nop` has been emulated
# since uprobes came (v3.5), and nobody has a reason to ever emulate `bswap eax`. The long
# no-operation is not the one of 5 bytes, which v6.18 turns into a call: others it only emulates.
_EMULATED, _STEPPED, _LONG, _PREFIXED = "emulated", "stepped", "long", "prefixed"
_SITES = {
    _EMULATED: bytes.fromhex("90"),
    _STEPPED: bytes.fromhex("0fc8"),
    _LONG: bytes.fromhex("0f1f4000"),
    _PREFIXED: bytes.fromhex("6690"),
}
_SITE_BYTES = 16
# A run of 16 probed instructions takes 10 to 200 us, far less than a time slice; of 8 runs one at
# least is not interrupted.
_LOOPS, _RUNS = 16, 8
# Two traps against one make at least this ratio; less means that the probes are not there.
_LEAST_RATIO = 1.5
# BPF: r0 = 0; exit.
_RETURN_0 = bytes.fromhex("b7000000000000009500000000000000")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEPT_AS = "uprobes.json"


class Treatment(enum.Enum):
    """What a kernel does with a probe on an instruction."""

    REFUSED = "refused"
    STEPPED = "stepped"
    EMULATED = "emulated"


@dataclass(frozen=True, slots=True)
class NopTreatment:
    """What this kernel does with no-operations; the defaults are right, if slow, on any kernel.

    Attributes:
        long: Those that begin with `0f 1f` or `66 0f 1f`.
        prefixed: `66 90`.
    """

    long: Treatment = Treatment.STEPPED
    prefixed: Treatment = Treatment.REFUSED


@dataclass(frozen=True, slots=True)
class UprobeAnswers:
    """What was found; the defaults are right, if slow, on any kernel.

    Attributes:
        links_many: One link takes many uprobes (v6.6).
        nops: What becomes of probes on no-operations.
    """

    links_many: bool = False
    nops: NopTreatment = field(default_factory=NopTreatment)


class UprobeTries:
    """Tries once, when the answers are first asked for.

    Args:
        cache: Directory that keeps the answers until the next boot, None for none.
        attempt: Finds the answers, or None where nothing could be tried. What it enters into the
            stack is closed with this.
    """

    def __init__(
        self,
        cache: Path | None,
        attempt: Callable[[contextlib.ExitStack], UprobeAnswers | None] | None = None,
    ) -> None:
        self._cache = cache
        self._attempt = attempt or try_uprobes
        self._lock = threading.Lock()
        self._answers: UprobeAnswers | None = None
        self._open = contextlib.ExitStack()

    @property
    def answers(self) -> UprobeAnswers:
        """What this kernel does; may be asked by several threads."""
        with self._lock:
            if self._answers is None:
                self._answers = self._kept_or_tried()
            return self._answers

    def _kept_or_tried(self) -> UprobeAnswers:
        store = Store(self._cache)
        boot_id = kernelfs.read_text(_BOOT_ID).strip()
        kept = _read(store, boot_id)
        if kept is not None:
            return kept
        tried = self._attempt(self._open)
        if tried is not None and boot_id:
            store.write(_KEPT_AS, [_packed(tried, boot_id)])
        return tried or UprobeAnswers()

    def close(self) -> None:
        """Takes the probes of the trial off: the kernel waits 14 to 75 ms for all processors."""
        self._open.close()


def _packed(answers: UprobeAnswers, boot_id: str) -> bytes:
    nops = answers.nops
    row = [boot_id, answers.links_many, nops.long.value, nops.prefixed.value]
    return json.dumps(row).encode()


def _read(store: Store, boot_id: str) -> UprobeAnswers | None:
    mapping = store.open(_KEPT_AS)
    if mapping is None:
        return None
    with mapping:
        try:
            kept_boot_id, links_many, long, prefixed = json.loads(mapping[:])
            if kept_boot_id != boot_id or not isinstance(links_many, bool):
                return None
            return UprobeAnswers(links_many, NopTreatment(Treatment(long), Treatment(prefixed)))
        except (ValueError, TypeError):
            return None


def try_uprobes(still_open: contextlib.ExitStack) -> UprobeAnswers | None:
    """Probes a page of our own and runs it.

    Args:
        still_open: Takes over what was attached.

    Returns:
        None where it is not possible here, or cannot be told.
    """
    try:
        page = still_open.enter_context(_TrialPage())
        links_many = _link_many(page, tuple(_SITES), still_open)
        refused: set[str] = set()
        if not links_many:
            refused = _open_each(page, still_open)
            # Whichever of the sites it is, an older kernel refuses all of a link for it.
            links_many = bool(refused) and _link_many(page, (_EMULATED,), still_open)
    except (OSError, ValueError):
        return None
    if refused & {_EMULATED, _STEPPED}:
        return None
    nops = classify(page.shortest_ns([site for site in _SITES if site not in refused]))
    return None if nops is None else UprobeAnswers(links_many, nops)


def classify(shortest_ns: Mapping[str, float]) -> NopTreatment | None:
    """Compares times of sites with those of an emulated and of a stepped instruction.

    Args:
        shortest_ns: Time by site; sites that are missing were refused.

    Returns:
        None where the two measures hardly differ.
    """
    emulated, stepped = shortest_ns[_EMULATED], shortest_ns[_STEPPED]
    if stepped < _LEAST_RATIO * emulated:
        return None

    def of(site: str) -> Treatment:
        if site not in shortest_ns:
            return Treatment.REFUSED
        is_nearer_to_emulated = shortest_ns[site] ** 2 < emulated * stepped
        return Treatment.EMULATED if is_nearer_to_emulated else Treatment.STEPPED

    return NopTreatment(long=of(_LONG), prefixed=of(_PREFIXED))


def _link_many(page: _TrialPage, sites: Sequence[str], still_open: contextlib.ExitStack) -> bool:
    try:
        program = syscalls.load_program(
            "uprobe", "try_uprobe", _RETURN_0, sysbpf.TRACE_UPROBE_MULTI
        )
    except OSError:
        return False
    try:
        link = sysbpf.link_uprobes(page.path, [(page.offset(s), 0) for s in sites], program)
    except OSError:
        return False
    finally:
        os.close(program)  # the link holds it
    still_open.callback(os.close, link)
    return True


def _open_each(page: _TrialPage, still_open: contextlib.ExitStack) -> set[str]:
    """Probes each site by an event of its own; returns those that were refused."""
    event_type = sysbpf.uprobe_event_type()
    refused = set()
    for site in _SITES:
        try:
            event = sysbpf.open_uprobe(page.path, page.offset(site), event_type)
            still_open.callback(os.close, event)
        except OSError as error:  # noqa: PERF203 - the others are to be tried
            if error.errno != sysbpf.ENOTSUPP:
                raise
            refused.add(site)
    return refused


class _TrialPage:
    """A page of code with a loop around each site: `do { site } while (--count)`."""

    def __enter__(self) -> _TrialPage:
        with contextlib.ExitStack() as opened:
            self._fd = os.memfd_create("aiflame-uprobes", os.MFD_CLOEXEC)
            opened.callback(os.close, self._fd)
            os.write(self._fd, b"".join(map(_loop, _SITES.values())).ljust(mmap.PAGESIZE, b"\xcc"))
            # Uprobes are put on private mappings only (valid_vma of kernel/events/uprobes.c).
            memory = mmap.mmap(
                self._fd,
                mmap.PAGESIZE,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_EXEC,
            )
            self._memory = np.frombuffer(memory, np.uint8)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    def offset(self, site: str) -> int:
        return _SITE_BYTES * list(_SITES).index(site)

    def shortest_ns(self, sites: Sequence[str]) -> dict[str, float]:
        """Runs sites in turn; returns what each took at best."""
        run = {
            site: ctypes.CFUNCTYPE(None, ctypes.c_int)(self._memory.ctypes.data + self.offset(site))
            for site in sites
        }
        shortest = dict.fromkeys(sites, float("inf"))
        for _ in range(_RUNS):
            for site in sites:
                begun_ns = time.perf_counter_ns()
                run[site](_LOOPS)
                shortest[site] = min(shortest[site], time.perf_counter_ns() - begun_ns)
        return shortest


def _loop(site: bytes) -> bytes:
    body = site + bytes.fromhex("ffcf")  # dec edi
    back = -(len(body) + 2)
    return (body + b"\x75" + struct.pack("b", back) + b"\xc3").ljust(_SITE_BYTES, b"\xcc")


def load_for_links(
    load: Callable[[int], dict[str, int]], links_many: bool
) -> tuple[dict[str, int], bool]:
    """Loads programs for links of many probes, or else for one event a probe.

    Args:
        load: Loads them for an attach type of the kernel's, 0 for events.
        links_many: The kernel takes such links.

    Returns:
        Their descriptors by name, and whether they are for such links.

    Raises:
        Refused: The kernel refuses them either way, or is short of something for a moment.
    """
    if links_many:
        try:
            return load(sysbpf.TRACE_UPROBE_MULTI), True
        except Refused as error:
            if error.errno in syscalls.SHORT:
                raise
    return load(0), False
