# SPDX-License-Identifier: Apache-2.0
"""The family `opencl`: samples of PoCL's worker threads that are in kernel code.

A worker that is on a CPU issues instructions; one that is not is an idle part of the device, of
which nothing is told. So there is one reason, "issuing". Other implementations are only named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

from aiflame.agent.losses import LossKind
from aiflame.gpu.apis.base import Api
from aiflame.gpu.base import (
    CodeKey,
    CpuSample,
    Finding,
    HelperLibrary,
    Host,
    Interval,
    KernelSample,
    Listing,
    SourceLines,
)
from aiflame.gpu.opencl import platforms
from aiflame.gpu.opencl.disassembly import Decoded, instructions_of
from aiflame.gpu.opencl.kernel_file import (
    Function,
    KernelFile,
    kernel_of,
    looks_like_kernel,
    may_be_kernel,
)
from aiflame.gpu.opencl.listing import make_listing

REASON = "issuing"


class OpenClFamily:
    """See `aiflame.gpu.base.Family`.

    Args:
        vendors: Where the ICD files are.
    """

    name = "opencl"
    api = "opencl"
    probes: tuple[Api, ...] = ()
    memory = ""
    helper: HelperLibrary | None = None

    def __init__(self, vendors: Path = platforms.VENDORS) -> None:
        self._vendors = vendors

    def runs_by(self, path: str) -> bool:
        """Whether it is PoCL's library."""
        return "/libpocl" in path

    def detect(self, cpu_period_ns: int = 0, *, has_samples: bool = False) -> Finding:
        """Names PoCL by its library, others by their ICD files."""
        found = platforms.find_devices(self._vendors, cpu_period_ns)
        if has_samples and not any(device.tier for device in found):
            found = (platforms.pocl_device("", cpu_period_ns), *found)
        if found:
            return Finding(found)
        why = f"no OpenCL implementation is installed ({self._vendors}/*.icd)"
        return Finding((), why, "apt-get install pocl-opencl-icd")

    def start(self, host: Host) -> OpenClSampler:
        """Begins; there is nothing to start."""
        return OpenClSampler(host)


# Files of which it is known what is in them: PoCL makes ten a minute where a program compiles anew.
_MOST_FILES = 1 << 12


class OpenClSampler:
    """See `aiflame.gpu.base.Sampler`.

    Args:
        host: Takes samples, and has the files of kernels.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._kernels: dict[int, KernelFile | None] = {}
        # Where instructions begin, by file and function.
        self._starts: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)

    def owns(self, file: int) -> bool:
        """Whether it is a kernel of PoCL's, also one that could not be opened."""
        path = self._host.path(file)
        if not self._host.is_open(file):
            return looks_like_kernel(path)
        self._forget(file)  # it may have been written since, or can be read by now
        return self._kernel(file) is not None

    def _kernel(self, file: int) -> KernelFile | None:
        """Returns what is in a file, None for one that has no kernel or is not open."""
        if file not in self._kernels:
            path = self._host.path(file)
            is_asked = may_be_kernel(path) and self._host.is_open(file)
            self._kernels[file] = self._host.ask(file, kernel_of(path)) if is_asked else None
            if len(self._kernels) > _MOST_FILES:
                self._forget(next(iter(self._kernels)))
        return self._kernels[file]

    def _forget(self, file: int) -> None:
        self._kernels.pop(file, None)
        self._starts.pop(file, None)

    def drain(self, interval: Interval) -> None:
        """Gives an interval's CPU samples as samples of kernels."""
        counts: Counter[tuple[CodeKey, int, int]] = Counter()
        for sample in interval.cpu_samples:
            kernel = self._kernel(sample.file)
            if kernel is None:
                self._host.lose(LossKind.KERNEL_NOT_OPENED, sample.count)
                continue
            offset = kernel.offset_of(self._first_byte(kernel, sample))
            if offset is None:
                self._host.lose(LossKind.SAMPLE_OUTSIDE_KERNEL, sample.count)
                continue
            code = CodeKey(sample.process, sample.file, kernel.name)
            counts[code, offset, sample.taken_ns] += sample.count
        self._host.add_samples(
            KernelSample(
                interval.number, 0, code, offset, REASON, count, begin_ns=at_ns, end_ns=at_ns
            )
            for (code, offset, at_ns), count in counts.items()
        )

    def _first_byte(self, kernel: KernelFile, sample: CpuSample) -> int:
        """Returns where the sampled instruction begins: of a call, its last byte is known."""
        function = kernel.function_at(sample.address) if sample.is_caller else None
        if function is None:
            return sample.address
        known = self._starts[sample.file]
        if function.start not in known:
            decoded = self._decoded(sample.file, function)
            known[function.start] = [instruction.address for instruction in decoded]
        before = [start for start in known[function.start] if start <= sample.address]
        return before[-1] if before else sample.address

    def _decoded(self, file: int, function: Function) -> list[Decoded]:
        """Returns the instructions of a function, [] where they cannot be had."""
        return self._host.ask(file, instructions_of(function)) or []

    def stop(self) -> None:
        """There is nothing left: samples come with drains only."""

    def resolve(self, code: CodeKey, offsets: frozenset[int], lines: SourceLines) -> Listing | None:
        """Returns the functions that have samples."""
        kernel = None if code.file is None else self._kernel(code.file)
        if kernel is None or code.file is None:
            return None
        decode = partial(self._decoded, code.file)
        listing = make_listing(kernel, offsets, partial(lines, code.file), decode)
        if listing is None:
            self._host.lose(LossKind.KERNEL_NOT_DISASSEMBLED)
        return listing

    def code(self, code: CodeKey) -> bytes:
        """Returns nothing: this machine's code is listed whatever is installed."""
        return b""

    def file(self, code: CodeKey) -> int | None:
        """Returns the file that a process has a kernel in."""
        return code.file
