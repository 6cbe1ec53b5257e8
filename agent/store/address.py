# SPDX-License-Identifier: Apache-2.0
"""Where a store is: a ClickHouse server by its URL, or a directory.

clickhouse://[USER@]HOST[:PORT]/DATABASE     HTTP; of another host only without a password
clickhouses://[USER@]HOST[:PORT]/DATABASE    HTTPS
?ca_file=PATH                                certificates to trust, instead of the system's
?cert_file=PATH&key_file=PATH                one's own certificate; without a password it tells who
                                             the user is
?password_file=PATH                          read at each connection, so that it may change

Without password_file, AIFLAME_STORE_PASSWORD holds the password, if there is one, and
AIFLAME_STORE_USER the user. A password in the URL is refused: others see command lines.
"""

from __future__ import annotations

import os
import re
import ssl
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from aiflame.agent.errors import UsageError
from aiflame.agent.loopback import is_loopback
from aiflame.agent.store.engine import DATABASE
from aiflame.agent.tls import client_context

_PLAIN, _TLS = "clickhouse", "clickhouses"
# ClickHouse's own: http_port and https_port.
_PORTS = {_PLAIN: 8123, _TLS: 8443}
_OPTIONS = ("ca_file", "cert_file", "key_file", "password_file")

# It stands in statements and URLs.
_DATABASE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")

# A password is a line; what is longer is no password file.
_MAX_PASSWORD_BYTES = 4_096

USER_VARIABLE = "AIFLAME_STORE_USER"
PASSWORD_VARIABLE = "AIFLAME_STORE_PASSWORD"  # noqa: S105, its name


@dataclass(frozen=True, slots=True)
class Server:
    """A ClickHouse server.

    Attributes:
        name: Its URL, as it was typed.
        host: Its name or address.
        port: Of HTTP.
        database: On it.
        is_tls: HTTPS.
        user: "" for the server's default.
        password_file: None where there is none.
        ca_file: None for the system's certificates.
        cert_file, key_file: One's own certificate, and its key; None for none.
        path: What a proxy in between has in front of the server's own.
        password_variable: Of the environment: it has the password where no file is named; "" for
            none.
    """

    name: str
    host: str
    port: int
    database: str
    is_tls: bool
    user: str
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    path: str = ""
    password_variable: str = PASSWORD_VARIABLE

    def __post_init__(self) -> None:
        """Refuses a user's name that cannot be sent."""
        _refuse_control_characters("the name of the store's user", self.user)

    @property
    def is_loopback(self) -> bool:
        """Whether what is sent to it stays on this host."""
        return is_loopback(self.host)

    def password(self, environment: Mapping[str, str] = os.environ) -> str:
        """Returns the password, "" for none.

        Raises:
            UsageError: It cannot be read or sent, or would go over the network as it is.
        """
        found = environment.get(self.password_variable, "") if self.password_variable else ""
        if self.password_file is not None:
            try:
                with self.password_file.open("rb") as file:
                    text = file.read(_MAX_PASSWORD_BYTES + 1)
            except OSError as error:
                raise UsageError(f"cannot read the store's password: {error}") from error
            if len(text) > _MAX_PASSWORD_BYTES:
                raise UsageError(f"no password is so long: {self.password_file}")
            found = text.decode("utf-8", "replace").strip()
        _refuse_control_characters("the store's password", found)
        if found and not self.is_tls and not self.is_loopback:
            raise UsageError(
                f"the password of {self.host} would go over the network as plain text",
                self._tls_hint,
            )
        return found

    def tls(self) -> ssl.SSLContext | None:
        """Returns what connections are made with, None without TLS; files are read now.

        Raises:
            UsageError: A file cannot be read, or nobody would be shown the certificate.
        """
        if self.is_tls:
            return client_context(self.ca_file, self.cert_file, self.key_file)
        if self.cert_file or self.key_file:
            raise UsageError(f"{self.host}: a certificate, without TLS", self._tls_hint)
        return None

    @property
    def _tls_hint(self) -> str:
        """What to write instead, where the URL is from: an agent's has the scheme of HTTP."""
        return "use https://" if self.name.startswith("http://") else f"use {_TLS}:// (HTTPS)"


def _refuse_control_characters(what: str, text: str) -> None:
    # A line break would end a header, and begin another one.
    if any(unicodedata.category(c) == "Cc" for c in text):
        raise UsageError(f"{what} has characters that a header may not have", "write one line")


def address_of(text: str, environment: Mapping[str, str] = os.environ) -> Server | Path:
    """Returns the server that a URL names, or the directory that a path names.

    Raises:
        UsageError: It is neither.
    """
    if "://" not in text:
        if not text:
            raise UsageError("no store is named", "--store DIRECTORY, or clickhouse://host/db")
        return Path(text)
    scheme, _, rest = text.partition("://")
    if scheme not in _PORTS:
        raise UsageError(
            f"not a store: {scheme}://...",
            f"--store DIRECTORY, {_PLAIN}://host/db or {_TLS}://host/db",
        )
    try:
        parts = urlsplit(f"//{rest}")
        port = parts.port
        host = parts.hostname or ""
    except ValueError as error:
        raise UsageError(f"not the URL of a store: {error}") from error
    if parts.password is not None:
        raise UsageError(
            "a password in the store's URL: others on this host can read it",
            f"take it out, change it, and use ?password_file=PATH or {PASSWORD_VARIABLE}",
        )
    if not re.fullmatch(r"[A-Za-z0-9._:-]+", host):
        raise UsageError("the URL of the store names no host", f"{_PLAIN}://host/db")
    database = parts.path.strip("/") or DATABASE
    if _DATABASE.fullmatch(database) is None:
        raise UsageError(
            f"not the name of a database: {database}", "letters, digits and _, as in aiflame"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise UsageError(f"unknown in the store's URL: {unknown[0]}", f"it takes {_OPTIONS}")
    files = {name: Path(options[name]) if options.get(name) else None for name in _OPTIONS}
    user = unquote(parts.username or "") or environment.get(USER_VARIABLE, "")
    return Server(
        name=text,
        host=host,
        port=port or _PORTS[scheme],
        database=database,
        is_tls=scheme == _TLS,
        user=user,
        password_file=files["password_file"],
        ca_file=files["ca_file"],
        cert_file=files["cert_file"],
        key_file=files["key_file"],
    )
