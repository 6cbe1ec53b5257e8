# SPDX-License-Identifier: Apache-2.0
"""Checks of the group `cpu`: the sampling clock and the kernel settings about it."""

from __future__ import annotations

from aiflame.agent import kernelfs
from aiflame.agent.doctor.base import Context, Finding, ok, warn
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import abi, checks
from aiflame.agent.kernel.probes import CLOCK_CURE
from aiflame.agent.symbols.kallsyms import KernelSymbols, KernelSymbolsHidden


def clock(_: Context) -> Finding:
    """Can each CPU be sampled?"""
    return ok(f"cpu-clock events open on {checks.require_clocks()} CPUs")


def perf_event_paranoid(_: Context) -> Finding:
    """Does the setting stand in the way? Distributions add levels, so it is tried, not compared."""
    level = _setting("perf_event_paranoid")
    try:
        checks.require_clocks()
    except EnvironmentUnfit:
        return warn(
            f"kernel.perf_event_paranoid is {level}, and sampling is refused",
            CLOCK_CURE,
        )
    return ok(f"kernel.perf_event_paranoid is {level}, which does not bind this process")


def kptr_restrict(_: Context) -> Finding:
    """Are the names of kernel functions visible?"""
    try:
        names = KernelSymbols.load()
    except KernelSymbolsHidden:
        level = _setting("kptr_restrict")
        return warn(
            f"kernel function names are hidden (kernel.kptr_restrict is {level})",
            checks.kernel_names_cure(),
        )
    except EnvironmentUnfit as error:
        return warn(str(error), error.hint)
    return ok(f"{len(names):,} kernel functions have names")


def perf_event_max_stack(_: Context) -> Finding:
    """Does the kernel hand over as many of its own frames as are kept?"""
    level = _setting("perf_event_max_stack")
    # The kernel cuts what bpf_get_stack returns at this (kernel/bpf/stackmap.c, v6.1).
    if level.isdecimal() and int(level) < abi.MAX_KERNEL_FRAMES:
        return warn(
            f"kernel.perf_event_max_stack is {level}: kernel stacks are cut at {level} frames",
            f"sudo sysctl kernel.perf_event_max_stack={abi.MAX_KERNEL_FRAMES}",
        )
    return ok(
        f"kernel.perf_event_max_stack is {level}, and {abi.MAX_KERNEL_FRAMES} frames are kept"
    )


def _setting(name: str) -> str:
    return kernelfs.read_text(f"/proc/sys/kernel/{name}").strip() or "unknown"
