# SPDX-License-Identifier: Apache-2.0
"""What this process is permitted to do, and what each right that it has not costs a recording."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

from aiflame.agent import rights
from aiflame.agent.doctor.base import Context, Finding, ok, warn
from aiflame.agent.kernel.least import costs_without_admin
from aiflame.agent.kernel.sysbpf import is_map_memory_limited
from aiflame.agent.kernel.uprobe_tries import UprobeTries
from aiflame.agent.outfile import sudo_ids
from aiflame.agent.rights import Capability
from aiflame.agent.symbols.store import cache_dir

# Of rights that are of use on every machine.
COSTS = {
    Capability.DAC_READ_SEARCH: "of other users' processes names and frames are missing",
    Capability.SYSLOG: "kernel functions have no names",
    Capability.CHECKPOINT_RESTORE: "deleted files that are still mapped have no names",
    Capability.SYS_NICE: "it runs at normal priority, and is late on a busy machine",
}


def capabilities(_: Context) -> Finding:
    """Does this process hold what a recording uses?"""
    rights.require()
    costs = dict(_costs())
    if not costs:
        return ok("all capabilities that a recording uses are held")
    words = "; ".join(f"without {capability} {cost}" for capability, cost in costs.items())
    return warn(words, f"run as root, or with {' and '.join(map(str, costs))}")


def _costs() -> Iterator[tuple[Capability, str]]:
    """Yields what is not held and would be used here."""
    for capability in rights.missing(COSTS):
        yield capability, COSTS[capability]
    of_sudo = {
        Capability.CHOWN: "outputs belong to root, not to who typed sudo",
        Capability.SETUID: "`-- CMD` cannot be run as who typed sudo",
        Capability.SETGID: "`-- CMD` cannot be run as who typed sudo",
    }
    if sudo_ids() not in (None, (0, 0)):
        for capability in rights.missing(of_sudo):
            yield capability, of_sudo[capability]
    _, locked_bytes_max = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked_bytes_max != resource.RLIM_INFINITY and is_map_memory_limited():
        for capability in rights.missing([Capability.SYS_RESOURCE]):
            yield capability, f"the kernel gives maps {locked_bytes_max:,} bytes at most"
    for capability in rights.missing([Capability.SYS_ADMIN]):
        with contextlib.closing(UprobeTries(cache_dir())) as uprobes:
            if costs := costs_without_admin(uprobes):
                yield capability, " and ".join(costs)
