# SPDX-License-Identifier: Apache-2.0
"""What systemd is told of a service of type notify (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_VARIABLE = "NOTIFY_SOCKET"


class ServiceManager:
    """Who started this process, if that wants to be told.

    Args:
        address: Of its socket, "" where nobody does.
    """

    def __init__(self, address: str | None = None) -> None:
        address = os.environ.get(_VARIABLE, "") if address is None else address
        # "@" stands for an abstract name, whose first byte is 0.
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def tell(self, *lines: str) -> None:
        """Tells something: READY=1, WATCHDOG=1, STOPPING=1, STATUS=..."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
