# SPDX-License-Identifier: Apache-2.0
"""`aiflame record` with windows of four seconds, as an agent has them where less is to be done.

`python record_long_windows.py ARGUMENT...`.
"""

from __future__ import annotations

import sys
from functools import partial

from aiflame.agent.commands import record_session
from aiflame.agent.recording.recorder import INTERVAL_NS, Recorder
from record_with import record_as

RECORD = (sys.executable, __file__)

_SECONDS = 4


def _longer(*arguments: object, make: type[Recorder], **keywords: object) -> Recorder:
    recorder = make(*arguments, **keywords)  # type: ignore[arg-type]
    # What chances of a thrift of four say (recorder._set_chances).
    recorder._window_ns = recorder._device_window_ns = _SECONDS * INTERVAL_NS
    return recorder


if __name__ == "__main__":
    record_session.Recorder = partial(_longer, make=Recorder)  # type: ignore[misc,assignment]
    sys.exit(record_as("record with long windows"))
