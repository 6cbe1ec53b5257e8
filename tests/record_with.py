# SPDX-License-Identifier: Apache-2.0
"""`aiflame record` on a machine that has devices of one more family, or of another make."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

from aiflame.agent.commands import record
from aiflame.agent.devices.choice import choose_families
from aiflame.gpu.base import Family
from aiflame.gpu.families import FAMILIES


def record_with(name: str, family: Callable[[], Family]) -> int:
    """Records as this process's arguments say, where `family` is the only one."""
    return record_as(f"record with {name}", {name: family})


def record_as(words: str, known: Mapping[str, Callable[[], Family]] = FAMILIES) -> int:
    """Records as this process's arguments say.

    Args:
        words: What the capture says of the command.
        known: The families that there are.
    """
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    parser.set_defaults(verbose=0, command_words=words)
    return record.run(parser.parse_args(), partial(choose_families, known=known))
