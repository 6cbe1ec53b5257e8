# SPDX-License-Identifier: Apache-2.0
"""What waits for a back-end: requests in files, sent in their order, dropped only for a reason.

A request is on disk before it is sent, and until it was: an agent that is killed sends it when it
is started again. All requests of a stretch come into the queue together, and once: they are written
aside, then a file says that they are queued, then they get their names. Once the bytes that may
wait are exceeded, or a request is older than its back-end takes, the oldest is dropped and counted:
with all of its stretch, where there is no room.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import SinkState
from aiflame.agent.limits import OUT_OF_ROOM, is_disk_full
from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.outfile import private_directory
from aiflame.agent.sinks.requests import Request, RequestSink, Rest, SinkAway, SinkRefused

# As other agents do: from half a second to five minutes. The shares keep a thousand agents from
# coming back at the same moment.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 300.0
_JITTER = (0.5, 1.5)
# A back-end that asks for more is asked again after so long. It may ask all of them for the same,
# and never gets them sooner.
_LONGEST_RETRY_AFTER_S = 3600.0
_RETRY_AFTER_JITTER = (1.0, 1.5)
# How often a request is sent that something unforeseen happens to, which may be the network.
_TRIES_OF_ODD = 5

# Reasons are counted for ever: those here, and numbers of HTTP and of back-ends. Their words, of
# which there is no end, are for the log.
_MAX_WORDS = 400
_FULL = "the spool is full"
_PARTLY = "refused in part"

# One stretch in 10 s for a month. A directory of so many files is slow, and a memory of them large.
_MAX_WAITING = 1 << 18

_NAME = "{:012d}-{:020d}-{}-{:08x}.request"
_PATTERN = re.compile(r"(\d{12})-(\d{20})-(\d{1,19})-([0-9a-f]{8})\.request")
# In 19 digits: devices may tell of more, and a name that is not understood is never sent.
_MOST_SAMPLES = 10**18
_UNFINISHED = ".new"
# Of a request that is written, and not queued yet.
_ASIDE = ".aside"
# Holds the latest stretch that was queued, and the number of its last request.
_QUEUED = "queued"


class WaitingRequest(NamedTuple):
    """A request in a file, as the name of that tells it.

    Attributes:
        number: Its place in the order.
        begin_unix_ns: When what it tells of began.
        samples: How many it has.
        checksum: CRC-32 of the body.
        size_bytes: Of the body; 0 where it is not known.
    """

    number: int
    begin_unix_ns: int
    samples: int
    checksum: int
    size_bytes: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        return _NAME.format(self.number, self.begin_unix_ns, self.samples, self.checksum)


def request_of_name(name: str) -> WaitingRequest | None:
    """Returns the request of a file with that name; None where it is of none."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    number, begin_unix_ns, samples = (int(match[group]) for group in (1, 2, 3))
    return WaitingRequest(number, begin_unix_ns, samples, int(match[4], 16))


class Counts:
    """What became of samples for one sink, whichever queue had them.

    A new configuration makes a new queue, and counts go on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent_requests = self._sent_samples = self._sent_bytes = self._retries = 0
        self._last_sent_s = 0.0
        self._dropped: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()

    def note_sent(self, samples: int, size_bytes: int, now_s: float) -> None:
        """Counts a request that was taken, and how many of its samples were."""
        with self._lock:
            self._sent_requests += 1
            self._sent_samples += samples
            self._sent_bytes += size_bytes
            self._last_sent_s = now_s

    def note_retry(self) -> None:
        """Counts a request that is sent again."""
        with self._lock:
            self._retries += 1

    def drop(self, samples: int, reason: str) -> None:
        """Counts samples that are not sent."""
        with self._lock:
            self._dropped[reason] += samples
            self._untold[reason] += samples

    def take_dropped(self) -> Counter[str]:
        """Returns the samples that were dropped since the last call, by reason."""
        with self._lock:
            found, self._untold = self._untold, Counter()
            return found

    def state(
        self,
        waiting_requests: int | None = None,
        waiting_bytes: int | None = None,
        why_away: str = "",
    ) -> SinkState:
        """Returns them, with what is said of a queue."""
        with self._lock:
            return SinkState(
                self._sent_requests,
                self._sent_samples,
                self._sent_bytes,
                self._retries,
                waiting_requests,
                waiting_bytes,
                dict(self._dropped),
                self._last_sent_s,
                why_away,
            )


class Delivery:
    """The queue of one back-end, and the thread that sends what is in it.

    Args:
        sink: The back-end.
        folder: Its directory, which is made.
        bytes_max: How much may wait.
        log: Takes a line for each event.
        clock: Seconds of the wall clock.
        counts: Of the sink, where there was another queue before; None for none.
        before: The queue that had the directory before, and is closed; None for none. Nothing is
            sent until its last request has been answered, which may take as long as its sink waits.

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
        counts: Counts | None = None,
        before: Delivery | None = None,
    ) -> None:
        if private_directory(folder) is None:
            raise PermissionError(f"{folder} is not a directory that we alone may write to")
        self._sink = sink
        self._folder = folder
        self._bytes_max = bytes_max
        self._log = log
        self._clock = clock
        self._lock = threading.Condition()
        self._waiting: deque[WaitingRequest] = deque()
        self._bytes = 0
        self._next = 0
        self._counts = Counts() if counts is None else counts
        self._why_away = ""
        self._before = before
        self._is_sending = before is not None  # then the first may be on its way
        self._is_closed = self._is_hurried = False
        self._asked_until_s = 0.0
        self._given_up_unix_ns: int | None = None
        self._queued = ""
        self._read_folder()
        self._thread: threading.Thread | None = None

    @property
    def sink(self) -> RequestSink:
        """The back-end."""
        return self._sink

    @property
    def folder(self) -> Path:
        """Its directory."""
        return self._folder

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is on its way, as after `close` a while later."""
        return self._thread is None or not self._thread.is_alive()

    def start(self) -> None:
        """Begins to send."""
        name = f"to {self._sink.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, requests: Iterable[Request], stretch: str = "") -> bool:
        """Takes the requests of a stretch, in their order.

        Each is on disk when the next is asked for. What finds no room there is dropped and counted.

        Args:
            requests: They. Where one cannot be made, none is queued.
            stretch: Its name: where it is that of the latest, which an agent had queued before it
                was killed, nothing is done.

        Returns:
            Whether the disk had room for all.
        """
        if stretch and stretch == self._queued:
            return True
        aside: list[WaitingRequest] = []
        no_room = 0
        is_full = False
        try:
            for one, error in self._written_aside(requests):
                if error is None:
                    aside.append(one)
                else:
                    no_room += one.samples
                    is_full |= is_disk_full(error)
        except BaseException:
            with suppress(OSError):  # what it was is told
                for one in aside:
                    self._aside(one).unlink(missing_ok=True)
            raise
        if no_room:
            self.lose(no_room, "no room on the disk")
        if stretch:
            self._note_queued(stretch)
        for one in aside:
            self._queue(one)
        return not is_full

    def _written_aside(
        self, requests: Iterable[Request]
    ) -> Iterator[tuple[WaitingRequest, OSError | None]]:
        """Yields each request, and why it could not be written, None where it was."""
        for request in requests:
            with self._lock:
                number, self._next = self._next, self._next + 1
            one = WaitingRequest(
                number,
                request.begin_unix_ns,
                min(request.samples, _MOST_SAMPLES),
                zlib.crc32(request.body),
                len(request.body),
            )
            failed = None
            try:
                self._write(one, request.body)
            except OSError as error:
                failed = error
                self._log.say_seldom(
                    f"{self._sink.name} disk",
                    f"sink {self._sink.name}: cannot write {self._folder}: {error.strerror}",
                )
            yield one, failed

    def _note_queued(self, stretch: str) -> None:
        """From here on a stretch is queued, whenever this process ends."""
        self._queued = stretch
        new = self._folder / f"{_QUEUED}{_UNFINISHED}"
        with suppress(OSError):  # where there is no room, it may come twice
            new.write_text(f"{stretch} {self._next}")
            new.rename(self._folder / _QUEUED)

    def _queue(self, one: WaitingRequest) -> None:
        with suppress(OSError):  # it is read by its name, and found to be missing
            self._aside(one).rename(self._folder / one.name)
        with self._lock:
            if self._is_given_up(one.begin_unix_ns):
                (self._folder / one.name).unlink(missing_ok=True)
                self._drop(one.samples, _FULL)
                return
            self._waiting.append(one)
            self._bytes += one.size_bytes
            self._trim()
            self._lock.notify_all()

    def _aside(self, one: WaitingRequest) -> Path:
        return self._folder / f"{one.name}{_ASIDE}"

    def lose(self, samples: int, reason: str) -> None:
        """Takes note of samples that never became requests."""
        with self._lock:
            self._drop(samples, reason)

    def state(self) -> SinkState:
        """Returns how it does."""
        with self._lock:
            return self._counts.state(len(self._waiting), self._bytes, self._why_away)

    def flush(self, until_s: float) -> bool:
        """Waits until nothing is left to be sent, or the back-end is away.

        It is asked once more, unless it has asked for a time that is not over.

        Args:
            until_s: By `time.monotonic`: when it ends in any case.

        Returns:
            Whether nothing is left.
        """
        with self._lock:
            self._is_hurried = True
            self._lock.notify_all()
            self._lock.wait_for(
                lambda: (
                    not self._waiting
                    or self._asked_until_s > until_s
                    or (not self._is_hurried and not self._is_sending)
                ),
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
        self._end_queueing()
        for path in sorted(self._folder.iterdir()):
            one = request_of_name(path.name)
            if one is None:
                if path.name.endswith(_UNFINISHED):
                    path.unlink(missing_ok=True)
                continue
            try:
                one = one._replace(size_bytes=path.stat().st_size)
            except FileNotFoundError:  # the queue before has sent it just now
                continue
            self._waiting.append(one)
            self._bytes += one.size_bytes
            self._next = max(self._next, one.number + 1)
        self._trim()

    def _end_queueing(self) -> None:
        """Queues what an agent that was killed had only begun to queue; drops what it had not."""
        with suppress(OSError, ValueError):
            words = (self._folder / _QUEUED).read_text().split()
            self._queued, self._next = words[0], int(words[1])
        for path in sorted(self._folder.glob(f"*{_ASIDE}")):
            name = path.name.removesuffix(_ASIDE)
            one = request_of_name(name)
            if one is not None and one.number < self._next:
                path.rename(self._folder / name)
            else:
                path.unlink()

    def _write(self, one: WaitingRequest, body: bytes) -> None:
        unfinished = self._folder / f"{one.number}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
            unfinished.rename(self._aside(one))
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
            # All of its stretch: others of that may mention what it tells of.
            self._given_up_unix_ns = self._waiting[at].begin_unix_ns
            while at < len(self._waiting) and self._is_given_up(self._waiting[at].begin_unix_ns):
                one = self._waiting[at]
                del self._waiting[at]
                self._forget(one)
                self._drop(one.samples, _FULL)

    def _is_given_up(self, begin_unix_ns: int) -> bool:
        return begin_unix_ns == self._given_up_unix_ns

    def _forget(self, one: WaitingRequest) -> None:
        self._bytes -= one.size_bytes
        with suppress(OSError):
            (self._folder / one.name).unlink()

    def _drop(self, samples: int, reason: str) -> None:
        self._counts.drop(samples, reason)
        self._log.say_seldom(
            f"{self._sink.name} dropped {reason}",
            f"sink {self._sink.name}: {samples:,} samples dropped: {reason}",
        )

    def _is_too_old(self, one: WaitingRequest) -> bool:
        limit_s = self._sink.max_age_s
        return limit_s is not None and self._clock() - one.begin_unix_ns / NS_PER_S > limit_s

    def _take(self) -> WaitingRequest | None:
        """Waits for a request that is to be sent; None at the end. It stays first in the queue."""
        with self._lock:
            while True:
                if self._is_closed:  # what is there may be another one's
                    return None
                while self._waiting and self._is_too_old(self._waiting[0]):
                    one = self._waiting.popleft()
                    self._forget(one)
                    self._drop(one.samples, "older than the back-end takes")
                if self._waiting:
                    self._is_sending = True
                    return self._waiting[0]
                self._lock.notify_all()
                self._lock.wait()

    def _take_over(self) -> None:
        """Waits until the queue before has no request on its way: the first, if there is one."""
        before, self._before = self._before, None
        if before is None:
            return
        if not before.is_over:
            self._log.say(
                f"sink {self._sink.name}: the new settings are used once what was sent with the"
                " old ones is answered"
            )
        if before._thread is not None:
            before._thread.join()
        with self._lock:
            self._is_sending = False
            if self._waiting and self._is_gone(self._waiting[0]):  # it is counted there
                self._bytes -= self._waiting.popleft().size_bytes
            self._trim()

    def _is_gone(self, one: WaitingRequest) -> bool:
        try:
            (self._folder / one.name).stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False

    def _run(self) -> None:
        self._take_over()
        failures = odd = 0
        while (one := self._take()) is not None:
            wait_s: float | None = None
            is_asked = False
            try:
                refused = self._send(one)
            except SinkAway as error:
                wait_s = self._wait_s(failures, error.retry_after_s)
                is_asked = bool(error.retry_after_s)
                if error.rest is not None:
                    self._keep_rest(one, error.rest)
                self._note_away(str(error))
            except SinkRefused as error:
                self._log.say_seldom(f"{self._sink.name} refused {error.reason}", _line(str(error)))
                self._done(one, f"refused: {error.reason}")
            except Exception as error:  # whatever a sink does, it stops nobody else
                odd += 1
                what = _line(f"{type(error).__name__}: {error}")
                if odd < _TRIES_OF_ODD:
                    wait_s = self._wait_s(failures, None)
                    self._note_away(what)
                else:
                    self._log.say_seldom(
                        f"{self._sink.name} odd", f"sink {self._sink.name}: {what}"
                    )
                    self._done(one, f"cannot be sent: {type(error).__name__}")
            else:
                self._note_taken(one, refused)
            if wait_s is None:
                failures = odd = 0
                continue
            failures += 1
            self._pause(wait_s, is_asked=is_asked)

    def _send(self, one: WaitingRequest) -> Counter[str]:
        body = self._read(one)
        if len(body) != one.size_bytes or zlib.crc32(body) != one.checksum:
            raise SinkRefused(f"{self._folder / one.name} is damaged", "its file is damaged")
        return self._sink.send(Request(body, one.begin_unix_ns, one.samples))

    def _read(self, one: WaitingRequest) -> bytes:
        path = self._folder / one.name
        try:
            return path.read_bytes()
        except (FileNotFoundError, IsADirectoryError) as error:  # it gets no better
            raise SinkRefused(f"{path}: {error.strerror}", "its file cannot be read") from error
        except OSError as error:
            if error.errno not in OUT_OF_ROOM:
                raise
            raise SinkAway(f"{path.parent} cannot be read: {error.strerror}") from error

    def _wait_s(self, failures: int, retry_after_s: float | None) -> float:
        own_s = min(_FIRST_WAIT_S * float(1 << min(failures, 16)), _LONGEST_WAIT_S)
        asked_s = min(retry_after_s or 0.0, _LONGEST_RETRY_AFTER_S)
        # Shares spread load, and hide nothing.
        return max(
            own_s * random.uniform(*_JITTER),  # noqa: S311
            asked_s * random.uniform(*_RETRY_AFTER_JITTER),  # noqa: S311
        )

    def _note_away(self, said: str) -> None:
        why = _line(said)
        self._counts.note_retry()
        with self._lock:
            was_away, self._why_away = self._why_away, why
            waiting = len(self._waiting)
        if why != was_away:
            text = f"sink {self._sink.name} is away: {why}; {waiting:,} requests wait"
            self._log.say_seldom(f"{self._sink.name} away", text)

    def _note_taken(self, one: WaitingRequest, refused: Counter[str]) -> None:
        """Counts what the back-end has taken of a request, and what it has not."""
        dropped = min(self._note_refused(refused), one.samples)
        self._done(one, _PARTLY, dropped, is_sent=True)

    def _keep_rest(self, one: WaitingRequest, rest: Rest) -> None:
        """Lets that wait alone which is to be sent again of a request.

        Who takes this queue over knows its files: then all is sent again, and so without room for
        a file of the rest.
        """
        body, samples = rest.request.body, min(rest.request.samples, one.samples)
        left = one._replace(samples=samples, checksum=zlib.crc32(body), size_bytes=len(body))
        with self._lock:
            is_ours = not self._is_closed and self._waiting and self._waiting[0] is one
            if not is_ours or left.name == one.name:
                return
            try:
                self._write(left, body)
                self._aside(left).rename(self._folder / left.name)
            except OSError:
                return
            self._waiting[0] = left
            self._bytes += left.size_bytes
            self._forget(one)
        refused = min(self._note_refused(rest.refused), one.samples - samples)
        if refused:
            self.lose(refused, _PARTLY)
        taken_bytes = max(0, one.size_bytes - left.size_bytes)
        self._counts.note_sent(one.samples - samples - refused, taken_bytes, self._clock())

    def _note_refused(self, refused: Counter[str]) -> int:
        """Says what was refused of a request; returns how much that is."""
        for words, samples in refused.items():
            self._log.say_seldom(
                f"{self._sink.name} refused in part",
                f"sink {self._sink.name}: {samples:,} samples refused: {_line(words)}",
            )
        return refused.total()

    def _done(
        self,
        one: WaitingRequest,
        reason: str,
        dropped: int | None = None,
        *,
        is_sent: bool = False,
    ) -> None:
        """Takes a request out of the queue.

        Args:
            one: The request.
            reason: Why what is dropped of it is.
            dropped: How many samples are; None: all.
            is_sent: The back-end has it.
        """
        dropped = one.samples if dropped is None else dropped
        with self._lock:
            self._is_sending = False
            if self._waiting and self._waiting[0] is one:
                self._waiting.popleft()
                self._forget(one)
            if dropped:
                self._drop(dropped, reason)
            was_away, self._why_away = self._why_away, ""
            if is_sent:
                self._counts.note_sent(one.samples - dropped, one.size_bytes, self._clock())
            waiting = len(self._waiting)
            self._lock.notify_all()
        if was_away and is_sent:
            self._log.say(f"sink {self._sink.name} takes requests again; {waiting:,} wait")

    def _pause(self, seconds: float, *, is_asked: bool) -> None:
        """Waits before the next try.

        Who flushes has no time for it; what the back-end has asked for is heeded all the same.
        """
        with self._lock:
            self._is_sending = self._is_hurried = False
            self._asked_until_s = time.monotonic() + seconds if is_asked else 0.0
            self._lock.notify_all()
            self._lock.wait_for(
                lambda: self._is_closed or (self._is_hurried and not is_asked), seconds
            )
            self._asked_until_s = 0.0


def _line(words: str) -> str:
    """Returns what somebody else says as a line of a log."""
    return "".join(c if c.isprintable() else "?" for c in words[:_MAX_WORDS])
