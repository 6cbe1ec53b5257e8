# SPDX-License-Identifier: Apache-2.0
"""Names of the containers of rootless engines, from the files of the users who run these.

A user can put anything there: a file that never opens, a link to another's, a list without an end,
a hundred thousand changes a second. So each path is opened by the `opener`, which can be killed and
which no link leads out of the user's own directory; what is not a regular file of that very user on
a local file system is not read, and nothing that is larger than a bound. What is found is told of
that user's containers only. Reading takes a share of a CPU for each user. A user with a path that
does not open in time is left alone for a while, and in the end for good.

Only places that engines choose by themselves are known: a user's own XDG_DATA_HOME and storage.conf
are not read. Labels are not taken: rules of the agent go by these.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from aiflame.agent.fleet.engine_watch import CHANGES
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.processes.container_names import (
    DOCKER_STATE,
    STORAGE_LISTS,
    EngineFacts,
    docker_facts,
    is_container_id,
    listed_facts,
)

# storage.conf(5), rootless: below XDG_DATA_HOME and below XDG_RUNTIME_DIR.
_GRAPH_ROOT, _RUN_ROOT = ".local/share/containers/storage", "containers"
# Those that a user may have, of containers/storage's drivers.
_DRIVERS = ("overlay", "vfs", "btrfs")
_DOCKER_CONTAINERS = ".local/share/docker/containers"

# Of a file: about 1 KB for each container. What JSON of this size becomes takes 15 MB at most.
_MAX_BYTES = 512 << 10
# Of a user: the newest ones.
_MAX_KNOWN = 256
_MAX_LISTED = 4096
# As labels have it at most.
_MAX_TEXT = 253
# Who runs containers at a time. Each has an inotify instance, of which a user has 128 (root, here).
_MAX_USERS = 32
# What reading for one user may take of one CPU, and how often it is done at most.
_READING_SHARE = 0.05
_LEAST_REST_S = 0.02
_ENDING_S = 2.0
# A disk may be slow once; a file system that is served to be waited for is so each time. Each time
# costs others a second.
_PAUSE_S = 600.0
_MOST_MISSES = 3
# 16,384 events wait at most (fs.inotify.max_queued_events), of 272 bytes; a user may make more
# meanwhile.
_BUFFER_BYTES, _MAX_DRAINED = 1 << 16, 128

_libc = ctypes.CDLL(None, use_errno=True)


def home_of(uid: int) -> str:
    """Returns a user's home directory, "" for none."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


@dataclass(slots=True)
class _User:
    uid: int
    inotify: int = -1
    home: str | None = None  # not looked for yet
    known: OrderedDict[str, EngineFacts] = field(default_factory=OrderedDict)
    is_due: bool = True
    ready_s: float = 0.0
    misses: int = 0


class RootlessEngines:
    """Keeps what rootless engines tell, in a thread that runs once a user's container was seen.

    Args:
        home: Returns the home directory of a user.
        run: Where the runtime directories of users are.
    """

    def __init__(self, home: Callable[[int], str] = home_of, run: Path = Path("/run/user")) -> None:
        self._home_of = home
        self._run_directory = run
        self._users: OrderedDict[int, _User] = OrderedDict()
        self._lock = threading.Lock()
        self._opener = Opener()
        self._wakes, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def facts_of(self, uid: int, ids: Iterable[str]) -> dict[str, EngineFacts]:
        """Returns what is known of containers by now; what is not is looked for, without waiting.

        Args:
            uid: Of the user whose they are.
            ids: 64 hex digits each.
        """
        wanted = [*ids]
        with self._lock:
            user = self._users.setdefault(uid, _User(uid))
            self._users.move_to_end(uid)
            found = {key: user.known[key] for key in wanted if key in user.known}
            user.is_due |= len(found) < len(wanted)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rootless", daemon=True)
                self._thread.start()
        self._signal()
        return found

    def stop(self) -> None:
        """Ends the thread, and what opens files for it."""
        self._is_stopped = True
        self._signal()
        if self._thread is not None:
            self._thread.join(_ENDING_S)  # it may wait for whoever knows of users
        self._opener.close()

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is to wake up already
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        while not self._is_stopped:
            users, changed = self._wait()
            now_s = time.monotonic()
            for user in users:
                if user.ready_s <= now_s and (user.is_due or user.inotify in changed):
                    self._look(user)
        for user in self._users.values():
            _close(user)

    def _wait(self) -> tuple[list[_User], set[int]]:
        """Waits until there is something to do; returns the users, and whose files changed."""
        with self._lock:
            while len(self._users) > _MAX_USERS:
                _close(self._users.popitem(last=False)[1])
            users = [user for user in self._users.values() if user.misses < _MOST_MISSES]
        now_s = time.monotonic()
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        rests_s = [user.ready_s - now_s for user in users if user.ready_s > now_s]
        for user in users:
            if user.ready_s <= now_s and user.inotify >= 0:
                poll.register(user.inotify, select.POLLIN)
        changed = {fd for fd, _ in poll.poll(1000 * min(rests_s) if rests_s else None)}
        if self._wakes in changed:
            _drain(self._wakes)
        return users, changed

    def _look(self, user: _User) -> None:
        """Reads all that there is of a user, and has changes told."""
        begun_s = time.thread_time()
        user.is_due = False
        try:
            if user.home is None:
                user.home = self._home_of(user.uid)
                user.inotify = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            _drain(user.inotify)  # before: what changes from now on is told
            for container_id, facts in (*self._of_podman(user), *self._of_docker(user)):
                self._take(user, container_id, facts)
        except Exception:  # whatever it is, it is of one user: others keep their names
            self._miss(user)
            return
        taken_s = time.thread_time() - begun_s
        user.ready_s = time.monotonic() + max(taken_s / _READING_SHARE, _LEAST_REST_S)

    def _miss(self, user: _User) -> None:
        """Leaves a user alone for a while."""
        user.is_due = True
        user.ready_s = time.monotonic() + _PAUSE_S
        # This one would not try again what has got nowhere.
        self._opener.close()
        self._opener = Opener()
        if user.misses + 1 == _MOST_MISSES:
            _close(user)
        user.misses += 1

    def _take(self, user: _User, container_id: str, facts: EngineFacts) -> None:
        name, image = facts.name[:_MAX_TEXT], facts.image[:_MAX_TEXT]
        with self._lock:
            user.known[container_id] = replace(facts, name=name, image=image, labels=())
            user.known.move_to_end(container_id)
            while len(user.known) > _MAX_KNOWN:
                user.known.popitem(last=False)

    def _of_podman(self, user: _User) -> Iterator[tuple[str, EngineFacts]]:
        run = str(self._run_directory / str(user.uid))
        for root, storage in ((user.home, _GRAPH_ROOT), (run, _RUN_ROOT)):
            if not root or not self._watch(user, root, storage):
                continue
            for driver in (f"{storage}/{name}-containers" for name in _DRIVERS):
                if self._watch(user, root, driver):
                    for name in STORAGE_LISTS:
                        yield from listed_facts(self._text(user, root, f"{driver}/{name}")).items()

    def _of_docker(self, user: _User) -> Iterator[tuple[str, EngineFacts]]:
        if not user.home:
            return
        for container_id in self._docker_ids(user, user.home):
            folder = f"{_DOCKER_CONTAINERS}/{container_id}"
            # Before it is read, since its file comes after it.
            if container_id not in user.known and self._watch(user, user.home, folder):
                facts = docker_facts(self._text(user, user.home, f"{folder}/{DOCKER_STATE}"))
                if facts is not None:
                    yield container_id, facts

    def _docker_ids(self, user: _User, home: str) -> list[str]:
        if not self._watch(user, home, _DOCKER_CONTAINERS):
            return []
        with self._directory(home, _DOCKER_CONTAINERS) as path, contextlib.suppress(OSError):
            with os.scandir(path) as entries:
                names = [entry.name for entry in islice(entries, _MAX_LISTED)]
            return [name for name in names if is_container_id(name)][:_MAX_KNOWN]
        return []

    def _watch(self, user: _User, root: str, path: str) -> bool:
        """Has changes in a directory told; returns whether it is there."""
        try:
            with self._directory(root, path) as found:
                if user.inotify >= 0:
                    _libc.inotify_add_watch(user.inotify, os.fsencode(found), CHANGES)
        except TimeoutError:
            raise
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _directory(self, root: str, path: str) -> Iterator[str]:
        fd = self._opener.directory(root, path).fd
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def _text(self, user: _User, root: str, path: str) -> bytes:
        """Returns what a file of the user's has, none of any other, or of one that is too large.

        Raises:
            TimeoutError: It does not open.
        """
        try:
            file = self._opener.beneath(root, path, follows_last=False)
        except TimeoutError:
            raise
        except OSError:  # it is not there
            return b""
        try:
            if not file.is_local or file.owner_uid != user.uid:
                return b""
            text = os.pread(file.fd, _MAX_BYTES + 1, 0)
        except OSError:
            return b""
        finally:
            os.close(file.fd)
        return text if len(text) <= _MAX_BYTES else b""


def _close(user: _User) -> None:
    if user.inotify >= 0:
        os.close(user.inotify)
        user.inotify = -1


def _drain(fd: int) -> None:
    with contextlib.suppress(OSError):  # there is no more
        for _ in range(_MAX_DRAINED):
            os.read(fd, _BUFFER_BYTES)
