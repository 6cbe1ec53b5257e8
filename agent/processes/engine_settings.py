# SPDX-License-Identifier: Apache-2.0
"""Where container engines were told to keep containers: storage.conf(5) and docker's daemon.json.

What users wrote is read as well as what root did, so nothing that these files say is believed but
a path, and whoever goes there has to see who owns what is found.

Not known are what an engine's environment says (CONTAINERS_STORAGE_CONF, and XDG_CONFIG_HOME and
XDG_DATA_HOME of a user), its options (--root, --data-root), and the directories storage.conf.d of
later versions.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# What distributions ship has 10 KB, nearly all of it comments.
MAX_SETTINGS_BYTES = 64 << 10
# A parser takes the square of a key's parts, and more: 64 KB of them would take it many seconds,
# and 0.2 s with so many in a line. No path that anybody would choose has as many.
_MAX_DOTS_IN_LINE = 64
_MAX_PATH_BYTES = 4095  # linux/limits.h: PATH_MAX with its zero byte
_VARIABLE = re.compile(r"\$(?:\{(\w*)\}|(\w*))")


@dataclass(frozen=True, slots=True)
class StorageConf:
    """What one storage.conf says; "" for what it does not.

    Attributes:
        graph_root: Where containers are kept.
        run_root: Where that is kept of them which does not outlive the boot.
        rootless_path: Where users keep theirs if they do not say otherwise.
    """

    graph_root: str = ""
    run_root: str = ""
    rootless_path: str = ""


# Of root and of some users; it is read each time that containers change, which it does not.
@lru_cache(maxsize=8)
def storage_conf(text: bytes) -> StorageConf:
    """Returns what a storage.conf says, nothing where it is damaged.

    Args:
        text: As it is in the file, at most MAX_SETTINGS_BYTES.
    """
    if not text or max(line.count(b".") for line in text.split(b"\n")) > _MAX_DOTS_IN_LINE:
        return StorageConf()
    # Most machines have none, and recordings do not wait for what they do not need.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        storage = tomllib.loads(text.decode()).get("storage")
    except (ValueError, RecursionError):
        return StorageConf()
    names = ("graphroot", "runroot", "rootless_storage_path")
    return StorageConf(*(_text(storage, name) for name in names))


def data_root(text: bytes) -> str:
    """Returns where a daemon.json has docker keep everything, "" where it does not say.

    Args:
        text: As it is in the file, at most MAX_SETTINGS_BYTES.
    """
    try:
        return _text(json.loads(text), "data-root")
    except (ValueError, RecursionError):
        return ""


def absolute(path: str, variables: Mapping[str, str] | None = None) -> str:
    """Returns a path as the kernel is asked for it, "" for one that means nothing there.

    Args:
        path: As it was written.
        variables: What may be named in it, as $NAME or ${NAME}; None where engines take it as it
            is. A path with another one, or with one that is "", means nothing.
    """
    if variables is not None:
        values = {name: value for name, value in variables.items() if value}
        try:
            path = _VARIABLE.sub(lambda found: values[found[1] or found[2] or ""], path)
        except KeyError:
            return ""
    is_sound = path.startswith("/") and "\0" not in path
    try:
        is_sound = is_sound and len(os.fsencode(path)) <= _MAX_PATH_BYTES
    except UnicodeEncodeError:  # half a pair of JSON's
        return ""
    # normpath() keeps two slashes at the beginning, which POSIX leaves open what they mean.
    return "/" + os.path.normpath(path).lstrip("/") if is_sound else ""


def _text(value: Any, key: str) -> str:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) else ""
