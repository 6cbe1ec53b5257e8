# SPDX-License-Identifier: Apache-2.0
"""What a recording stands on, and what takes long to be ready: begun before all else.

The kernel's verifier takes 0.25 s, and children that open files and read memory 0.05 s to begin;
importing the recorder, and finding out what targets have mapped, goes on meanwhile. So this imports
as little as it can.
"""

from __future__ import annotations

import contextlib

from aiflame.agent.elf.headers import HEADERS
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions, begin_programs
from aiflame.agent.launches.probes import functions_of
from aiflame.agent.symbols.file_facts import FileFacts, facts_directory
from aiflame.agent.symbols.store import cache_dir
from aiflame.agent.target_files import FileGuard
from aiflame.agent.unwind.table_builder import PROGRAM
from aiflame.gpu.apis import APIS


class Foundation:
    """The kernel half and the inspector of one recording. A context manager, which ends them.

    Args:
        options: What is put into the kernel half.
        server: As `Inspector` takes it.

    Raises:
        EnvironmentUnfit: The kernel takes no maps. What it says of programs comes from
            `programs.ready`.

    Attributes:
        options: As given.
        guard: Keeps account of files that are bad.
        inspector: Opens files of targets, and reads their memory.
        file_facts: Tells what is in those files.
        programs: The kernel half.
    """

    def __init__(self, options: ProgramOptions, server: ForkServer | None = None) -> None:
        self.options = options
        with contextlib.ExitStack() as parts:
            self.inspector = Inspector(server)
            parts.callback(self.inspector.close)
            self.inspector.start()
            self.guard = FileGuard()
            questions = (HEADERS, functions_of(APIS)) if options.calls else (HEADERS,)
            self.file_facts = FileFacts(
                self.inspector.server, self.guard, questions, facts_directory()
            )
            parts.callback(self.file_facts.close)
            self.programs = begin_programs(options, cache_dir())
            parts.callback(self.programs.close)
            if options.filter is not abi.Filter.PIDS:
                # Somebody starts something new, sooner or later.
                for program in (self.file_facts.program, PROGRAM):
                    self.inspector.server.expect(program)
            self._parts = parts.pop_all()

    def __enter__(self) -> Foundation:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()
