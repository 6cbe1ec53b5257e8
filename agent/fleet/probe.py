# SPDX-License-Identifier: Apache-2.0
"""Asks an agent on this host whether it is healthy: `python -m aiflame.agent.fleet.probe [PATH]`.

For probes of Kubernetes, which run a command in the container: the agent listens on its loopback
address, where the kubelet cannot ask. It exits with 0, or with 1 and the reason. It imports nothing
but sockets, since it runs again and again: it takes 20 ms of CPU time, `aiflame` ten times that.
"""

from __future__ import annotations

import os
import socket
import sys

_DEFAULT_ADDRESS = "127.0.0.1:7575"  # as in AgentSettings.health
# The agent gives a whole exchange two seconds.
_ANSWER_S = 5.0
_MOST_BYTES = 4096


def trouble(address: str, path: str) -> str:
    """Returns why the agent at an address is not healthy, "" if it is."""
    host, _, port = address.rpartition(":")
    answer = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            while len(answer) < _MOST_BYTES and (more := connection.recv(_MOST_BYTES)):
                answer += more
    except (OSError, ValueError) as error:
        return f"{address}: {error}"
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] == [b"200"]:
        return ""
    return body.decode(errors="replace").strip() or f"{address}: no answer"


if __name__ == "__main__":
    found = trouble(
        os.environ.get("AIFLAME_HEALTH", _DEFAULT_ADDRESS), *(sys.argv[1:2] or ["/healthz"])
    )
    if found:
        sys.exit(found)
