# SPDX-License-Identifier: Apache-2.0
"""Names stretches of a host's recording, divides them by labels, and sends them.

Forked by the collector's fork server for `naming`, with a socket as standard input, and another one
to that server. Windows come from the segments of stretches; the socket tells when there are more of
them, and brings the files that they mention. It ends when the agent does.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from aiflame.agent.allocator import PagesOfFiles, give_back_freed_memory, map_large_blocks
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.errors import AiflameError, DiskFull
from aiflame.agent.fleet.config import AgentConfig
from aiflame.agent.fleet.delivery import Counts, Delivery
from aiflame.agent.fleet.encoding import Encoder, NamedStretch, NotEncoded, Summary
from aiflame.agent.fleet.fork import ForkEnded
from aiflame.agent.fleet.labelling import Labelling, LeftOut
from aiflame.agent.fleet.labels import bounded_text
from aiflame.agent.fleet.log import Log, words_of
from aiflame.agent.fleet.naming_messages import (
    TO_NAMING,
    CgroupPathsLeftOut,
    CgroupsLeftOut,
    Configure,
    DoLess,
    EndBy,
    LookAtCgroups,
    Lost,
    NamingReport,
    NoRoom,
    ReleaseMemory,
    SinkState,
    StretchBegun,
    StretchDone,
    StretchEnded,
    StretchLeft,
    StretchLost,
    ToNaming,
)
from aiflame.agent.fleet.sinks import Sink, sink_module
from aiflame.agent.fleet.spool import LEFT, Spool
from aiflame.agent.fleet.stretch_naming import DATABASE, Lateness, StretchNaming, cost_of
from aiflame.agent.fleet.stretches import TRIES, count_try, forget_tries, is_done, mark_done
from aiflame.agent.inspector.fork_server import ForkRequests
from aiflame.agent.limits import is_disk_full
from aiflame.agent.losses import KINDS_BY_NAME, LossKind
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Process
from aiflame.agent.sinks.capture_worker import messages
from aiflame.agent.sinks.captures import CaptureFiles
from aiflame.agent.sinks.naming_messages import Windows
from aiflame.agent.sinks.rebuilt import capture_of_windows
from aiflame.agent.sinks.segments import RecordedWindows
from aiflame.agent.sinks.written import Naming
from aiflame.agent.symbolize.files import GivenFiles
from aiflame.agent.symbolize.known_names import KnownNames
from aiflame.agent.symbols.file_facts import facts_for_names
from aiflame.agent.symbols.kallsyms import KernelSymbols
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir
from aiflame.agent.typed_messages import encode

_SPOOL = "spool"
_LOCK = "naming.lock"
# A process that was killed ends within milliseconds; one that reads a broken disk never does.
_OTHERS_S, _LOCK_LOOK_S = 60.0, 0.1
# An answer mostly comes within this; for one that does not, the next queue waits by itself, since
# sinks may wait for a minute.
_ANSWER_S = 0.5
# Of paths in one report, which has 64 KB in all: one of 4,096 characters may be 24 KB there.
_PATHS_BYTES = 1 << 15
# What kills the process that encodes may be over then, as where memory is short; an agent that ends
# has 10 s for all.
_ENCODE_AGAIN_S = (1.0, 4.0)
# Why samples of a sink are dropped that could not be made.
_NOT_MADE = "the sink does not work"
# What is left for ending, of the time until the end.
_ENDING_S = 0.5


class _Untold(NamedTuple):
    """What no stretch has told of yet.

    Attributes:
        dropped: Samples, by sink and reason.
        lost: Of earlier stretches.
        of_collector: What the collector has lost.
    """

    dropped: Counter[str]
    lost: Counter[LossKind]
    of_collector: Counter[LossKind]


class _Worker:
    """All that one agent sends."""

    def __init__(
        self,
        directory: Path,
        channel: socket.socket,
        naming: Naming,
        files: GivenFiles,
        lateness: Lateness,
        log: Log,
    ) -> None:
        self._spool = Spool(directory / _SPOOL)
        self._dropped: Counter[str] = Counter()  # of destinations that are configured no more
        self._lost: Counter[LossKind] = Counter()  # of earlier stretches
        self._lost_by_collector: Counter[LossKind] = Counter()
        self._channel = channel
        self._naming = naming
        self._files = files
        self._lateness = lateness
        self._log = log
        self._config: AgentConfig | None = None
        self._labelling: Labelling | None = None
        self._deliveries: dict[str, Delivery] = {}
        self._closing: dict[Path, Delivery] = {}  # by directory: those with a request on its way
        self._failed: set[str] = set()  # names of sinks that could not be made the last time
        self._counts: defaultdict[str, Counts] = defaultdict(Counts)  # by sink, for good
        self._without_room: deque[Path] = deque()  # stretches for whose captures there was no room
        self._sinks: dict[str, Sink] = {}
        self._stretch: StretchNaming | None = None
        self._until_s: float | None = None
        self._left_out: LeftOut | None = None
        self._pages = PagesOfFiles()

    def take(self, message: ToNaming) -> None:
        """Does what a message says."""
        if isinstance(message, Configure):
            self._configure(message.config)
        elif isinstance(message, StretchBegun):
            naming, files, lateness = self._naming, self._files, self._lateness
            self._stretch = StretchNaming(message.folder, naming, files, lateness, self._log)
        elif isinstance(message, Windows) and self._stretch is not None:
            self._stretch.take(message.count, self._labelling)
            give_back_freed_memory()  # a tenth of what it has, for a millisecond
            self._look_at_cgroups()
        elif isinstance(message, LookAtCgroups):
            self._look_at_cgroups(is_due=True)
        elif isinstance(message, StretchEnded) and self._stretch is not None:
            stretch, self._stretch = self._stretch, None
            self._finish(stretch)
        elif isinstance(message, StretchLeft):
            self._finish_left(message.folder)
        elif isinstance(message, DoLess):
            self._lateness.thrift = message.thrift
            self._lateness.delay_factor = message.delay_factor
        elif isinstance(message, Lost):
            for name, count in message.counts.items():
                self._lost_by_collector[KINDS_BY_NAME[name]] += count
        elif isinstance(message, ReleaseMemory):
            gc.collect()
            give_back_freed_memory()
        elif isinstance(message, EndBy):
            self._until_s = message.until_s

    def _configure(self, config: AgentConfig) -> None:
        """Makes the sinks of a configuration; those that stay as they were go on."""
        old = self._config
        self._config = config
        is_same = old is not None and old.agent == config.agent
        if self._labelling is None:
            self._labelling = Labelling(config.agent)
        elif not is_same:
            self._labelling.use(config.agent)
        for name in [*self._sinks]:
            if old is not None and _made_of(old, name) == _made_of(config, name):
                continue
            del self._sinks[name]
            delivery = self._deliveries.pop(name, None)
            if delivery is not None:
                delivery.close(_ANSWER_S)
                self._closing[delivery.folder] = delivery
        self._make_sinks(config)
        self._drop_unconfigured()

    def _make_sinks(self, config: AgentConfig) -> None:
        """Makes the sinks that are not there: they are new, or something was away the last time."""
        for name, settings in config.sinks.items():
            if name in self._sinks:
                continue
            try:
                sink = sink_module(name).make(settings, config.agent.node_name)
                if not isinstance(sink, CaptureFiles):
                    for module in sink.modules:  # each fork would import them for itself
                        with suppress(Exception):  # encoding will say so
                            importlib.import_module(module)
                    folder = self._spool.folder(name, settings)
                    size = config.agent.spool_size
                    delivery = Delivery(
                        *(sink, folder, size, self._log),
                        counts=self._counts[name],
                        before=self._closing.get(folder),
                    )
                    delivery.start()
                    self._deliveries[name] = delivery
                    self._closing.pop(folder, None)
                self._sinks[name] = sink
            except Exception as error:  # of one sink; the others get theirs
                self._failed.add(name)
                self._log.say_seldom(
                    f"{name} made",
                    f"sink {name} does not work, and is tried again with the next stretch:"
                    f" {words_of(error)}",
                )
            else:
                if name in self._failed:
                    self._failed.remove(name)
                    self._log.say(f"sink {name} works again")

    def _missing(self) -> list[str]:
        """Returns which sinks could not be made."""
        sinks = {} if self._config is None else self._config.sinks
        return [name for name in sinks if name not in self._sinks]

    def _drop_unconfigured(self) -> None:
        """Drops what has waited for long for destinations that are configured no more."""
        config = self._config
        if config is None:
            return
        used = {self._spool.folder(name, settings) for name, settings in config.sinks.items()}
        self._closing = {at: one for at, one in self._closing.items() if not one.is_over}
        used |= self._closing.keys()
        try:
            dropped = self._spool.drop_left(used, config.agent.spool_size)
        except OSError as error:
            self._log.say_seldom("spool", f"the spool: {error}")
            return
        for name, samples in dropped.items():
            self._log.say(f"{samples:,} samples of spool/{name} are dropped: {LEFT}")
            self._dropped[f"{name.rpartition('-')[0]}: {LEFT}"] += samples

    def _look_at_cgroups(self, *, is_due: bool = False) -> None:
        """Tells the collector which cgroups its programs are to leave out.

        Args:
            is_due: As of `Labelling.newly_left_out`.
        """
        if self._labelling is None:
            return
        found = self._labelling.newly_left_out(is_due=is_due)
        if found is not None:
            self._tell_left_out(found)
        if self._labelling.error:
            self._log.say_seldom("kubelet", f"pods have no names: {self._labelling.error}")

    def _tell_left_out(self, found: LeftOut) -> None:
        before = LeftOut() if self._left_out is None else self._left_out
        if self._left_out is None or found.ids != before.ids:
            self._report(CgroupsLeftOut(self._states(), (*sorted(found.ids),)))
        for less in in_parts(sorted(before.paths - found.paths), _PATHS_BYTES):
            self._report(CgroupPathsLeftOut(self._states(), more=(), less=less))
        for more in in_parts(sorted(found.paths - before.paths), _PATHS_BYTES):
            self._report(CgroupPathsLeftOut(self._states(), more=more, less=()))
        self._left_out = found

    def _finish_left(self, folder: Path) -> None:
        """Sends a stretch that another process has left."""
        tries = count_try(folder)
        database = folder / DATABASE
        try:
            database.unlink(missing_ok=True)
            windows = RecordedWindows(folder)
            with_names = tries < TRIES
            capture_of_windows(database, windows, windows.facts, with_names=with_names)
        except Exception as error:  # of one stretch
            self._give_up(folder, error)
            return
        self._send(folder, database, *cost_of(windows))

    def _finish(self, stretch: StretchNaming) -> None:
        try:
            stretch.finish()
        except Exception as error:  # of one stretch
            self._give_up(stretch.folder, error)
            return
        self._send(stretch.folder, stretch.database, stretch.cpu_ns, stretch.rss_bytes)
        while self._without_room and is_done(stretch.folder):  # there is room again
            left = self._without_room.popleft()
            if left.is_dir() and not is_done(left):
                self._finish_left(left)
                break

    def _give_up(self, folder: Path, error: Exception) -> None:
        if isinstance(error, DiskFull):  # its segments are there
            with suppress(OSError):
                (folder / DATABASE).unlink(missing_ok=True)
            self._log.say(f"stretch {folder.name} waits for room: {words_of(error)}")
            self._without_room.append(folder)
            forget_tries(folder)  # which are for what ends this process
            self._report(NoRoom(self._states(), is_disk_full(error)))
            return
        self._log.say(f"stretch {folder.name} is lost: {words_of(error)}")
        mark_done(folder)
        self._lost[LossKind.STRETCHES_LOST] += 1
        self._report(StretchLost(self._states(), folder.name))

    def _send(self, folder: Path, database: Path, cpu_ns: int, rss_bytes: int) -> None:
        """Gives a stretch to all sinks; from then on it is theirs."""
        if self._config is not None:
            self._make_sinks(self._config)
        untold = self._take_untold()
        try:
            named = self._complete(database, cpu_ns, rss_bytes, untold)
            for name, sink in self._sinks.items():
                if isinstance(sink, CaptureFiles):
                    self._keep(name, sink, database, int(folder.name))  # when it began
            summary = self._encode(folder.name, named)
        except Exception as error:  # of one stretch
            # The next one tells of them: a sink that has this one hears of them twice.
            self._dropped.update(untold.dropped)
            self._lost.update(untold.lost)
            self._lost_by_collector.update(untold.of_collector)
            self._give_up(folder, error)
            return
        finally:
            database.unlink(missing_ok=True)
            gc.collect()  # what naming took: 9 MB of a host with 10,000 threads, every minute
            give_back_freed_memory()
            self._pages.give_back()
        for name in self._missing():
            self._counts[name].drop(summary.to_send, _NOT_MADE)
        mark_done(folder)
        containers, unresolved = _counts_of_containers(named.labels)
        self._report(
            StretchDone(
                self._states(),
                folder.name,
                summary.samples,
                summary.duration_ns,
                summary.losses,
                {kind.stored_name: count for kind, count in untold.of_collector.items()},
                containers,
                unresolved,
            )
        )

    def _take_untold(self) -> _Untold:
        """Returns what was lost of other stretches since the last call."""
        self._drop_unconfigured()
        dropped, self._dropped = self._dropped, Counter()
        for name, counts in self._counts.items():
            for reason, samples in counts.take_dropped().items():
                dropped[f"{name}: {reason}"] += samples
        lost, self._lost = self._lost, Counter()
        of_collector, self._lost_by_collector = self._lost_by_collector, Counter()
        return _Untold(dropped, lost, of_collector)

    def _complete(
        self, database: Path, cpu_ns: int, rss_bytes: int, untold: _Untold
    ) -> NamedStretch:
        """Writes what is only known when a stretch is over: also what was lost of others."""
        writer = CaptureWriter(database, is_new=False)
        try:
            writer.put_meta(
                {"complete": 1, "recorder_cpu_ns": cpu_ns, "recorder_peak_rss_bytes": rss_bytes}
            )
            for kind, count in (untold.lost + untold.of_collector).items():
                writer.put("losses", [(kind.stored_name, count, kind.meaning)])
            if untold.dropped:
                kind = LossKind.NOT_DELIVERED
                which = ", ".join(f"{count:,} of {what}" for what, count in untold.dropped.items())
                row = (kind.stored_name, untold.dropped.total(), f"{kind.meaning}: {which}")
                writer.put("losses", [row])
            labels = self._labels(writer.processes())
            if self._labelling is not None:
                more = self._labelling.losses
                writer.put("losses", [(one.name, one.count, one.meaning) for one in more])
                if None in labels:  # of what is left out
                    writer.remove_processes([each is None for each in labels])
                    labels = [each for each in labels if each is not None]
            captures = [sink for sink in self._sinks.values() if isinstance(sink, CaptureFiles)]
            if captures:
                writer.put_labels(labels)  # who keeps the capture
            if not any(sink.has_command_lines for sink in captures):
                writer.remove_command_lines()
            writer.commit()
        finally:
            writer.close()
        node = "" if self._config is None else bounded_text(self._config.agent.node_name)
        return NamedStretch(database, labels, node)

    def _labels(self, processes: Sequence[Process]) -> Sequence[Labels | None]:
        """Asks whose processes are, while it is known."""
        return [None] * len(processes) if self._labelling is None else self._labelling.of(processes)

    def _encode(self, stretch: str, named: NamedStretch) -> Summary:
        """Has all sinks that send requests take a stretch.

        Raises:
            AiflameError: It cannot be read, or no process comes to the end of it.
        """
        left = [*self._deliveries]
        for pause_s in _ENCODE_AGAIN_S:
            try:
                return self._encode_once(stretch, named, left)
            except (ForkEnded, OSError) as error:  # as where memory is short for a moment
                self._log.say_seldom("encode", f"stretch {stretch} is tried again: {error}")
            time.sleep(pause_s)
        return self._encode_once(stretch, named, left)

    def _encode_once(self, stretch: str, named: NamedStretch, left: list[str]) -> Summary:
        with Encoder(named, {name: self._deliveries[name].sink for name in left}) as encoder:
            summary = encoder.summary()
            for name in [*left]:
                self._put(name, encoder, stretch, summary)
                left.remove(name)
            return summary

    def _put(self, name: str, encoder: Encoder, stretch: str, summary: Summary) -> None:
        delivery = self._deliveries[name]
        try:
            if not delivery.put(encoder.requests(name), stretch):
                self._report(NoRoom(self._states(), is_disk_full=True))
        except ForkEnded:
            raise
        except Exception as error:  # of one sink; the others get theirs
            self._log.say_seldom(f"{name} encode", f"sink {name}: {words_of(error)}")
            reason = error.reason if isinstance(error, NotEncoded) else type(error).__name__
            delivery.lose(summary.to_send, f"cannot be encoded: {reason}")

    def _keep(self, name: str, sink: CaptureFiles, database: Path, started_unix_ns: int) -> None:
        try:
            sink.put(database, started_unix_ns)
        except (AiflameError, OSError) as error:
            self._lost[LossKind.CAPTURES_NOT_WRITTEN] += 1
            self._log.say_seldom(
                f"{name} write", f"sink {name}: a capture is lost: {words_of(error)}"
            )

    def _states(self) -> dict[str, SinkState]:
        """Returns how sinks do; what waits on disk for one that could not be made is not known."""
        made = {name: delivery.state() for name, delivery in self._deliveries.items()}
        return {**made, **{name: self._counts[name].state() for name in self._missing()}}

    def _report(self, report: NamingReport) -> None:
        with suppress(OSError):
            self._channel.send(encode(report))

    def finish(self) -> None:
        """Sends what can be sent until the end; the rest waits on disk for the next start."""
        until_s = time.monotonic() if self._until_s is None else self._until_s - _ENDING_S
        flushes = [
            threading.Thread(target=delivery.flush, args=(until_s,), daemon=True)
            for delivery in self._deliveries.values()
        ]
        for flush in flushes:
            flush.start()
        for flush in flushes:
            flush.join()
        for name, delivery in self._deliveries.items():
            delivery.close()
            state = delivery.state()
            self._log.say(
                f"sink {name}: {state.sent_requests:,} requests sent, {state.waiting_requests:,}"
                " wait for the next start"
            )


def _made_of(config: AgentConfig, name: str) -> object:
    """Returns what a sink and its queue are made of: as long as it is the same, they go on."""
    return config.sinks.get(name), config.agent.node_name, config.agent.spool_size


def _counts_of_containers(labels: Sequence[Labels | None]) -> tuple[int, int]:
    """Returns how many containers processes are of, and of how many of these no name is known."""
    named = {one.container_id: bool(one.container) for one in labels if one and one.container_id}
    return len(named), sum(not is_named for is_named in named.values())


def in_parts(texts: Iterable[str], bytes_max: int) -> Iterator[tuple[str, ...]]:
    """Yields texts, so many at once that they fit into a message.

    Args:
        texts: Of which each fits.
        bytes_max: How long those of a part are together, as JSON.
    """
    part: list[str] = []
    size = 0
    for text in texts:
        own = len(json.dumps(text)) + 2
        if part and size + own > bytes_max:
            yield (*part,)
            part, size = [], 0
        part.append(text)
        size += own
    if part:
        yield (*part,)


def run(arguments: Sequence[str]) -> None:
    """Serves one agent.

    Args:
        arguments: Its directory, what helpers may have in bytes, and the descriptor of a socket to
            the fork server.
    """
    directory, (helper_bytes, requests) = Path(arguments[0]), map(int, arguments[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What they mean is the agent's to say; what is started from here heeds them all the same.
        signal.signal(number, lambda *_: None)
    map_large_blocks()
    channel = socket.socket(fileno=os.dup(0))
    log = Log()
    _wait_for_others(directory, channel, log)
    server = ForkRequests(socket.socket(fileno=requests))
    files = GivenFiles()
    with (
        SymbolService(cache_dir(), data_bytes=helper_bytes, server=server) as service,
        closing(facts_for_names(server)) as file_facts,
    ):
        lateness = Lateness()
        known = KnownNames(lambda: _kernel_symbols(directory))
        naming = Naming(files, service, file_facts, lateness.budget_s, known)
        worker = _Worker(directory, channel, naming, files, lateness, log)
        for message in messages(channel, files, TO_NAMING):
            worker.take(message)
            service.poll()
        worker.finish()


def _kernel_symbols(directory: Path) -> KernelSymbols:
    """Returns the kernel's functions, on disk where there is room: a stretch asks for a few."""
    found = KernelSymbols.load()
    with suppress(OSError):
        return found.on_disk(directory)
    return found


def _wait_for_others(directory: Path, channel: socket.socket, log: Log) -> None:
    """Waits until no other process sends what is in a directory: it would come twice.

    That of an agent that was killed ends a moment after it. What is opened here stays open.
    """
    try:
        lock = os.open(directory / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:  # no room for a file, or a disk to be read only: what waits is sent
        log.say(f"{directory / _LOCK} cannot be opened: {error.strerror}")
        return
    until_s = time.monotonic() + _OTHERS_S
    poll = select.poll()
    poll.register(channel, 0)
    while not _try_lock(lock):
        if time.monotonic() >= until_s:
            log.say("an earlier process that sends does not end: what it sends may come twice")
            return
        if poll.poll(1000 * _LOCK_LOOK_S):  # nobody asks any more
            sys.exit(1)


def _try_lock(descriptor: int) -> bool:
    """Takes a lock on a file; returns whether no other process has it."""
    try:
        # A fork of this process does not have it as well, as it would with flock().
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True
