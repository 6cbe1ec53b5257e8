# SPDX-License-Identifier: Apache-2.0
"""Requests over HTTP to back-ends: certificates, secrets, time limits, and what answers mean.

Secrets are read from their files for each request, since projected tokens of Kubernetes change. One
that cannot be read, or a certificate, is a back-end that is away. They are sent over TLS, or to
this machine itself, and no redirect takes them to another host.
"""

from __future__ import annotations

import base64
import http
import http.client
import math
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from aiflame.agent.errors import UsageError
from aiflame.agent.http_exchange import exchange
from aiflame.agent.loopback import is_loopback
from aiflame.agent.reports.words import showable
from aiflame.agent.sinks.requests import SinkAway
from aiflame.agent.tls import client_context

# Answers of back-ends are a few numbers, an error in a sentence, or one for each profile.
_MAX_ANSWER_BYTES = 1 << 20
# Of an error in a message of ours.
_MAX_WORDS = 300
# A token of Kubernetes has near 1,000 bytes.
_MAX_SECRET_BYTES = 16 << 10
# Answers about who asks, and not about the request: secrets are read for each, and may be others
# next time.
NOT_LET_IN = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
# Whoever asks for more is wrong about its clock: it is asked again after an hour.
_MAX_RETRY_AFTER_S = 3_600.0
# A request on its way keeps its queue from another that takes over.
_MAX_TIMEOUT_S = 3_600.0
# How often certificates are read anew: 20 ms of CPU time for all that the system trusts.
_TLS_S = 600.0


@dataclass(frozen=True, kw_only=True)
class PostSettings:
    """Where to, and how to be let in: keys that every sink over HTTP has.

    Attributes:
        url: Of the back-end, "https://HOST:PORT" and maybe a path; "http" without TLS.
        tenant: Sent as X-Scope-OrgID; "" for none.
        token_file: A file with a bearer token.
        user: For basic authentication, with `password_file`.
        password_file: A file with its password.
        ca_file: Certificates to trust, instead of the system's.
        cert_file: This host's own certificate, for a back-end that asks for one.
        key_file: Its key.
        insecure: Trust any certificate, and send secrets without TLS.
        timeout_s: A request may take so long, from the connection to the end of the answer.
    """

    url: str
    tenant: str = ""
    token_file: Path | None = None
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    insecure: bool = False
    # As `pyroscope.write` of Grafana Alloy.
    timeout_s: float = 10.0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the back-end."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a back-end said.

    Attributes:
        status: Of HTTP.
        body: At most 1 MiB of it.
        retry_after_s: When to try again, at most an hour; None where it does not say.
        is_cut: There is more of it.
    """

    status: int
    body: bytes
    retry_after_s: float | None
    is_cut: bool

    @property
    def is_taken(self) -> bool:
        """Whether the request was accepted."""
        return 200 <= self.status < 300

    @property
    def reason(self) -> str:
        """The status in words."""
        return f"{self.status} {http.client.responses.get(self.status, '')}".rstrip()

    @property
    def words(self) -> str:
        """The answer for a message: status and the start of its text, in one line."""
        text = showable(self.body[:_MAX_WORDS].decode("utf-8", "replace")) if self.body else ""
        return f"{self.reason} {text}".rstrip()


class Poster:
    """Sends requests to one path of a back-end.

    Args:
        settings: Whose.
        path: After that of the URL.
        headers: Of each request.

    Raises:
        UsageError: The settings make no sense, or a secret would be sent in the clear.
    """

    def __init__(self, settings: PostSettings, path: str, headers: Mapping[str, str]) -> None:
        self._settings = settings
        self._url = _checked(settings)
        base = self._url.path.rstrip("/")
        self._path = base if base.endswith(path) else base + path
        self._headers = dict(headers)
        if settings.tenant:
            self._headers["X-Scope-OrgID"] = _header("tenant", settings.tenant)
        self._tls: ssl.SSLContext | None = None
        self._tls_s = 0.0

    def _refresh_tls(self) -> None:
        """Reads certificates, and anew now and then: they are replaced.

        Raises:
            UsageError: They cannot be read, and there are none from before.
        """
        if self._url.scheme != "https":
            return
        if self._tls is None:
            self._tls, self._tls_s = _tls(self._settings), time.monotonic()
        elif time.monotonic() - self._tls_s >= _TLS_S:
            self._tls_s = time.monotonic()
            with suppress(UsageError):  # just now: those before go on
                self._tls = _tls(self._settings)

    def post(self, body: bytes) -> Answer:
        """Send a request and return the answer.

        Raises:
            SinkAway: There was none in time.
        """
        try:
            headers = self._headers | _authorization(self._settings)
            self._refresh_tls()
        except (OSError, UsageError) as error:
            # A token or a certificate that is being replaced.
            raise SinkAway(f"{self._name}: {error}") from error
        try:
            found = exchange(
                self._settings.address,
                self._tls,
                self._path,
                headers,
                body,
                timeout_s=self._settings.timeout_s,
                max_bytes=_MAX_ANSWER_BYTES,
            )
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise SinkAway(f"{self._name}: {showable(why[:_MAX_WORDS])}") from error
        wait_s = retry_after_s(found.headers.get("Retry-After"))
        return Answer(found.status, found.body, wait_s, found.is_cut)

    @property
    def _name(self) -> str:
        return f"{self._url.scheme}://{self._url.netloc.rpartition('@')[2]}"


def check_files(settings: PostSettings) -> None:
    """Refuses settings whose secrets or certificates cannot be read.

    Raises:
        UsageError: A file cannot be read, or has none.
    """
    try:
        _authorization(settings)
        if urlsplit(settings.url).scheme == "https":
            _tls(settings)
    except OSError as error:
        raise UsageError(f"{settings.url}: {error}") from error


def _authorization(settings: PostSettings) -> dict[str, str]:
    if settings.token_file:
        return {"Authorization": f"Bearer {_secret(settings.token_file)}"}
    if settings.user and settings.password_file:
        pair = f"{settings.user}:{_secret(settings.password_file)}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _checked(settings: PostSettings) -> SplitResult:
    try:
        url = urlsplit(settings.url)
        port = url.port
    except ValueError as error:
        raise UsageError(f"{settings.url!r} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        raise UsageError(f"{settings.url!r} is no URL of http or https", "write https://HOST:PORT")
    if not settings.url.isascii() or any(c.isspace() for c in settings.url):
        raise UsageError(f"{settings.url!r} has characters that a URL may not have")
    if url.username or url.password or url.query or url.fragment:
        raise UsageError(
            f"{url.scheme}://{url.hostname}: a URL with more than host, port and path",
            "name a user by `user` and `password_file`",
        )
    if settings.token_file and settings.user:
        raise UsageError(f"{settings.url}: both a token and a user")
    if bool(settings.user) != bool(settings.password_file):
        raise UsageError(f"{settings.url}: `user` and `password_file` are only good together")
    if url.scheme == "http" and (settings.cert_file or settings.key_file):
        raise UsageError(f"{settings.url}: a certificate, without TLS", "write https://")
    if not 0 < settings.timeout_s <= _MAX_TIMEOUT_S:
        raise UsageError(f"{settings.url}: a timeout of {settings.timeout_s} s")
    has_secret = bool(settings.token_file or settings.user)
    in_clear = url.scheme == "http" and not settings.insecure and not is_loopback(url.hostname)
    if has_secret and in_clear:
        raise UsageError(
            f"{settings.url}: a secret would be sent without TLS",
            "write https://, or set `insecure` where nobody else can listen",
        )
    return url


def _tls(settings: PostSettings) -> ssl.SSLContext:
    context = client_context(settings.ca_file, settings.cert_file, settings.key_file)
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _secret(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MAX_SECRET_BYTES + 1)
    if len(content) > _MAX_SECRET_BYTES:
        raise UsageError(f"{path}: too long for a secret")
    secret = content.decode("utf-8", "replace").strip()
    if not secret:
        raise UsageError(f"{path} is empty")
    return _header(str(path), secret)


def _header(what: str, value: str) -> str:
    # Without what would end a header, and begin another one.
    if not value.isascii() or not value.isprintable():
        raise UsageError(f"{what}: characters that a header may not have")
    return value


def retry_after_s(text: str | None) -> float | None:
    """Returns what a header says, in seconds or by a date (RFC 9110, 10.2.3); at most an hour."""
    if text is None or len(text) > _MAX_WORDS:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
            if when.tzinfo is None:
                when = when.replace(tzinfo=timezone.utc)
            seconds = (when - datetime.now(timezone.utc)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return None
    if not math.isfinite(seconds):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)
