# SPDX-License-Identifier: Apache-2.0
"""What waits for a back-end: in order, bounded, on disk, and counted where it is dropped."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from aiflame.agent.fleet import delivery as module
from aiflame.agent.fleet.delivery import Counts, Delivery
from aiflame.agent.fleet.log import Log
from aiflame.agent.model.batch import Batch
from aiflame.agent.sinks.requests import Request, Rest, SinkAway, SinkRefused
from support import wait_until

_NOW_S = 2_000_000_000.0
_NOW_NS = int(_NOW_S * 1e9)


class _Sink:
    """A back-end of which a test says what it answers."""

    def __init__(self, answer: Callable[[Request], Counter[str]], max_age_s: float | None = None):
        self.name = "toy"
        self.max_age_s = max_age_s
        self.answer = answer
        self.got: list[bytes] = []

    def encode(self, batches: Sequence[Batch]) -> Iterator[Request]:
        return iter(())

    def send(self, request: Request) -> Counter[str]:
        refused = self.answer(request)
        self.got.append(request.body)
        return refused


def _takes(_request: Request) -> Counter[str]:
    return Counter()


def _is_away(_request: Request) -> Counter[str]:
    raise SinkAway("nobody listens")


def _request(number: int, samples: int = 1, begin_unix_ns: int | None = None) -> Request:
    """Each is a stretch of its own, if nothing else is said."""
    begin_unix_ns = _NOW_NS + number if begin_unix_ns is None else begin_unix_ns
    return Request(f"{number:04}".encode(), begin_unix_ns, samples)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    yield Log(descriptor)
    os.close(descriptor)


@contextmanager
def _delivery(
    sink: _Sink,
    folder: Path,
    log: Log,
    bytes_max: int = 1 << 20,
    *,
    starts: bool = True,
    counts: Counts | None = None,
) -> Iterator[Delivery]:
    made = Delivery(sink, folder, bytes_max, log, lambda: _NOW_S, counts)
    if starts:
        made.start()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 0.01)


def test_requests_come_in_their_order_and_leave_no_file(tmp_path: Path, log: Log) -> None:
    sink, folder = _Sink(_takes), tmp_path / "spool"
    with _delivery(sink, folder, log) as delivery:
        delivery.put(map(_request, range(50)))
        assert delivery.flush(time.monotonic() + 10)
        state = delivery.state()
    assert sink.got == [_request(number).body for number in range(50)]
    assert (state.sent_requests, state.sent_samples, state.waiting_requests) == (50, 50, 0)
    assert state.last_sent_unix_s == _NOW_S
    assert list(folder.iterdir()) == []


def test_what_waits_is_private_and_survives_its_process(tmp_path: Path, log: Log) -> None:
    # GIVEN a back-end that is away, and an agent that is killed
    folder = tmp_path / "spool"
    with _delivery(_Sink(_is_away), folder, log) as delivery:
        delivery.put(map(_request, range(3)))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    (folder / "7.new").write_bytes(b"half a request")
    # WHEN it is started again
    sink = _Sink(_takes)
    with _delivery(sink, folder, log) as delivery:
        delivery.put([_request(3)])
        assert delivery.flush(time.monotonic() + 10)
    # THEN all of them come, in order, and nothing else does.
    assert sink.got == [_request(number).body for number in range(4)]
    assert list(folder.iterdir()) == []


def test_a_back_end_that_was_away_gets_everything_once(tmp_path: Path, log: Log) -> None:
    # GIVEN a back-end that fails each request twice
    tries: Counter[bytes] = Counter()

    def fails_twice(request: Request) -> Counter[str]:
        tries[request.body] += 1
        if tries[request.body] < 3:
            raise SinkAway("503")
        return Counter()

    sink = _Sink(fails_twice)
    with _delivery(sink, tmp_path / "spool", log) as delivery:
        delivery.put(map(_request, range(5)))
        wait_until(lambda: not delivery.state().waiting_requests)
        state = delivery.state()
    assert sink.got == [_request(number).body for number in range(5)]
    assert (state.retries, state.dropped_samples, state.why_away) == (10, {}, "")
    # AND the log has a line or two for it, not ten.
    said = (tmp_path / "log").read_text()
    assert 1 <= said.count("is away: 503") <= 2


def _takes_some(request: Request) -> Counter[str]:
    """Takes 5 samples of the first request, refuses 2, and wants 3 of them again."""
    if request.body == b"0000":
        raise SinkAway("429", rest=Rest(Request(b"rest", 0, 3), Counter(quota=2)))
    return Counter()


def test_what_a_back_end_has_taken_of_a_request_is_not_sent_again(tmp_path: Path, log: Log) -> None:
    # GIVEN a back-end that takes some of a request, refuses some, and wants the rest again
    sink = _Sink(_takes_some)
    with _delivery(sink, tmp_path / "q", log) as delivery:
        delivery.put([_request(0, 10), _request(1, 1)])
        # WHEN all was sent THEN the rest was, alone and in its place, and all samples are counted
        wait_until(lambda: delivery.state().waiting_requests == 0)
        state = delivery.state()
    assert sink.got == [b"rest", b"0001"]
    assert state.sent_samples == 5 + 3 + 1
    assert state.dropped_samples == {"refused in part": 2}
    assert state.waiting_bytes == 0
    assert not [*(tmp_path / "q").glob("*.request*")]


def test_what_is_left_of_a_request_outlives_the_agent(tmp_path: Path, log: Log) -> None:
    # GIVEN a back-end that has taken some of a request, and takes no more
    def is_away_then(request: Request) -> Counter[str]:
        if request.body == b"rest":
            raise SinkAway("503")
        return _takes_some(request)

    with _delivery(_Sink(is_away_then), tmp_path / "q", log) as delivery:
        delivery.put([_request(0, 10)])
        wait_until(lambda: delivery.state().why_away == "503")
    # WHEN another agent goes on THEN it sends what is left
    sink = _Sink(_takes_some)
    with _delivery(sink, tmp_path / "q", log) as delivery:
        assert delivery.flush(time.monotonic() + 10)
        assert delivery.state().sent_samples == 3
    assert sink.got == [b"rest"]


def test_whoever_takes_a_queue_over_loses_nothing_of_what_is_left(tmp_path: Path, log: Log) -> None:
    # GIVEN a queue that is closed while a request of it is on its way
    asked, goes_on = threading.Event(), threading.Event()

    def waits(request: Request) -> Counter[str]:
        asked.set()
        goes_on.wait(10)
        return _takes_some(request)

    with _delivery(_Sink(waits), tmp_path / "q", log) as before:
        before.put([_request(0, 10)])
        assert asked.wait(10)
        before.close()
        sink = _Sink(_takes)
        after = Delivery(sink, tmp_path / "q", 1 << 20, log, lambda: _NOW_S, before=before)
        # WHEN the back-end has taken some of it THEN who goes on sends all that may be missing
        after.start()
        goes_on.set()
        assert after.flush(time.monotonic() + 10)
        after.close()
    assert sink.got == [b"0000"]


def test_without_room_for_what_is_left_all_is_sent_again(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bytes] = []

    def twice(request: Request) -> Counter[str]:
        tries.append(request.body)
        return _takes_some(request) if len(tries) == 1 else Counter()

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with _delivery(_Sink(twice), tmp_path / "q", log, starts=False) as delivery:
        delivery.put([_request(0, 10)])
        monkeypatch.setattr(delivery, "_write", is_full)
        delivery.start()
        wait_until(lambda: delivery.state().waiting_requests == 0)
        assert delivery.state().sent_samples == 10
        assert not delivery.state().dropped_samples
    assert tries == [b"0000", b"0000"]


def test_a_back_end_says_when_to_come_again(tmp_path: Path, log: Log) -> None:
    asked: list[float] = []

    def later(request: Request) -> Counter[str]:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise SinkAway("429", retry_after_s=0.3)
        return Counter()

    with _delivery(_Sink(later), tmp_path / "spool", log) as delivery:
        delivery.put([_request(0)])
        wait_until(lambda: delivery.state().sent_requests == 1)
    assert asked[1] - asked[0] >= 0.3


def test_waits_grow_and_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 300.0)
    with _delivery(_Sink(_takes), tmp_path / "spool", log, starts=False) as delivery:
        waits = [[delivery._wait_s(failures, None) for _ in range(50)] for failures in range(40)]
    assert all(0.25 <= wait <= 0.75 for wait in waits[0])
    assert all(150 <= wait <= 450 for wait in waits[39])
    assert len({*waits[39]}) > 10


@pytest.mark.parametrize(
    ("asked_s", "least_s", "most_s"),
    [
        (0.0, 0.25, 0.75),
        (-100.0, 0.25, 0.75),
        (0.1, 0.25, 0.75),
        (60.0, 60.0, 90.0),
        (1e9, 3600.0, 5400.0),
    ],
)
def test_agents_that_are_told_the_same_do_not_come_at_once(
    asked_s: float,
    least_s: float,
    most_s: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: Log,
) -> None:
    # GIVEN a back-end that asks for a time, or for none at all
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 300.0)
    with _delivery(_Sink(_takes), tmp_path / "spool", log, starts=False) as delivery:
        # WHEN a thousand agents are told so
        waits = sorted(delivery._wait_s(0, asked_s) for _ in range(1000))
    # THEN none comes sooner than that, nor at once, and they are spread over the time.
    assert least_s <= waits[0] and waits[-1] <= most_s
    tenth = (most_s - least_s) / 10
    assert max(sum(at <= wait < at + tenth for wait in waits) for at in waits) < 300


def test_a_back_end_that_asks_for_no_time_is_asked_less_and_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log
) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 300.0)
    with _delivery(_Sink(_takes), tmp_path / "spool", log, starts=False) as delivery:
        assert delivery._wait_s(12, 0.0) >= 150


def test_who_flushes_does_not_come_sooner_than_a_back_end_asks(tmp_path: Path, log: Log) -> None:
    # GIVEN a back-end that asks for an hour
    asked: list[bytes] = []

    def later(request: Request) -> Counter[str]:
        asked.append(request.body)
        raise SinkAway("429", retry_after_s=3600.0)

    with _delivery(_Sink(later), tmp_path / "spool", log) as delivery:
        delivery.put([_request(0)])
        wait_until(lambda: delivery.state().retries == 1)
        # WHEN an agent that ends flushes THEN it is not asked, and nobody waits for it.
        begun_s = time.monotonic()
        assert not delivery.flush(begun_s + 60)
        assert time.monotonic() - begun_s < 30
    assert asked == [_request(0).body]


def test_what_is_refused_is_not_sent_again(tmp_path: Path, log: Log) -> None:
    asked: list[bytes] = []

    def refuses_first(request: Request) -> Counter[str]:
        asked.append(request.body)
        if len(asked) == 1:
            raise SinkRefused("labels: 17 are too many", "400 Bad Request")
        return Counter({"too old": 2}) if len(asked) == 2 else Counter()

    counts = Counts()
    with _delivery(_Sink(refuses_first), tmp_path / "spool", log, counts=counts) as delivery:
        delivery.put(_request(number, samples=10) for number in range(3))
        assert delivery.flush(time.monotonic() + 10)
        state = delivery.state()
        # THEN it is told once what was lost, by reason,
        assert counts.take_dropped() == {
            "refused: 400 Bad Request": 10,
            "refused in part": 2,
        }
        assert counts.take_dropped() == {}
    # AND each was asked about once.
    assert asked == [_request(number).body for number in range(3)]
    assert state.sent_samples == 18


def test_a_sink_that_fails_oddly_stops_neither_itself_nor_others(tmp_path: Path, log: Log) -> None:
    def breaks(request: Request) -> Counter[str]:
        if request.body == _request(0).body:
            raise ZeroDivisionError("oops")
        return Counter()

    odd, other = _Sink(breaks), _Sink(_takes)
    with (
        _delivery(odd, tmp_path / "odd", log) as one,
        _delivery(other, tmp_path / "other", log) as another,
    ):
        one.put(map(_request, range(2)))
        another.put(map(_request, range(2)))
        wait_until(lambda: one.state().sent_requests == 1 and another.state().sent_requests == 2)
        assert one.state().dropped_samples == {"cannot be sent: ZeroDivisionError": 1}


def test_a_sink_that_hangs_stops_no_other(tmp_path: Path, log: Log) -> None:
    released = threading.Event()

    def hangs(_request: Request) -> Counter[str]:
        released.wait(60)
        return Counter()

    with (
        _delivery(_Sink(hangs), tmp_path / "hangs", log) as one,
        _delivery(_Sink(_takes), tmp_path / "other", log) as other,
    ):
        one.put(map(_request, range(3)))
        other.put(map(_request, range(3)))
        assert other.flush(time.monotonic() + 10)
        # Flushing waits no longer than it is told to.
        assert not one.flush(time.monotonic() + 0.05)
        released.set()


def test_the_oldest_is_dropped_when_too_much_waits(tmp_path: Path, log: Log) -> None:
    # GIVEN room for three requests of four bytes
    folder = tmp_path / "spool"
    with _delivery(_Sink(_is_away), folder, log, 12, starts=False) as delivery:
        delivery.put(_request(number, samples=number) for number in range(8))
        state = delivery.state()
    assert (state.waiting_requests, state.waiting_bytes) == (3, 12)
    assert state.dropped_samples == {"the spool is full": 0 + 1 + 2 + 3 + 4}
    sink = _Sink(_takes)
    with _delivery(sink, folder, log, 12) as delivery:
        assert delivery.flush(time.monotonic() + 10)
    assert sink.got == [_request(number).body for number in (5, 6, 7)]


def test_what_a_back_end_would_refuse_for_its_age_is_not_sent(tmp_path: Path, log: Log) -> None:
    sink = _Sink(_takes, max_age_s=3600)
    with _delivery(sink, tmp_path / "spool", log) as delivery:
        delivery.put(
            [
                _request(0, 7, _NOW_NS - 3601 * 10**9),
                _request(1, 8, _NOW_NS - 3599 * 10**9),
            ]
        )
        assert delivery.flush(time.monotonic() + 10)
        assert delivery.state().dropped_samples == {"older than the back-end takes": 7}
    assert sink.got == [_request(1).body]


def test_a_damaged_file_is_dropped(tmp_path: Path, log: Log) -> None:
    folder = tmp_path / "spool"
    with _delivery(_Sink(_is_away), folder, log, starts=False) as delivery:
        delivery.put(map(_request, range(3)))
    first, second, _ = sorted(folder.iterdir())
    first.write_bytes(b"xxxx")
    os.truncate(second, 2)
    sink = _Sink(_takes)
    with _delivery(sink, folder, log) as delivery:
        assert delivery.flush(time.monotonic() + 10)
        assert delivery.state().dropped_samples == {"refused: its file is damaged": 2}
    assert sink.got == [_request(2).body]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_what_cannot_be_read_for_a_moment_waits(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    # GIVEN a disk or a process that fails a few reads
    read, failures = Path.read_bytes, iter(range(3))

    def read_bytes(path: Path) -> bytes:
        if next(failures, None) is not None:
            raise OSError(code, os.strerror(code))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    sink = _Sink(_takes)
    with _delivery(sink, tmp_path / "spool", log) as delivery:
        delivery.put(map(_request, range(5)))
        # THEN all is sent all the same.
        wait_until(lambda: delivery.state().sent_requests == 5)
        assert delivery.state().dropped_samples == {}
    assert sink.got == [_request(number).body for number in range(5)]


def test_a_want_of_descriptors_drops_nothing_however_long_it_lasts(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = _Sink(_takes)
    with _delivery(sink, tmp_path / "spool", log) as delivery:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", _no_descriptor)
            delivery.put(map(_request, range(5)))
            wait_until(lambda: delivery.state().retries > 2 * module._TRIES_OF_ODD)
            assert "cannot be read: Too many open files" in delivery.state().why_away
        wait_until(lambda: delivery.state().sent_requests == 5)
        assert delivery.state().dropped_samples == {}
    assert sink.got == [_request(number).body for number in range(5)]


def _no_descriptor(_path: Path) -> bytes:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_file_that_is_gone_is_not_tried_again(tmp_path: Path, log: Log) -> None:
    folder = tmp_path / "spool"
    sink = _Sink(_takes)
    with _delivery(sink, folder, log, starts=False) as delivery:
        delivery.put(map(_request, range(3)))
        gone, replaced, _ = sorted(folder.iterdir())
        gone.unlink()
        replaced.unlink()
        replaced.mkdir()
        delivery.start()
        assert delivery.flush(time.monotonic() + 10)
        assert delivery.state().dropped_samples == {"refused: its file cannot be read": 2}
        assert delivery.state().retries == 0
    assert sink.got == [_request(2).body]


def test_a_disk_without_room_costs_what_finds_none(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _delivery(_Sink(_takes), tmp_path / "spool", log) as delivery:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", _no_room)
            delivery.put([_request(0, samples=9)])
        delivery.put([_request(1)])
        assert delivery.flush(time.monotonic() + 10)
        state = delivery.state()
    assert state.dropped_samples == {"no room on the disk": 9}
    assert state.sent_requests == 1


def _no_room(*_: object, **__: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_folder_of_others_is_refused(tmp_path: Path, log: Log) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        Delivery(_Sink(_takes), folder, 100, log)


def test_who_takes_over_a_queue_sends_nothing_twice(tmp_path: Path, log: Log) -> None:
    # GIVEN a request that is on its way
    released, asked = threading.Event(), threading.Event()

    def slow(_request: Request) -> Counter[str]:
        asked.set()
        assert released.wait(60)
        return Counter()

    old, new, folder = _Sink(slow), _Sink(_takes), tmp_path / "spool"
    with _delivery(old, folder, log) as delivery:
        delivery.put(map(_request, range(2)))
        assert asked.wait(60)
        # WHEN its queue is closed, its answer comes, and another one goes on
        threading.Timer(0.05, released.set).start()
        delivery.close(60)
    with _delivery(new, folder, log) as delivery:
        assert delivery.flush(time.monotonic() + 10)
    # THEN each came once.
    assert old.got == [_request(0).body]
    assert new.got == [_request(1).body]


@pytest.mark.parametrize(
    ("answer", "bytes_max", "old_got", "new_got", "dropped"),
    [
        (_takes, 1 << 20, [0], [1, 2], {}),
        (_is_away, 1 << 20, [], [0, 1, 2], {}),
        (_takes, 8, [0], [2], {"the spool is full": 1}),  # what is on its way is not dropped
    ],
)
def test_a_queue_is_taken_over_while_a_request_is_on_its_way(
    tmp_path: Path,
    log: Log,
    answer: Callable[[Request], Counter[str]],
    bytes_max: int,
    old_got: list[int],
    new_got: list[int],
    dropped: dict[str, int],
) -> None:
    # GIVEN a request that is on its way, and one that waits
    released, asked = threading.Event(), threading.Event()

    def slow(request: Request) -> Counter[str]:
        asked.set()
        assert released.wait(60)
        return answer(request)

    old, new, folder = _Sink(slow), _Sink(_takes), tmp_path / "spool"
    counts = Counts()
    before = Delivery(old, folder, 1 << 20, log, lambda: _NOW_S, counts)
    before.start()
    before.put(map(_request, range(2)))
    assert asked.wait(60)
    # WHEN its queue is closed, and another one has the directory, which gets a third
    before.close()
    delivery = Delivery(new, folder, bytes_max, log, lambda: _NOW_S, counts, before)
    delivery.start()
    delivery.put([_request(2)])
    assert new.got == []
    # THEN that waits for the answer, and each request comes once, in order.
    released.set()
    assert delivery.flush(time.monotonic() + 10)
    delivery.close(10)
    assert old.got == [_request(number).body for number in old_got]
    assert new.got == [_request(number).body for number in new_got]
    state = delivery.state()
    assert (state.sent_requests, state.dropped_samples) == (len(old_got + new_got), dropped)
    assert (state.waiting_requests, state.waiting_bytes) == (0, 0)
    assert list(folder.iterdir()) == []


def test_a_number_that_is_too_large_keeps_no_request_from_being_sent(
    tmp_path: Path, log: Log
) -> None:
    # GIVEN a request with more samples than there can be, as processes may lie
    folder = tmp_path / "spool"
    with _delivery(_Sink(_is_away), folder, log, starts=False) as delivery:
        delivery.put([_request(0, samples=1 << 70)])
    # WHEN the agent is started again THEN it finds it
    sink = _Sink(_takes)
    with _delivery(sink, folder, log) as delivery:
        assert delivery.flush(time.monotonic() + 10)
    assert sink.got == [_request(0).body]


def test_a_stretch_is_dropped_as_a_whole(tmp_path: Path, log: Log) -> None:
    # GIVEN a spool with room for five requests, and stretches of three, while nobody listens
    folder = tmp_path / "spool"
    stretches = [_request(n, 1, _NOW_NS + n // 3) for n in range(9)]
    size = 5 * len(stretches[0].body)
    with _delivery(_Sink(_is_away), folder, log, size, starts=False) as delivery:
        delivery.put(stretches)
        assert delivery.state().dropped_samples == {"the spool is full": 6}
    # THEN what is left of each is all of it
    sink = _Sink(_takes)
    with _delivery(sink, folder, log) as delivery:
        assert delivery.flush(time.monotonic() + 10)
    assert sink.got == [request.body for request in stretches[6:]]


def test_a_stretch_that_finds_no_room_leaves_no_part(tmp_path: Path, log: Log) -> None:
    stretch = [_request(n, 1, _NOW_NS) for n in range(9)]
    size = 5 * len(stretch[0].body)
    folder = tmp_path / "spool"
    with _delivery(_Sink(_is_away), folder, log, size, starts=False) as delivery:
        delivery.put(stretch)
        assert delivery.state().dropped_samples == {"the spool is full": 9}
        delivery.put([_request(9)])
        assert delivery.state().waiting_requests == 1


def test_reasons_have_no_words_of_a_back_end(tmp_path: Path, log: Log) -> None:
    """Each is a metric for ever."""
    answers: Iterator[str] = iter(f"profile {n} \x1b[31m{'x' * 10_000}" for n in range(100))

    def refuses(_request: Request) -> Counter[str]:
        raise SinkRefused(next(answers), "400 Bad Request")

    def fails(_request: Request) -> Counter[str]:
        raise ValueError(next(answers))

    def takes_a_part(_request: Request) -> Counter[str]:
        return Counter({next(answers): 2})

    reasons: set[str] = set()
    for answer in (refuses, fails, takes_a_part):
        with _delivery(_Sink(answer), tmp_path / answer.__name__, log) as delivery:
            delivery.put(_request(number, samples=3) for number in range(4))
            wait_until(lambda delivery=delivery: not delivery.state().waiting_requests)
            reasons |= {*delivery.state().dropped_samples}
    assert reasons == {"refused: 400 Bad Request", "cannot be sent: ValueError", "refused in part"}
    lines = (tmp_path / "log").read_text().splitlines()
    assert any("profile" in line for line in lines)
    assert all(len(line) < 1_000 and line.isprintable() for line in lines)


class _Killed(BaseException):
    """Ends a process at once, as far as it goes within one."""


@pytest.mark.parametrize("moment", range(1, 40))
def test_a_stretch_comes_once_whenever_an_agent_is_killed(
    moment: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log
) -> None:
    """It is given again by the next, which does not know how far the first has come."""
    folder = tmp_path / "spool"
    stretch = [_request(n, 1, _NOW_NS) for n in range(3)]
    # GIVEN an agent that is killed at some change of a file
    left = [moment]

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def done(*words: object, **more: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise _Killed
            return change(*words, **more)

        return done

    sink = _Sink(_takes)
    with _delivery(sink, folder, log, starts=False) as delivery:
        delivery.put([_request(9, 1, _NOW_NS - 1)], "before")
        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "write_text"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            with suppress(_Killed):
                delivery.put(iter(stretch), "this")
    was_killed = left[0] <= 0
    # WHEN the next one is given the same
    with _delivery(sink, folder, log) as delivery:
        delivery.put(iter(stretch), "this")
        wait_until(lambda: not delivery.state().waiting_requests)
        delivery.put([_request(10)], "after")
        wait_until(lambda: not delivery.state().waiting_requests)
    # THEN each request came once, in order
    assert sink.got == [_request(n).body for n in (9, 0, 1, 2, 10)]
    assert {path.name for path in folder.iterdir()} == {"queued"}
    assert was_killed or moment > 7


def test_what_was_sent_before_an_agent_was_killed_is_not_sent_again(
    tmp_path: Path, log: Log
) -> None:
    stretch = [_request(n, 1, _NOW_NS) for n in range(3)]
    sink = _Sink(_takes)
    for _ in range(2):
        with _delivery(sink, tmp_path / "spool", log) as delivery:
            delivery.put(iter(stretch), "this")
            wait_until(lambda delivery=delivery: not delivery.state().waiting_requests)
    assert sink.got == [request.body for request in stretch]


def test_a_stretch_that_cannot_be_encoded_leaves_no_part(tmp_path: Path, log: Log) -> None:
    def broken() -> Iterator[Request]:
        yield _request(0)
        raise ValueError("no words for it")

    folder = tmp_path / "spool"
    with _delivery(_Sink(_is_away), folder, log, starts=False) as delivery:
        with pytest.raises(ValueError, match="no words"):
            delivery.put(broken(), "this")
        assert delivery.state().waiting_requests == 0
        assert list(folder.iterdir()) == []
