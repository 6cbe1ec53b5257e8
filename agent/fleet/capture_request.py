# SPDX-License-Identifier: Apache-2.0
"""What `aiflame agent capture` asks an agent for, and what it is answered.

Over a Unix socket of packets, `capture.socket` in the agent's directory, of which each is one
message of JSON: the request, and then lines to be shown and one last answer, with which the
descriptor of the capture comes. Whoever asks sends no path that is opened, and no descriptor: the
capture is a file of the agent's without a name, and the client writes its own output from that.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from aiflame.agent.errors import UsageError
from aiflame.agent.limits import MAX_FREQUENCY_HZ
from aiflame.agent.model.profile import NS_PER_S

SOCKET = "capture.socket"

# Names of Kubernetes have 253 characters, paths of cgroups 4,096.
_MAX_TEXT = 4096
MAX_REQUEST_BYTES = 1 << 14
# Of each text of an answer: a screen of containers to choose from.
_MAX_WORDS = 8192
# Two such texts: JSON has up to 6 bytes for a character (\u001b).
MAX_ANSWER_BYTES = 1 << 17

# As the kernel has them (PID_MAX_LIMIT, include/linux/threads.h), and what a time may be: a day.
_MAX_PID, _MAX_NS = 1 << 22, 86_400 * NS_PER_S


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What is wanted: one kind of selection, and either a new recording or the newest part.

    Attributes:
        pid: A process, 0 for none.
        cgroup: Path of a cgroup, as /proc has it or below a mount, "" for none.
        pod: Name, "NAMESPACE/NAME" or uid of a pod, "" for none.
        container: Name or beginning of the id of a container, "" for none; with a pod: in that.
        is_all: Every process.
        duration_ns: How long to record, 0 for the newest part of what is recorded anyway.
        frequency_hz: Of samples in a new recording.
        last_ns: How much of the newest is wanted, 0 for a new recording.
    """

    pid: int = 0
    cgroup: str = ""
    pod: str = ""
    container: str = ""
    is_all: bool = False
    duration_ns: int = 0
    frequency_hz: int = 99
    last_ns: int = 0

    def message(self) -> bytes:
        """Returns it as it is sent."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> CaptureRequest:
        """Reads what was sent, by whomever.

        Raises:
            UsageError: It is no request.
        """
        try:
            words = json.loads(data)
        except (ValueError, RecursionError):
            words = None
        known = {field.name: type(field.default) for field in fields(cls)}
        if not isinstance(words, dict) or not words.keys() <= known.keys():
            raise UsageError("not a request for a capture")
        # A bool is an int in Python, and not here.
        if any(type(value) is not known[key] for key, value in words.items()):
            raise UsageError("not a request for a capture")
        found = cls(**words)
        found._check()
        return found

    def _check(self) -> None:
        texts = (self.cgroup, self.pod, self.container)
        if any(len(text) > _MAX_TEXT or not text.isprintable() for text in texts):
            raise UsageError("not a request for a capture")
        kinds = (self.pid, self.cgroup, self.pod or self.container, self.is_all)
        if sum(map(bool, kinds)) != 1 or not 0 <= self.pid <= _MAX_PID:
            raise UsageError(
                "capture what?", "give one of --pid, --cgroup, --pod, --container and --all"
            )
        if bool(self.duration_ns) == bool(self.last_ns):
            raise UsageError("capture when?", "give either -d TIME or --last TIME")
        if not all(0 <= ns <= _MAX_NS for ns in (self.duration_ns, self.last_ns)):
            raise UsageError("captures are of a day at most")
        if not 1 <= self.frequency_hz <= MAX_FREQUENCY_HZ:
            raise UsageError(f"not a frequency from 1 to {MAX_FREQUENCY_HZ}: {self.frequency_hz}")

    @property
    def length_ns(self) -> int:
        """How much time the capture is of."""
        return self.duration_ns or self.last_ns

    @property
    def words(self) -> str:
        """What is asked for."""
        named = [
            f"{name} {value}"
            for name, value in (
                ("pid", self.pid),
                ("cgroup", self.cgroup),
                ("pod", self.pod),
                ("container", self.container),
            )
            if value
        ]
        what = " in ".join(reversed(named)) or "all processes"
        length = f"{self.length_ns / NS_PER_S:g} s"
        return f"{length} of {what}" if self.duration_ns else f"the last {length} of {what}"


def say(words: str) -> bytes:
    """Returns a message with a line to be shown."""
    return _message(say=words[:_MAX_WORDS])


def refusal(words: str, hint: str | None = None, exit_code: int = 1) -> bytes:
    """Returns the last message where there is no capture.

    Args:
        words, hint, exit_code: Of the error that is raised for it.
    """
    return _message(error=words[:_MAX_WORDS], hint=hint and hint[:_MAX_WORDS], code=exit_code)


def done(stem: str) -> bytes:
    """Returns the last message, with which the capture's descriptor goes.

    Args:
        stem: For a name of the file, "container-web".
    """
    return _message(done=stem[:_MAX_WORDS])


def _message(**words: Any) -> bytes:
    return json.dumps(words).encode()


class InDirectory:
    """The path of the socket, however long that of its directory is (108 bytes, unix(7)).

    Args:
        directory: Of the agent.

    Raises:
        OSError: There is none, or it may not be entered.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Path:
        return Path(f"/proc/self/fd/{self._fd}/{SOCKET}")

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
