# SPDX-License-Identifier: Apache-2.0
"""Helpers in a directory of the host, for processes that load them by themselves.

A variable of their environment names the library (of NVIDIA's CUDA_INJECTION64_PATH), which their
driver loads when it begins: nobody stops them. The variable names a link, which stays; the file
that it leads to has a version and a digest of its content in its name and never changes, so that an
upgrade touches nothing that a process has mapped. Files of other versions stay.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent import __version__
from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet.log import Log
from aiflame.agent.outfile import install, public_directory
from aiflame.gpu.base import HelperLibrary

# Of the digest in a file's name: enough to tell builds of one version apart.
_DIGEST_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A library, its file in the directory, and the link to that."""

    content: bytes
    file: Path
    link: Path


class PreparedHelpers:
    """Keeps helpers where processes load them.

    Args:
        directory: Where; made if there is none.
        helpers: Those of the families that are recorded.
        log: Takes what users need to know.

    Raises:
        AiflameError: The directory cannot be used.
    """

    def __init__(self, directory: Path, helpers: Iterable[HelperLibrary], log: Log) -> None:
        self._directory = directory
        self._log = log
        self._prepared = [_prepared(directory, helper) for helper in helpers]
        public_directory(directory)
        if os.statvfs(directory).f_flag & os.ST_NOEXEC:
            log.say(f"warning: {directory} is mounted noexec: libraries cannot be loaded from it")
        for one in self._prepared:
            install(one.link, one.content, one.file.name)
            log.say(f"processes load the helper by themselves where it is named: {one.link}")

    @property
    def files(self) -> list[Path]:
        """The libraries."""
        return [one.file for one in self._prepared]

    def keep(self) -> None:
        """Puts back what somebody has removed."""
        gone = [one for one in self._prepared if not (one.file.exists() and one.link.exists())]
        try:
            for one in gone:
                public_directory(self._directory)
                install(one.link, one.content, one.file.name)
                self._log.say(f"{one.link} was gone; it is back")
        except AiflameError as error:
            self._log.say_seldom("helper not put back", f"helpers are gone, and stay so: {error}")


def _prepared(directory: Path, helper: HelperLibrary) -> _Prepared:
    path, content = helper.path, helper.path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST_CHARACTERS]
    file = directory / f"{path.stem}-{__version__}-{digest}{path.suffix}"
    return _Prepared(content, file, directory / path.name)
