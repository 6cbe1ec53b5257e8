# SPDX-License-Identifier: Apache-2.0
"""What the command line says about a recording."""

from __future__ import annotations

from dataclasses import dataclass

from aiflame.agent.devices.choice import AUTO, NONE
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.kernel.probes import online_cpus
from aiflame.agent.processes.targets import Target


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What the command line says about a recording; sizes are entries, times ns."""

    frequency_hz: int
    duration_ns: int | None
    follow_children: bool
    off_cpu: bool
    user_stacks: bool
    kernel_stacks: bool
    stacks_max: int
    sums_max: int
    threads_max: int
    wait_event_ns: int
    unwind_bytes_max: int
    command_words: str
    gpu: str = AUTO
    gpu_duty_permille: int = 1000
    gpu_calibrate: bool = False
    inject: bool = True
    keep_ns: int | None = None
    trace_calls: bool = False
    off_cpu_budget_permille: int | None = None

    @property
    def period_ns(self) -> int:
        """Weight of one on-CPU sample."""
        return 1_000_000_000 // self.frequency_hz

    def for_programs(self, target: Target) -> ProgramOptions:
        """Returns what is compiled into the kernel half."""
        return ProgramOptions(
            filter=target.filter,
            period_ns=self.period_ns,
            follow_children=self.follow_children or target.filter is not abi.Filter.PIDS,
            off_cpu=self.off_cpu,
            user_stacks=self.user_stacks,
            kernel_stacks=self.kernel_stacks,
            stacks_max=self.stacks_max,
            # Chains of Python frames differ less than whole stacks do.
            python_chains_max=max(self.stacks_max // 2, 1),
            sums_max=self.sums_max,
            threads_max=self.threads_max,
            wait_event_ns=self.wait_event_ns,
            unwind_bytes_max=self.unwind_bytes_max,
            by_chance=self.off_cpu and self.off_cpu_budget_permille is not None,
            calls=self.gpu != NONE,
            call_events_per_s=(
                max(abi.CALL_EVENTS_PER_S // len(online_cpus()), 1) if self.trace_calls else 0
            ),
        )
