# SPDX-License-Identifier: Apache-2.0
"""`aiflame record` on a machine that has devices of one more family, or of another make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from aiflame.agent.commands import record
from aiflame.agent.devices.choice import choose_families
from aiflame.gpu.base import Family


def record_with(name: str, family: Callable[[], Family]) -> int:
    """Records as this process's arguments say, where `family` is the only one."""
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    parser.set_defaults(verbose=0, command_words=f"record with {name}")
    return record.run(parser.parse_args(), partial(choose_families, known={name: family}))
