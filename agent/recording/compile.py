# SPDX-License-Identifier: Apache-2.0
"""Compiles and loads the kernel programs: the only module that imports bcc.

Runs as a child of the recorder (`python -m aiflame.agent.recording.compile`), since LLVM leaves
some 120 MB behind: it reads a request from standard input, hands the descriptors of programs and
maps over a socket and exits. The compiler's own text goes to standard error, which the recorder
keeps and shows when a compile fails. What was compiled is kept for the next recording.

BCC rewrites map accesses in the main file only, so the files of bpf/ are pasted together first,
with #line directives so that messages name the real files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.recording.btf import Btf
from aiflame.agent.recording.kernel_macros import kernel_macros
from aiflame.agent.recording.program_cache import ITERATOR, CompiledProgram, pack
from aiflame.agent.recording.syscalls import lift_memlock_limit, load_iterator
from aiflame.agent.symbols.store import Store

_INCLUDE = re.compile(r'#include "([\w.]+)"')
# The kernel passes at most 253 descriptors in a message (SCM_MAX_FD, include/net/scm.h).
_MAX_FDS_PER_MESSAGE = 253


def paste_includes(folder: Path, name: str, pasted: set[str] | None = None) -> str:
    """Returns a file of bpf/ with its local includes in place, each once."""
    pasted = set() if pasted is None else pasted
    if name in pasted:
        return ""
    pasted.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((folder / name).read_text().splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
        else:
            lines += [paste_includes(folder, include[1], pasted), f'#line {number + 1} "{name}"']
    return "\n".join(lines)


def import_bcc() -> Any:
    try:
        import bcc
    except ImportError:
        sys.exit("bcc-missing: the BPF compiler's Python bindings are not installed")
    if not hasattr(bcc, "BPF"):
        sys.exit(f"bcc-foreign: {bcc.__file__} is PyPI's unrelated package of the same name")
    return bcc


def _load(request: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    folder = Path(request["bpf_folder"])
    os.environ["BCC_KERNEL_SOURCE"] = str(folder / "kernel")
    bcc = import_bcc()
    try:
        btf = Btf.of_kernel()
        macros = {**kernel_macros(btf), **request["macros"]}
    except EnvironmentUnfit as error:
        sys.exit(f"unfit: {error}\n{error.hint or ''}")
    flags = [f"-D{name}={value}" for name, value in macros.items()]
    module = bcc.BPF(text=paste_includes(folder, request["unit"]).encode(), cflags=flags)
    types = {
        "perf_event": bcc.BPF.PERF_EVENT,
        "raw_tracepoint": bcc.BPF.RAW_TRACEPOINT,
        "uprobe": bcc.BPF.KPROBE,
    }
    programs: dict[str, int] = {}
    compiled: dict[str, CompiledProgram] = {}
    for name, kind in request["programs"].items():
        programs[name] = os.dup(module.load_func(name.encode(), types[kind]).fd)
        compiled[name] = CompiledProgram(kind, module.dump_func(name.encode()))
    for name, function in request["iterators"].items():
        # A recording does without where the kernel has none, and says so.
        with contextlib.suppress(OSError, EnvironmentUnfit):
            iterator = CompiledProgram(
                ITERATOR, module.dump_func(name.encode()), btf.function_type(function)
            )
            programs[name] = load_iterator(iterator.instructions, iterator.function_type)
            compiled[name] = iterator
    templates: dict[str, str] = request["templates"]
    maps = {
        name: os.dup(module[name.encode()].map_fd)
        for name in [*templates.values(), *request["maps"]]
    }
    if request["bundle"] is not None:
        with contextlib.suppress(OSError):  # then the next recording compiles again
            Store(Path(request["cache"])).write(
                request["bundle"], [pack(compiled, maps, templates)]
            )
    return programs, maps


def main() -> None:
    """Serves one request; the socket's descriptor is the first argument."""
    request = json.load(sys.stdin)
    lift_memlock_limit()
    programs, maps = _load(request)
    fds = [*programs.values(), *maps.values()]
    if len(fds) > _MAX_FDS_PER_MESSAGE:
        sys.exit(f"too many programs and maps for one message: {len(fds)}")
    reply = json.dumps({"programs": list(programs), "maps": list(maps)}).encode()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        socket.send_fds(channel, [reply], fds)
    sys.stdout.flush()
    # Skips LLVM's and BCC's clean-up, which takes longer than all of the above.
    os._exit(0)


if __name__ == "__main__":
    main()
