# SPDX-License-Identifier: Apache-2.0
"""Where requests wait on disk: a directory for each destination, which no other one is sent.

What waits was encoded for one back-end and one tenant. Where a configuration names others, it stays
where it is: it is sent when they are configured again, and dropped after a day, or when all that
waits so takes more room than one destination may have.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from aiflame.agent.fleet.delivery import request_of_name

# What says to whom a sink sends, and as whom: of a user or a token back-ends make a tenant, too.
_DESTINATION = ("url", "tenant", "flavour", "database", "user", "password_file", "token_file")
_DIGEST_BYTES = 8
# Who changes a configuration by mistake has noticed by then.
_LEFT_S = 86_400.0

LEFT = "its destination is configured no more"


class Spool:
    """The directories of all destinations.

    Args:
        directory: Their parent.
        clock: Seconds of the wall clock.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def folder(self, name: str, settings: Any) -> Path:
        """Returns the directory of the destination of a sink with these settings."""
        values = {key: str(getattr(settings, key, "")) for key in _DESTINATION}
        text = json.dumps([name, values], sort_keys=True).encode()
        digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()
        return self._directory / f"{name}-{digest}"

    def drop_left(self, used: Collection[Path], bytes_max: int) -> Counter[str]:
        """Drops what waits for destinations that are configured no more, if it is old or much.

        Args:
            used: The directories of those that are.
            bytes_max: What all others together may have.

        Returns:
            How many samples were dropped, by the name of the directory.
        """
        dropped: Counter[str] = Counter()
        left = []
        for folder in self._folders():
            if folder not in used:
                facts = [(path, path.lstat()) for path in folder.iterdir()]
                newest_s = max((fact.st_mtime for _, fact in facts), default=0.0)
                left.append((newest_s, folder, sum(fact.st_size for _, fact in facts)))
        size = sum(each for _, _, each in left)
        for newest_s, folder, own in sorted(left):
            if self._clock() - newest_s <= _LEFT_S and size <= bytes_max:
                continue
            requests = filter(None, (request_of_name(path.name) for path in folder.iterdir()))
            dropped[folder.name] += sum(request.samples for request in requests)
            size -= own
            shutil.rmtree(folder)
        return dropped

    def _folders(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return [path for path in self._directory.iterdir() if path.is_dir()]
