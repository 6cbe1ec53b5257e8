# SPDX-License-Identifier: Apache-2.0
"""Whether what is sent somewhere stays on this host, so that nobody on the way can read it."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this host itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who it is is for others to say
        return False
