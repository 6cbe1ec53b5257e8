# SPDX-License-Identifier: Apache-2.0
"""Names of the containers of rootless engines, from the files of the users who run these.

A user can put anything there: a file that never opens, a link to another's, a list without an end,
a hundred thousand changes a second. So each path is opened by the `opener`, which can be killed and
which no link leads out of the user's own directory; what is not a regular file of that very user on
a local file system is not read, and nothing that is larger than a bound. What is found is told of
that user's containers only. Reading takes a share of a CPU for each user. A user with a path that
does not open in time is left alone for a while, and in the end for hours.

Engines keep containers where they do so by themselves, and where the user's storage.conf and
daemon.json say, or the machine's storage.conf (`engine_settings`). What users wrote there may name
any directory of the host. So the way to one is walked as the user could: no link on it, each
directory open to all or the user's own, and the last one the user's own. Where a user's processes
have another XDG_CONFIG_HOME or XDG_DATA_HOME cannot be known from files, and is not. Labels are not
taken: rules of the agent go by these.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import select
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from aiflame.agent.fleet.engine_watch import CHANGES
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.processes.container_names import (
    DOCKER_STATE,
    STORAGE_LISTS,
    EngineFacts,
    docker_facts,
    is_container_id,
    listed_facts,
    system_storage_conf,
)
from aiflame.agent.processes.engine_settings import (
    MAX_SETTINGS_BYTES,
    absolute,
    data_root,
    storage_conf,
)

# storage.conf(5), rootless: below XDG_DATA_HOME and below XDG_RUNTIME_DIR.
_GRAPH_ROOT, _RUN_ROOT = ".local/share/containers/storage", "containers"
# Those that a user may have, of containers/storage's drivers.
_DRIVERS = ("overlay", "vfs", "btrfs")
_DOCKER_ROOT, _DOCKER_CONTAINERS = ".local/share/docker", "containers"
# Below XDG_CONFIG_HOME.
_STORAGE_SETTINGS = ".config/containers/storage.conf"
_DOCKER_SETTINGS = ".config/docker/daemon.json"
# On the way to a directory that a user chose: each costs a question to whoever opens it.
_MAX_DEPTH = 32

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
# costs others a second. After so many in a row it is tried again in a few hours.
_PAUSE_S, _LONG_PAUSE_S = 600.0, 4 * 3_600.0
_MOST_MISSES = 3
# A user that the machine does not know may be of a directory service that is not there yet, as at
# the boot.
_ACCOUNT_S = 600.0
# 16,384 events wait at most (fs.inotify.max_queued_events), of 272 bytes; a user may make more
# meanwhile.
_BUFFER_BYTES, _MAX_DRAINED = 1 << 16, 128

_libc = ctypes.CDLL(None, use_errno=True)


class Account(NamedTuple):
    """A user, as the machine knows one; "" for what it does not.

    Attributes:
        name: To log in by.
        home: The home directory.
    """

    name: str = ""
    home: str = ""


def account_of(uid: int) -> Account | None:
    """Returns what the machine knows of a user; None where it does not know it."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return None
    return Account(entry.pw_name, entry.pw_dir)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Directories that settings name, besides those that engines have by themselves; "" for none.

    Attributes:
        graph_root: Of podman's storage library.
        run_root: The same, for what does not outlive the boot.
        docker: Of all that docker has.
    """

    graph_root: str = ""
    run_root: str = ""
    docker: str = ""


class _Folder(NamedTuple):
    """A directory that can be looked into.

    Attributes:
        root: No link leads out of this one.
        prefix: The way from there, with a slash at the end; "" if it is the root.
    """

    root: str
    prefix: str


@dataclass(slots=True)
class _User:
    uid: int
    inotify: int = -1
    account: Account | None = None  # not known
    ask_s: float = 0.0  # from when on it is asked for, by `time.monotonic`
    chosen: _Chosen | None = None  # not looked for yet
    known: OrderedDict[str, EngineFacts] = field(default_factory=OrderedDict)
    is_due: bool = True
    ready_s: float = 0.0
    misses: int = 0

    @property
    def home(self) -> str:
        """Its home directory, "" for none."""
        return "" if self.account is None else self.account.home


class RootlessEngines:
    """Keeps what rootless engines tell, in a thread that runs once a user's container was seen.

    Args:
        account: Returns what the machine knows of a user, None where it does not know it.
        root: Where the machine's own settings and the runtime directories are; another one in
            tests.
    """

    def __init__(
        self, account: Callable[[int], Account | None] = account_of, root: Path = Path("/")
    ) -> None:
        self._account_of = account
        self._root = root
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
            users = [*self._users.values()]
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
            if user.account is None and time.monotonic() >= user.ask_s:
                user.account = self._account_of(user.uid)
                user.ask_s = time.monotonic() + _ACCOUNT_S
            _drain(user.inotify)  # before: what changes from now on is told
            chosen = self._chosen_by(user)
            if chosen == user.chosen:
                podman, docker = self._of_podman(user, chosen), self._of_docker(user, chosen)
                for container_id, facts in (*podman, *docker):
                    self._take(user, container_id, facts)
            else:
                self._begin(user, chosen)
        except Exception:  # whatever it is, it is of one user: others keep their names
            self._miss(user)
            return
        user.misses = 0
        taken_s = time.thread_time() - begun_s
        user.ready_s = time.monotonic() + max(taken_s / _READING_SHARE, _LEAST_REST_S)

    def _begin(self, user: _User, chosen: _Chosen) -> None:
        """Has a user looked at anew, since settings have changed or were not known yet.

        What was watched until then is not any more, or a user who changes them all the time would
        have all the watches that root may have.
        """
        _close(user)
        user.inotify = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        user.chosen, user.is_due = chosen, True

    def _miss(self, user: _User) -> None:
        """Leaves a user alone for a while."""
        user.is_due = True
        # This one would not try again what has got nowhere.
        self._opener.close()
        self._opener = Opener()
        pause_s = _PAUSE_S
        if user.misses + 1 >= _MOST_MISSES:
            pause_s = _LONG_PAUSE_S
            _close(user)
            user.chosen = None
        user.ready_s = time.monotonic() + pause_s
        user.misses += 1

    def _take(self, user: _User, container_id: str, facts: EngineFacts) -> None:
        name, image = facts.name[:_MAX_TEXT], facts.image[:_MAX_TEXT]
        with self._lock:
            user.known[container_id] = EngineFacts(name, image)
            user.known.move_to_end(container_id)
            while len(user.known) > _MAX_KNOWN:
                user.known.popitem(last=False)

    def _chosen_by(self, user: _User) -> _Chosen:
        """Reads settings; has changes in those of the user told."""
        own = storage_conf(self._setting(user, _STORAGE_SETTINGS))
        # storage.conf(5): a user's file takes nothing from the machine's but this.
        graph_root = (
            own.graph_root or own.rootless_path or system_storage_conf(self._root).rootless_path
        )
        name, home = user.account or Account()
        variables = {"HOME": home, "UID": str(user.uid), "USER": name}
        docker = data_root(self._setting(user, _DOCKER_SETTINGS))
        return _Chosen(
            absolute(graph_root, variables), absolute(own.run_root, variables), absolute(docker)
        )

    def _setting(self, user: _User, path: str) -> bytes:
        if not user.home or not self._watch(user, user.home, str(Path(path).parent)):
            return b""
        return self._text(user, user.home, path, MAX_SETTINGS_BYTES)

    def _of_podman(self, user: _User, chosen: _Chosen) -> Iterator[tuple[str, EngineFacts]]:
        run = str(self._root / f"run/user/{user.uid}")
        known = ((user.home, _GRAPH_ROOT), (run, _RUN_ROOT))
        moved = (chosen.graph_root, chosen.run_root)
        for root, prefix in self._folders(user, known, moved):
            for driver in (f"{prefix}{name}-containers" for name in _DRIVERS):
                if self._watch(user, root, driver):
                    for name in STORAGE_LISTS:
                        text = self._text(user, root, f"{driver}/{name}", _MAX_BYTES)
                        yield from listed_facts(text).items()

    def _of_docker(self, user: _User, chosen: _Chosen) -> Iterator[tuple[str, EngineFacts]]:
        known = ((user.home, _DOCKER_ROOT),)
        for root, prefix in self._folders(user, known, (chosen.docker,)):
            containers = f"{prefix}{_DOCKER_CONTAINERS}"
            for container_id in self._docker_ids(user, root, containers):
                folder = f"{containers}/{container_id}"
                # Before it is read, since its file comes after it.
                if container_id not in user.known and self._watch(user, root, folder):
                    text = self._text(user, root, f"{folder}/{DOCKER_STATE}", _MAX_BYTES)
                    facts = docker_facts(text)
                    if facts is not None:
                        yield container_id, facts

    def _docker_ids(self, user: _User, root: str, containers: str) -> list[str]:
        if not self._watch(user, root, containers):
            return []
        with self._directory(root, containers) as path, contextlib.suppress(OSError):
            with os.scandir(path) as entries:
                names = [entry.name for entry in islice(entries, _MAX_LISTED)]
            return [name for name in names if is_container_id(name)][:_MAX_KNOWN]
        return []

    def _folders(
        self, user: _User, known: Collection[tuple[str, str]], chosen: Iterable[str]
    ) -> Iterator[_Folder]:
        """Yields the directories that there are, and has changes in them told.

        Args:
            user: Whose they are.
            known: Root directories of the user's, and ways from there.
            chosen: Paths that settings have, "" for none.
        """
        for root, path in known:
            if root and self._watch(user, root, path):
                yield _Folder(root, f"{path}/")
        # Settings may say what is so anyway.
        left = {path for path in chosen if path} - {f"{root}/{path}" for root, path in known}
        for path in sorted(left):
            with contextlib.ExitStack() as opened:
                if own := self._walk(user, path, opened):
                    _tell(user, own)
                    yield _Folder(own, "")

    def _walk(self, user: _User, path: str, opened: contextlib.ExitStack) -> str:
        """Returns another path of a user's own directory, "" if the user could not get there.

        Each part is looked for in the very directory that the one before it was, so that nothing
        can be put in its place meanwhile. Where the home directory is, the machine says.

        Args:
            user: Who chose it.
            path: Of a directory.
            opened: Closes what the other path goes by.

        Raises:
            TimeoutError: It does not open.
        """
        home = user.home.rstrip("/")
        is_at_home = bool(home) and path.startswith(f"{home}/")
        root, way = (home, path[len(home) :]) if is_at_home else ("/", path)
        parts = way[1:].split("/")
        if len(parts) > _MAX_DEPTH:
            return ""
        owner_uid = -1
        try:
            for part in parts:
                found = self._opener.directory(root, part)
                opened.callback(os.close, found.fd)
                # By this process's number: another one looks there.
                root, owner_uid = f"/proc/{os.getpid()}/fd/{found.fd}", found.owner_uid
                needed = stat.S_IXUSR if owner_uid == user.uid else stat.S_IXOTH
                if not os.fstat(found.fd).st_mode & needed:
                    return ""
        except TimeoutError:
            raise
        except OSError:  # there is none, or a link
            return ""
        return root if owner_uid == user.uid else ""

    def _watch(self, user: _User, root: str, path: str) -> bool:
        """Has changes in a directory told; returns whether it is there."""
        try:
            with self._directory(root, path) as found:
                _tell(user, found)
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

    def _text(self, user: _User, root: str, path: str, limit: int) -> bytes:
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
            text = os.pread(file.fd, limit + 1, 0)
        except OSError:
            return b""
        finally:
            os.close(file.fd)
        return text if len(text) <= limit else b""


def _tell(user: _User, path: str) -> None:
    """Has changes in a directory told."""
    if user.inotify >= 0:
        _libc.inotify_add_watch(user.inotify, os.fsencode(path), CHANGES)


def _close(user: _User) -> None:
    if user.inotify >= 0:
        os.close(user.inotify)
        user.inotify = -1


def _drain(fd: int) -> None:
    with contextlib.suppress(OSError):  # there is no more
        for _ in range(_MAX_DRAINED):
            os.read(fd, _BUFFER_BYTES)
