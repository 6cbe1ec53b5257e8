# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel programs: the only module that imports bcc.

`python -m aiflame.agent.kernel.compile` writes the bytecode to standard output: the build does
so once for the package, and the recorder where a package came without. A process of its own, since
LLVM keeps some 120 MB; the compiler's own text goes to standard error. Nothing is loaded, but BCC
makes maps while it compiles, so it takes root or CAP_BPF.

BCC rewrites map accesses in the main file only, so the files of bpf/ are pasted together first,
with #line directives so that messages name the real files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import aiflame.bpf
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.bytecode import BadBytecode, Bytecode, MapDefinition, define_program
from aiflame.agent.kernel.program_list import MAPS, PROGRAMS, TEMPLATES
from aiflame.agent.kernel.syscalls import MapShape, lift_memlock_limit, map_facts

_UNIT = "record.bpf.c"
_INCLUDE = re.compile(r'#include "([\w.]+)"')
# What stands in no file, by the name under which it is included.
_MADE = {"losses.h": abi.losses_header}
# As BCC's packages write it (src/python/bcc/version.py.in).
_VERSION = re.compile(r"__version__ = '([^']+)'")


def bpf_folder() -> Path:
    """Returns the folder of the C files."""
    return Path(next(iter(aiflame.bpf.__path__))).resolve()


def paste_includes(folder: Path, name: str, pasted: set[str] | None = None) -> str:
    """Returns a file of bpf/ with its local includes in place, each once."""
    pasted = set() if pasted is None else pasted
    if name in pasted:
        return ""
    pasted.add(name)
    lines = [f'#line 1 "{name}"']
    made = _MADE.get(name)
    text = (folder / name).read_text() if made is None else made()
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
        else:
            lines += [paste_includes(folder, include[1], pasted), f'#line {number + 1} "{name}"']
    return "\n".join(lines)


def source() -> str:
    """Returns the C of all programs, as it is compiled."""
    return paste_includes(bpf_folder(), _UNIT)


def source_digest() -> str:
    """Returns what tells that source from others, and so bytecode of it from other bytecode."""
    return hashlib.sha256(source().encode()).hexdigest()


def shipped_file() -> Path:
    """Returns where the build leaves the bytecode of the package."""
    return bpf_folder() / "programs.bin"


def compiler_words() -> str | None:
    """Returns what the compiler is called, None where there is none; without loading it."""
    spec = importlib.util.find_spec("bcc")
    if spec is None or not spec.submodule_search_locations:
        return None
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    found = _VERSION.search(version.read_text()) if version.exists() else None
    return f"BCC {found[1]}" if found else None


def shipped() -> Bytecode | None:
    """Returns the bytecode of the package; None where there is none, or of other C files.

    Whoever changes the C need not build anew to see what it does.
    """
    try:
        found = Bytecode.from_bytes(shipped_file().read_bytes())
    except (OSError, BadBytecode):
        return None
    return found if found.source_digest == source_digest() else None


def import_bcc() -> Any:
    try:
        import bcc
    except ImportError:
        sys.exit("bcc-missing: the BPF compiler's Python bindings are not installed")
    if not hasattr(bcc, "BPF"):
        sys.exit(f"bcc-foreign: {bcc.__file__} is PyPI's unrelated package of the same name")
    return bcc


def compile_programs() -> Bytecode:
    """Compiles all programs. Ends the process where BCC is missing or refuses."""
    os.environ["BCC_KERNEL_SOURCE"] = str(bpf_folder() / "kernel")
    bcc = import_bcc()
    module = bcc.BPF(text=source().encode())
    facts = {name: map_facts(module[name.encode()].map_fd) for name in MAPS}
    names = {found.id: name for name, found in facts.items()}
    maps = tuple(
        MapDefinition(name, MapShape(*facts[name][1:]), TEMPLATES.get(name)) for name in MAPS
    )
    programs = tuple(
        define_program(name, kind, module.dump_func(name.encode()), names)
        for name, kind in PROGRAMS.items()
    )
    return Bytecode(source_digest(), compiler_words() or "BCC", maps, programs)


def main() -> None:
    """Compiles, and writes the bytecode to standard output; --check only says if there is need."""
    if sys.argv[1:] == ["--check"]:
        sys.exit(shipped() is None)
    lift_memlock_limit()
    # BCC prints to standard output, too.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        out.write(compile_programs().to_bytes())
    # Skips LLVM's and BCC's clean-up, which takes longer than all of the above.
    os._exit(0)


if __name__ == "__main__":
    main()
