# SPDX-License-Identifier: Apache-2.0
"""Asks an agent on this host whether it is healthy.

`python -m aiflame.agent.fleet.probe [--config FILE] [PATH]`, for probes of Kubernetes, which run a
command in the container: the agent listens on its loopback address, where the kubelet cannot ask.
What the agent was told by the same file and variables about its endpoint this one is told, too. It
exits with 0, or with 1 and the reason. It imports little, and TLS or TOML only where they are used,
since it runs again and again: it takes 20 ms of CPU time, with TLS 40, `aiflame` ten times that.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

_DEFAULT_ADDRESS = "127.0.0.1:7575"  # as in AgentSettings.health
# Of AgentSettings: what there is to know about who is asked.
_KEYS = ("health", "health_token", "health_token_file", "health_cert_file")
# The agent gives a whole exchange two seconds.
_ANSWER_S = 5.0
_MOST_BYTES = 4096


def trouble(file: str, environment: Mapping[str, str], path: str) -> str:
    """Returns why the agent is not healthy, "" if it is.

    Args:
        file: Its configuration, "" for none.
        environment: Variables by name, which go over the file.
        path: What is asked for.
    """
    try:
        layers = (_of_environment(environment), _of_file(file) if file else {})
    except (OSError, ValueError) as error:
        return f"{file}: {error}"
    address = _first((*layers, {"health": _DEFAULT_ADDRESS}), "health")
    if not address:
        return (
            "`health` is empty: the agent answers no probes; set an address, or remove the probes"
        )
    try:
        request = _request(path, _token(layers))
        answer = _answer(address, _first(layers, "health_cert_file"), request)
    except (OSError, ValueError) as error:
        return f"{address}: {error}"
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] == [b"200"]:
        return ""
    return body.decode(errors="replace").strip() or f"{address}: no answer"


def _of_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = {key: f"AIFLAME_{key.upper()}" for key in _KEYS}
    return {key: environment[name] for key, name in names.items() if name in environment}


def _of_file(path: str) -> dict[str, str]:
    data = _read(path)
    if b"health" not in data:  # as most files, and a parser takes longer to import than to ask
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    found = tomllib.loads(data.decode())
    return {key: found[key] for key in _KEYS if isinstance(found.get(key), str)}


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes as long as all other imports
        return file.read()


def _first(layers: Sequence[Mapping[str, str]], key: str) -> str:
    return next((one[key] for one in layers if key in one), "")


def _token(layers: Sequence[Mapping[str, str]]) -> str:
    for one in layers:
        if "health_token_file" in one:
            return _read(one["health_token_file"]).decode().strip()
        if "health_token" in one:
            return one["health_token"]
    return ""


def _request(path: str, token: str) -> bytes:
    header = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"GET {path} HTTP/1.0\r\n{header}\r\n".encode()


def _answer(address: str, certificate: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    answer = b""
    # To all addresses, which an agent may listen at, is to this host.
    with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection:
        if certificate:
            connection = _guarded(connection, certificate)
        with connection:
            connection.sendall(request)
            while len(answer) < _MOST_BYTES and (more := connection.recv(_MOST_BYTES)):
                answer += more
    return answer


def _guarded(connection: socket.socket, path: str) -> socket.socket:
    """Returns the connection with TLS, at whose other end is who has a certificate's key.

    It is the agent's own file that is trusted, whatever name or authority is in it, and though it
    may have expired: an agent is no healthier for being ended.
    """
    import ssl

    text = _read(path).decode("ascii", "replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    expected = ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    found = context.wrap_socket(connection)
    if found.getpeercert(binary_form=True) != expected:
        found.close()
        raise ValueError(f"who answers there has another certificate than {path}")
    return found


if __name__ == "__main__":
    words = sys.argv[1:]
    given_file = words[1] if words[:1] == ["--config"] else ""
    given_path = words[2:] if given_file else words
    if found_trouble := trouble(given_file, os.environ, *(given_path[:1] or ["/healthz"])):
        sys.exit(found_trouble)
