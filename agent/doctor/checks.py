# SPDX-License-Identifier: Apache-2.0
"""The table of checks. Adding one is a function in its group's module, and a row here."""

from __future__ import annotations

from aiflame.agent.doctor import agent, bpf, cpu, gpu, host, out, rights, stacks, target
from aiflame.agent.doctor.base import Check
from aiflame.gpu.families import FAMILIES

_PRIVILEGED = ("os.capabilities",)
_BEFORE_LOADING = (
    "os.arch",
    "os.lockdown",
    "os.seccomp",
    "os.capabilities",
    "os.open_files",
    "os.address_space",
    "cpu.clock",
    "bpf.bcc",
    "bpf.btf",
)
# A process that does not know the pid the kernel knows it by cannot record itself.
_TO_RECEIVE = ("os.pid_namespace", "bpf.attach")

CHECKS = (
    Check("os.linux", host.linux, needs=()),
    Check("os.arch", host.architecture),
    Check("os.pid_namespace", host.pid_namespace),
    Check("os.cgroup2", host.cgroup2, limit="--cgroup cannot be used"),
    Check("os.lockdown", host.lockdown),
    Check("os.capabilities", rights.capabilities, limit="some parts are missing"),
    Check("os.seccomp", host.seccomp, needs=_PRIVILEGED),
    Check("os.open_files", host.open_files),
    Check("os.address_space", host.address_space),
    Check("os.ptrace_scope", host.ptrace_scope, limit="no Python frames"),
    Check("os.delay_accounting", host.delay_accounting, limit="what waits were for is not told"),
    Check("cpu.clock", cpu.clock, needs=("os.arch", "os.seccomp")),
    Check("cpu.perf_event_paranoid", cpu.perf_event_paranoid, needs=("os.arch", "os.seccomp")),
    Check(
        "cpu.kptr_restrict",
        cpu.kptr_restrict,
        limit="kernel frames have no names",
        needs=_PRIVILEGED,
    ),
    Check(
        "cpu.perf_event_max_stack",
        cpu.perf_event_max_stack,
        limit="deep kernel stacks are cut",
    ),
    Check("bpf.bcc", bpf.bcc),
    Check("bpf.btf", bpf.btf),
    Check(
        "bpf.features",
        bpf.features,
        limit="launches on devices are not recorded",
        needs=_PRIVILEGED,
    ),
    Check("bpf.load", bpf.load, needs=_BEFORE_LOADING),
    Check("bpf.attach", bpf.attach, needs=("bpf.load",)),
    Check("bpf.sample", bpf.sample, needs=_TO_RECEIVE),
    Check("bpf.stacks", stacks.stacks, limit="some stacks are cut short", needs=("bpf.sample",)),
    Check("bpf.off_cpu", bpf.off_cpu, needs=_TO_RECEIVE),
    Check("bpf.ringbuf", bpf.ring_buffer, needs=_TO_RECEIVE),
    *(Check(f"gpu.{name}", gpu.family(name)) for name in FAMILIES),
    *(Check(f"gpu.{name}", gpu.vendor(name)) for name in ("amd", "intel")),
    Check("out.folder", out.folder, limit="record needs -o"),
    Check("out.space", out.space, limit="only short recordings fit on the disk"),
    Check("out.recordings", out.recordings, limit="only short recordings fit on the disk"),
    Check("out.cache", out.cache, limit="each run reads all symbols anew"),
)

# Run only for --pid.
TARGET_CHECKS = (
    Check("target.visible", target.visible),
    Check(
        "target.mappings",
        target.mappings,
        limit="no names for the target's user frames",
        needs=("target.visible",),
    ),
)

# What `record` alone needs or uses.
_OF_RECORD = ("os.delay_accounting", "out.folder", "out.space", "out.recordings")
# The agent asks more of these, and says what that costs it.
_STRICTER = {
    check.id: check
    for check in (
        Check("os.pid_namespace", agent.pid_namespace),
        Check("os.cgroup2", agent.cgroups, limit="some containers are labelled late or by pid"),
    )
}
_CONFIGURED = ("agent.config",)

# Run for --agent, instead of CHECKS.
AGENT_CHECKS = (
    *(_STRICTER.get(check.id, check) for check in CHECKS if check.id not in _OF_RECORD),
    Check(
        "agent.child_rights",
        agent.child_rights,
        limit="children keep rights that they need not have",
        needs=_PRIVILEGED,
    ),
    Check("agent.config", agent.config, limit="nothing is sent"),
    Check("agent.directory", agent.directory, limit="little can wait", needs=_CONFIGURED),
    Check("agent.captures", agent.captures, limit="no captures are kept", needs=_CONFIGURED),
    Check("agent.back_ends", agent.back_ends, limit="a back-end gets nothing", needs=_CONFIGURED),
    Check("agent.kubelet", agent.kubelet, limit="pods have no names", needs=_CONFIGURED),
    Check("agent.engines", agent.engines, limit="containers have no names"),
)
