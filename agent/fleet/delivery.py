# SPDX-License-Identifier: Apache-2.0
"""What waits for a back-end: requests in files, sent in their order, dropped only for a reason.

A request is on disk before it is sent, and until it was: an agent that is killed sends it when it
is started again. Once the bytes that may wait are exceeded, or a request is older than its back-end
takes, the oldest is dropped and counted.

Each back-end has a queue and a thread of its own.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aiflame.agent.fleet.log import Log
from aiflame.agent.outfile import private_directory
from aiflame.agent.sinks.requests import Request, RequestSink, SinkAway, SinkRefused

# As other agents do: from half a second to five minutes. The shares keep a thousand agents from
# coming back at the same moment.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 300.0
_JITTER = (0.5, 1.5)
# A back-end that asks for more is asked again after so long.
_LONGEST_RETRY_AFTER_S = 3600.0
# How often a request is sent that something unforeseen happens to, which may be the network.
_TRIES_OF_ODD = 5

# One stretch in 10 s for a month. A directory of so many files is slow, and a memory of them large.
_MAX_WAITING = 1 << 18

_NAME = "{:012d}-{:020d}-{}-{:08x}.request"
_PATTERN = re.compile(r"(\d{12})-(\d{20})-(\d{1,19})-([0-9a-f]{8})\.request")
_UNFINISHED = ".new"

_NS_PER_S = 1_000_000_000


class _Waiting(NamedTuple):
    """A request in a file."""

    number: int
    begin_unix_ns: int
    samples: int
    checksum: int
    size_bytes: int

    @property
    def name(self) -> str:
        return _NAME.format(self.number, self.begin_unix_ns, self.samples, self.checksum)


class State(NamedTuple):
    """How a delivery does.

    Attributes:
        sent_requests, sent_samples, sent_bytes: Since the agent was started.
        retries: How often something was sent again.
        waiting_requests, waiting_bytes: What is on disk.
        dropped_samples: By reason.
        last_sent_unix_s: 0 for never.
        why_away: Why the last try failed, "" where it did not.
    """

    sent_requests: int
    sent_samples: int
    sent_bytes: int
    retries: int
    waiting_requests: int
    waiting_bytes: int
    dropped_samples: dict[str, int]
    last_sent_unix_s: float
    why_away: str


class Delivery:
    """The queue of one back-end, and the thread that sends what is in it.

    Args:
        sink: The back-end.
        folder: Its directory, which is made.
        bytes_max: How much may wait.
        log: Takes a line for each event.
        clock: Seconds of the wall clock.

    Raises:
        OSError: The directory is not ours, or cannot be read.
    """

    def __init__(
        self,
        sink: RequestSink,
        folder: Path,
        bytes_max: int,
        log: Log,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if private_directory(folder) is None:
            raise PermissionError(f"{folder} is not a directory that we alone may write to")
        self._sink = sink
        self._folder = folder
        self._bytes_max = bytes_max
        self._log = log
        self._clock = clock
        self._lock = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._next = 0
        self._dropped: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        self._sent_requests = self._sent_samples = self._sent_bytes = self._retries = 0
        self._last_sent_s = 0.0
        self._why_away = ""
        self._is_sending = self._is_closed = self._is_hurried = False
        self._read_folder()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to send."""
        name = f"to {self._sink.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, requests: Iterable[Request]) -> None:
        """Takes requests, in their order; each is on disk when the next is asked for.

        What finds no room on the disk is dropped and counted.
        """
        for request in requests:
            with self._lock:
                number, self._next = self._next, self._next + 1
            one = _Waiting(
                number,
                request.begin_unix_ns,
                request.samples,
                zlib.crc32(request.body),
                len(request.body),
            )
            try:
                self._write(one, request.body)
            except OSError as error:
                with self._lock:
                    self._drop(one.samples, "no room on the disk")
                self._log.say_seldom(
                    f"{self._sink.name} disk",
                    f"sink {self._sink.name}: cannot write {self._folder}: {error.strerror}",
                )
                continue
            with self._lock:
                self._waiting.append(one)
                self._bytes += one.size_bytes
                self._trim()
                self._lock.notify_all()

    def take_dropped(self) -> Counter[str]:
        """Returns the samples that were dropped since the last call, by reason."""
        with self._lock:
            found, self._untold = self._untold, Counter()
            return found

    def lose(self, samples: int, reason: str) -> None:
        """Takes note of samples that never became requests."""
        with self._lock:
            self._drop(samples, reason)

    def state(self) -> State:
        """Returns how it does."""
        with self._lock:
            return State(
                self._sent_requests,
                self._sent_samples,
                self._sent_bytes,
                self._retries,
                len(self._waiting),
                self._bytes,
                dict(self._dropped),
                self._last_sent_s,
                self._why_away,
            )

    def flush(self, until_s: float) -> bool:
        """Waits until nothing is left to be sent, or the back-end is away.

        Args:
            until_s: By `time.monotonic`: when it ends in any case.

        Returns:
            Whether nothing is left.
        """
        with self._lock:
            self._is_hurried = True
            self._lock.notify_all()
            self._lock.wait_for(
                lambda: not self._waiting or (not self._is_hurried and not self._is_sending),
                max(until_s - time.monotonic(), 0),
            )
            return not self._waiting

    def close(self, patience_s: float = 0.0) -> None:
        """Ends sending; what is left stays on disk.

        Args:
            patience_s: How long to wait for the answer to what is on its way.
        """
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(patience_s)

    # What follows is called with the lock, or by the thread alone.

    def _read_folder(self) -> None:
        for path in sorted(self._folder.iterdir()):
            match = _PATTERN.fullmatch(path.name)
            if match is None:
                if path.name.endswith(_UNFINISHED):
                    path.unlink(missing_ok=True)
                continue
            number, begin, samples = (int(match[group]) for group in (1, 2, 3))
            size_bytes = path.stat().st_size
            self._waiting.append(_Waiting(number, begin, samples, int(match[4], 16), size_bytes))
            self._bytes += size_bytes
            self._next = number + 1
        self._trim()

    def _write(self, one: _Waiting, body: bytes) -> None:
        unfinished = self._folder / f"{one.number}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
            unfinished.rename(self._folder / one.name)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _trim(self) -> None:
        """Drops the oldest until the rest may wait."""
        while self._waiting and (
            self._bytes > self._bytes_max or len(self._waiting) > _MAX_WAITING
        ):
            # The first may be on its way: it is the sender's.
            at = 1 if self._is_sending else 0
            if at >= len(self._waiting):
                return
            one = self._waiting[at]
            del self._waiting[at]
            self._forget(one)
            self._drop(one.samples, "the spool is full")

    def _forget(self, one: _Waiting) -> None:
        self._bytes -= one.size_bytes
        with suppress(OSError):
            (self._folder / one.name).unlink()

    def _drop(self, samples: int, reason: str) -> None:
        self._dropped[reason] += samples
        self._untold[reason] += samples
        self._log.say_seldom(
            f"{self._sink.name} dropped {reason}",
            f"sink {self._sink.name}: {samples:,} samples dropped: {reason}",
        )

    def _is_too_old(self, one: _Waiting) -> bool:
        limit_s = self._sink.max_age_s
        return limit_s is not None and self._clock() - one.begin_unix_ns / _NS_PER_S > limit_s

    def _take(self) -> _Waiting | None:
        """Waits for a request that is to be sent; None at the end. It stays first in the queue."""
        with self._lock:
            while True:
                while self._waiting and self._is_too_old(self._waiting[0]):
                    one = self._waiting.popleft()
                    self._forget(one)
                    self._drop(one.samples, "older than the back-end takes")
                if self._is_closed:
                    return None
                if self._waiting:
                    self._is_sending = True
                    return self._waiting[0]
                self._lock.notify_all()
                self._lock.wait()

    def _run(self) -> None:
        failures = odd = 0
        while (one := self._take()) is not None:
            wait_s: float | None = None
            try:
                refused = self._send(one)
            except SinkAway as error:
                wait_s = self._wait_s(failures, error.retry_after_s)
                self._note_away(str(error))
            except SinkRefused as error:
                self._log.say_seldom(f"{self._sink.name} refused {error.reason}", str(error))
                self._done(one, Counter({f"refused: {error.reason}": one.samples}), is_sent=False)
            except Exception as error:  # whatever a sink does, it stops nobody else
                odd += 1
                what = f"{type(error).__name__}: {error}"
                if odd < _TRIES_OF_ODD:
                    wait_s = self._wait_s(failures, None)
                    self._note_away(what)
                else:
                    self._done(
                        one, Counter({f"cannot be sent: {what}": one.samples}), is_sent=False
                    )
            else:
                self._done(one, refused, is_sent=True)
            if wait_s is None:
                failures = odd = 0
                continue
            failures += 1
            self._pause(wait_s)

    def _send(self, one: _Waiting) -> Counter[str]:
        try:
            body = (self._folder / one.name).read_bytes()
        except OSError as error:
            raise SinkRefused(f"its file cannot be read: {error.strerror}") from error
        if len(body) != one.size_bytes or zlib.crc32(body) != one.checksum:
            raise SinkRefused("its file is damaged")
        return self._sink.send(Request(body, one.begin_unix_ns, one.samples))

    def _wait_s(self, failures: int, retry_after_s: float | None) -> float:
        if retry_after_s is not None:
            return min(max(retry_after_s, 0.0), _LONGEST_RETRY_AFTER_S)
        longest = min(_FIRST_WAIT_S * float(1 << min(failures, 16)), _LONGEST_WAIT_S)
        return longest * random.uniform(*_JITTER)  # noqa: S311 - spreads load, and hides nothing

    def _note_away(self, why: str) -> None:
        with self._lock:
            self._retries += 1
            was_away, self._why_away = self._why_away, why
            waiting = len(self._waiting)
        if why != was_away:
            text = f"sink {self._sink.name} is away: {why}; {waiting:,} requests wait"
            self._log.say_seldom(f"{self._sink.name} away {why}", text)

    def _done(self, one: _Waiting, dropped: Counter[str], *, is_sent: bool) -> None:
        """Takes a request out of the queue."""
        with self._lock:
            self._is_sending = False
            if self._waiting and self._waiting[0] is one:
                self._waiting.popleft()
                self._forget(one)
            for reason, samples in dropped.items():
                self._drop(samples, reason)
            was_away, self._why_away = self._why_away, ""
            if is_sent:
                self._sent_requests += 1
                self._sent_samples += max(one.samples - dropped.total(), 0)
                self._sent_bytes += one.size_bytes
                self._last_sent_s = self._clock()
            waiting = len(self._waiting)
            self._lock.notify_all()
        if was_away and is_sent:
            self._log.say(f"sink {self._sink.name} takes requests again; {waiting:,} wait")

    def _pause(self, seconds: float) -> None:
        """Waits before the next try; not while somebody flushes, who has no time for it."""
        with self._lock:
            self._is_sending = self._is_hurried = False
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._is_closed or self._is_hurried, seconds)
