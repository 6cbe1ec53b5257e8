# SPDX-License-Identifier: Apache-2.0
"""Pods of this node, as its kubelet tells them, asked by a thread of their own.

`GET https://NODE:10250/pods` answers with a v1.PodList of this node's pods only: no list of a whole
cluster, no watch. It takes the right to `get` `nodes/pods` (KEP-2862: on by default from v1.33;
before that `nodes/proxy`, which also lets one run commands in every container).
"""

from __future__ import annotations

import contextlib
import http.client
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.fleet.log import words_of
from aiflame.agent.fleet.pods import KubeletError, PodList, parse_pods

_SECRETS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PORT = 10250
_PATH = "/pods"

# An API server gives objects of 1.5 MB at most, and a pod has some 10 KB: 500 pods of 60 KB.
MAX_ANSWER_BYTES = 32 << 20
_CHUNK_BYTES = 1 << 16
# A projected token has 1 KB.
_MAX_TOKEN_BYTES = 1 << 16
# RFC 6750: what a bearer token is made of. A line break would begin another header.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")

# How old an answer may get; how soon an unknown container may have it asked again; and after
# failures, twice as long each time.
_POLL_S, _ASKED_S, _BACK_OFF_S, _MOST_BACK_OFF_S = 30.0, 2.0, 1.0, 60.0
# For one step of the network, and for all of an answer.
_STEP_S, _ANSWER_S = 5.0, 20.0


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """How to reach the kubelet.

    Attributes:
        host: The node's address.
        port: Of the authenticated endpoint.
        token_file: Read anew for each request, since tokens rotate.
        ca_file: Whom to trust. The kubelet's certificate is of the cluster's CA only where
            `serverTLSBootstrap` is set; else it is signed by itself.
        skip_verify: Trust whoever answers there, and send the token to it.
    """

    host: str
    port: int = _PORT
    token_file: Path = _SECRETS / "token"
    ca_file: Path = _SECRETS / "ca.crt"
    skip_verify: bool = False


class Kubelet:
    """Asks a kubelet for its pods.

    Args:
        settings: Where it is.
        step_s: How long one step of the network may take.
        answer_s: How long all of it may take.
        max_bytes: The largest answer that is taken.
    """

    def __init__(
        self,
        settings: KubeletSettings,
        step_s: float = _STEP_S,
        answer_s: float = _ANSWER_S,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._settings = settings
        self._step_s, self._answer_s, self._max_bytes = step_s, answer_s, max_bytes

    def fetch(self) -> PodList:
        """Returns the pods of this node.

        Raises:
            KubeletError: As it says.
        """
        deadline = time.monotonic() + self._answer_s
        try:
            answer = self._get(deadline)
        # UnicodeError: of a name that cannot be one of a host.
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            words = str(error) or type(error).__name__
            raise KubeletError(f"https://{self._settings.host}{_PATH}: {words}") from error
        return parse_pods(answer)

    def _get(self, deadline: float) -> bytes:
        settings = self._settings
        connection = http.client.HTTPSConnection(
            settings.host, settings.port, timeout=self._step_s, context=self._trust()
        )
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        with contextlib.closing(connection):
            connection.request("GET", _PATH, headers=headers)
            with connection.getresponse() as response:
                return self._read(response, deadline)

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        if response.status != http.HTTPStatus.OK:
            raise KubeletError(_refusal(response.status))
        parts, size = [], 0
        # read1: each step returns what has come, so that no server can make one last.
        while chunk := response.read1(_CHUNK_BYTES):
            size += len(chunk)
            if size > self._max_bytes:
                raise KubeletError(f"the answer is larger than {self._max_bytes} bytes")
            if time.monotonic() > deadline:
                raise KubeletError(f"the answer took longer than {self._answer_s:g} s")
            parts.append(chunk)
        return b"".join(parts)

    def _trust(self) -> ssl.SSLContext:
        if self._settings.skip_verify:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            context = ssl.create_default_context(cafile=self._settings.ca_file)
            # CAs of many clusters have no key identifiers, which Python asks for from 3.13 on.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            return context
        except OSError as error:
            raise KubeletError(f"no CA: {self._settings.ca_file}: {error.strerror}") from error

    def _token(self) -> str:
        path = self._settings.token_file
        try:
            with path.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise KubeletError(f"no token in {path}: {error.strerror}") from error
        if not _TOKEN.fullmatch(token):
            raise KubeletError(f"no token in {path}")
        return token


def _refusal(status: int) -> str:
    cure = {401: ": is the token of this cluster?", 403: ": needs `get` of `nodes/pods`"}
    return f"the kubelet answered {status}{cure.get(status, '')}"


class PodWatch:
    """Keeps the pods of this node, in a thread of its own: whoever asks is answered at once.

    Args:
        fetch: Returns them, or raises KubeletError.
        poll_s: How old an answer may get.
        asked_s: How soon after an answer it is asked again for one that is unknown.
        back_off_s: How long it waits after the first failure, then twice as long each time.

    Attributes:
        error: Why it has no newer pods, "" if it has.
        answers: How often it was told them.
        failures: How often it was not.
    """

    def __init__(
        self,
        fetch: Callable[[], PodList],
        poll_s: float = _POLL_S,
        asked_s: float = _ASKED_S,
        back_off_s: float = _BACK_OFF_S,
    ) -> None:
        self._fetch = fetch
        self._poll_s, self._asked_s, self._back_off_s = poll_s, asked_s, back_off_s
        self._list = PodList()
        self._wakes = threading.Condition()
        self._is_asked = self._is_stopped = False
        self.error = ""
        self.answers = self.failures = 0
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the thread; one that waits for the network is left to end with the process."""
        with self._wakes:
            self._is_stopped = True
            self._wakes.notify()
        self._thread.join(timeout_s)

    def ask(self) -> None:
        """Has the kubelet asked soon: there is a container that it did not tell of."""
        with self._wakes:
            self._is_asked = True
            self._wakes.notify()

    @property
    def pods(self) -> PodList:
        """What was said last."""
        return self._list

    def _run(self) -> None:
        failed = 0
        while not self._is_stopped:
            if self._fetch_once():
                failed = 0
                self._wait(self._asked_s, self._poll_s)
            else:
                wait_s = min(self._back_off_s * 2 ** min(failed, 16), _MOST_BACK_OFF_S)
                failed += 1
                self._wait(wait_s, wait_s)

    def _fetch_once(self) -> bool:
        """Asks for pods; returns whether there was an answer."""
        try:
            self._list = self._fetch()
        except Exception as error:  # whatever it is: pods are asked for as long as the agent runs
            self.failures += 1
            self.error = str(error) if isinstance(error, KubeletError) else words_of(error)
            return False
        self.answers += 1
        self.error = ""
        return True

    def _wait(self, least_s: float, most_s: float) -> None:
        """Waits as long as that, and between the two only until somebody asks."""
        begun = time.monotonic()
        with self._wakes:
            # A question from before the answer came may be about what is in it: it is asked again.
            self._wakes.wait_for(lambda: self._is_stopped, least_s)
            left_s = most_s - (time.monotonic() - begun)
            self._wakes.wait_for(lambda: self._is_stopped or self._is_asked, max(left_s, 0))
            self._is_asked = False
