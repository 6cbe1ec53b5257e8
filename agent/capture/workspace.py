# SPDX-License-Identifier: Apache-2.0
"""Where a recording is written until its capture has a name: a directory that only root enters.

SQLite opens a database, and a rollback journal beside it, by path, and it does what the journal
says, a deletion of other files among it. So no part of that path may be one that others can
change. The database lies in a directory of its own, of mode 0700, in one of the recorder's own,
below a folder of root's. For root that is /var/lib/aiflame: on a disk, since a long recording of a
busy host has hundreds of megabytes, which in /run would be memory; kept at a reboot, unlike /tmp,
since a recording that was killed waits there for `aiflame recover`. Where /var cannot be written
to, or is full, it is /run/aiflame.

A recording that runs holds a lock on its directory, which ends with its process whatever ends it.
A directory without a lock is what a killed recording has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from aiflame.agent.errors import Aborted, AiflameError, EndedAtOnce, EnvironmentUnfit
from aiflame.agent.limits import room_hint
from aiflame.agent.outfile import (
    NOT_ALLOWED,
    FileIdentity,
    Owner,
    private_directory,
    write_output,
)
from aiflame.agent.user_folders import temporary_folder, user_folder

# A capture of a busy host grows by a few MB a minute; this is an hour of it.
ENOUGH_BYTES = 200 * 10**6

# At the end of an error: what was recorded is not lost with the output.
RECORDING_KEPT = "; the recording is kept"

_RECORDINGS = "recordings"
_DATABASE = "capture.aiflame"
_DESTINATION = "destination.json"


@dataclass(frozen=True, slots=True)
class Destination:
    """What a recording is to become.

    Attributes:
        path: Where its capture goes; absolute, since it may be asked for from another folder.
        command: The command line that began it.
        force: Whether an existing file there may be replaced.
        owner: Whose the capture is to be; None for who runs aiflame.
        published: What was written there already: the capture before its symbols were resolved.
    """

    path: Path
    command: str
    force: bool
    owner: Owner | None
    published: FileIdentity | None = None

    def as_json(self) -> str:
        """Returns it as text."""
        return json.dumps({**asdict(self), "path": str(self.path)})

    @classmethod
    def of_json(cls, text: str) -> Destination:
        """Reads it again."""
        facts = json.loads(text)
        return cls(
            path=Path(facts["path"]),
            command=facts["command"],
            force=facts["force"],
            owner=None if facts["owner"] is None else Owner(*facts["owner"]),
            published=facts["published"] and FileIdentity(**facts["published"]),
        )


class Workspace(AbstractContextManager["Workspace"]):
    """The directory of one recording, locked; removed at the end unless `is_kept`.

    Attributes:
        directory: Its path.
        destination: What it is to become.
        is_kept: Whether it holds something that is nowhere else. Whoever aborts does not want it.
    """

    def __init__(self, directory: Path, lock: int, destination: Destination) -> None:
        self.directory = directory
        self.destination = destination
        self.is_kept = False
        self._lock = lock

    @classmethod
    def create(cls, destination: Destination) -> Workspace:
        """Makes one for a new recording.

        Raises:
            EnvironmentUnfit: There is no directory that only this user enters.
            AiflameError: The file system refused.
        """
        parent = recordings_directory()
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        # Nobody looks for what a killed recording has left between the two locks.
        try:
            with _locked(parent):
                directory = parent / name
                directory.mkdir(mode=0o700)
                made = cls(directory, _lock(directory), destination)
                made._note(destination)
        except OSError as error:
            if not isinstance(error, FileExistsError):  # of a recorder in another pid namespace
                shutil.rmtree(parent / name, ignore_errors=True)
            raise AiflameError(
                f"cannot write {parent / name}: {error.strerror}", room_hint()
            ) from error
        return made

    @property
    def database(self) -> Path:
        """Where the capture is written."""
        return self.directory / _DATABASE

    @property
    def size_bytes(self) -> int:
        """How large it is by now."""
        return _size_bytes(self.directory)

    @property
    def name(self) -> str:
        """Tells it from all others: when it was made (UTC), and the recorder's pid."""
        return self.directory.name

    def publish(self, is_named: bool = False) -> int:
        """Copies what is committed to its destination; nothing is here alone afterwards.

        Args:
            is_named: Whether the user gave the destination's very name.

        Returns:
            Its size in bytes.

        Raises:
            AiflameError: It is not there; `aiflame recover` tries again.
        """
        to = self.destination
        try:
            with self.database.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                published = write_output(
                    to.path,
                    file,
                    to.force,
                    is_named=is_named,
                    is_private=True,
                    replaces=to.published,
                    owner=to.owner,
                )
        except (Aborted, EndedAtOnce):
            raise
        except AiflameError as error:
            hint = f"{error.hint}; then: aiflame recover" if error.hint else "aiflame recover"
            hint = f"{hint} {to.path}"
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in NOT_ALLOWED:
                hint = f"aiflame recover {to.path} -o OTHER.aiflame"
            raise AiflameError(f"{error}{RECORDING_KEPT}", hint) from error
        self.is_kept = False
        # On a full disk the note is missing, and `recover` asks for --force.
        with contextlib.suppress(OSError):
            self._note(replace(to, published=published))
        return size_bytes

    def _note(self, destination: Destination) -> None:
        self.destination = destination
        file = self.directory / _DESTINATION
        following = file.with_suffix(".new")
        following.write_text(destination.as_json())
        following.replace(file)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.is_kept or isinstance(error, Aborted):
            shutil.rmtree(self.directory, ignore_errors=True)
        # A child that is still about to end may have the descriptor as well.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A recording without its capture: what a killed one has left, until somebody takes it.

    Attributes:
        directory: Its path.
        destination: What it was to become.
    """

    directory: Path
    destination: Destination

    @property
    def name(self) -> str:
        """As a workspace's."""
        return self.directory.name

    @property
    def size_bytes(self) -> int:
        """How large it is."""
        return _size_bytes(self.directory)

    def take(self, *, waits: bool = True) -> Workspace:
        """Returns it locked, to be kept unless it is finished.

        Args:
            waits: For others that look at what is left.

        Raises:
            AiflameError: Somebody else has taken it, or finished it, or is at one beside it.
        """
        try:
            with contextlib.ExitStack() as parts:
                with _locked(self.directory.parent, waits=waits):
                    lock = _lock(self.directory)
                parts.callback(os.close, lock)
                # As who had it before has left it: published, for instance, or gone.
                destination = _destination_of(self.directory)
                parts.pop_all()
        except _NO_DESTINATION as error:
            raise AiflameError(
                f"another command is finishing {self.name}", "aiflame recover lists what is left"
            ) from error
        taken = Workspace(self.directory, lock, destination)
        taken.is_kept = True
        return taken


def recordings_directory() -> Path:
    """Returns where new recordings go: the first with enough room, or else the one with most.

    Raises:
        EnvironmentUnfit: There is no directory that only this user enters.
    """
    usable: dict[Path, int] = {}
    for candidate in _candidates():
        parent = _own(candidate)
        if parent is not None:
            usable[parent] = shutil.disk_usage(parent).free
            if usable[parent] >= ENOUGH_BYTES:
                return parent
    if not usable:
        first = _candidates()[0]
        raise EnvironmentUnfit(
            f"no directory to record into: {first} cannot be made, or others may write there",
            f"sudo install -d -m 700 -o {os.geteuid()} {first}",
        )
    return max(usable, key=lambda parent: usable[parent])


def temporary_captures() -> Path:
    """Returns where captures are made that are read at once.

    Raises:
        EnvironmentUnfit: Nowhere.
    """
    try:
        return temporary_folder()
    except EnvironmentUnfit:
        with contextlib.suppress(EnvironmentUnfit):
            return recordings_directory().parent  # beside recordings, as nobody's left ones
        raise


def unfinished() -> list[Unfinished]:
    """Returns what killed recordings have left, oldest first."""
    return _found(_left_in)


def held() -> list[Unfinished]:
    """Returns those that somebody has, oldest first: who records, or who finishes a killed one."""
    return _found(_held_in)


def _found(look: Callable[[Path], Iterable[Unfinished]]) -> list[Unfinished]:
    found: list[Unfinished] = []
    for parent in _parents():
        # Of two who look at once, each would see the other's locks as those of recordings.
        with _locked(parent):
            found += look(parent)
    return sorted(found, key=lambda left: left.name)


def _parents() -> Iterator[Path]:
    for candidate in _candidates():
        # Not even looked into where others could have put something.
        parent = _own(candidate) if candidate.is_dir() else None
        if parent is not None:
            yield parent


def discard_below(folder: Path) -> bool:
    """Removes what killed recordings have left whose captures were to go below a folder.

    Whoever calls this serves others: nobody is waited for who is looking at what is left. All else
    stays as it is: it is somebody's, who may recover it.

    Args:
        folder: Its owner alone can write to it and above. Links on the way to a destination are
            not followed: they may be others by now.

    Returns:
        Whether all was looked at; else it is to be tried again.
    """
    names = (_without_dots(folder), folder.resolve())
    is_all = True
    for parent in _parents():
        try:
            with _locked(parent, waits=False):
                left = [*_left_in(parent, removes_unreadable=False)]
        except OSError:
            is_all = False
            continue
        for one in left:
            path = _without_dots(one.destination.path)
            if any(path.is_relative_to(name) for name in names):
                try:
                    with one.take(waits=False) as taken:
                        taken.is_kept = False
                except AiflameError:  # somebody is at it, or at one beside it
                    is_all = False
    return is_all


def _without_dots(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - links are not followed


def running(path: Path) -> Path | None:
    """Returns the directory of a recording that is to go to a path, None where there is none.

    It runs, or it was killed, and a command is just finishing it.
    """
    found = (one.directory for one in held() if one.destination.path == path)
    return next(found, None)


def _left_in(parent: Path, *, removes_unreadable: bool = True) -> Iterator[Unfinished]:
    for directory in parent.iterdir():
        try:
            lock = _lock(directory)
        except OSError:
            continue  # it runs
        try:
            destination = _destination_of(directory)
        except _NO_DESTINATION as error:
            # Killed at its very start, or while it was removed; else it is only that it cannot be
            # read now, as where descriptors have run out.
            is_lasting = not isinstance(error, OSError) or isinstance(error, FileNotFoundError)
            if is_lasting and removes_unreadable:
                shutil.rmtree(directory, ignore_errors=True)
        else:
            yield Unfinished(directory, destination)
        finally:
            os.close(lock)


def _held_in(parent: Path) -> Iterator[Unfinished]:
    for directory in parent.iterdir():
        if _is_locked(directory):
            # Not where it is removed just now.
            with contextlib.suppress(*_NO_DESTINATION):
                yield Unfinished(directory, _destination_of(directory))


# There is no note of it, or one that cannot be understood.
_NO_DESTINATION = (OSError, ValueError, KeyError, TypeError)


def _destination_of(directory: Path) -> Destination:
    """Reads what a recording is to become; one of `_NO_DESTINATION` is raised where that fails."""
    return Destination.of_json((directory / _DESTINATION).read_text())


def _candidates() -> list[Path]:
    """The recorder's own directories, best first."""
    if os.geteuid() == 0:
        return [Path("/var/lib/aiflame"), Path("/run/aiflame")]
    # Users of services have no home, and nobody can put another directory in the place of one's own
    # in a sticky /tmp.
    candidates = [Path(f"/tmp/aiflame-{os.geteuid()}")]  # noqa: S108 - see above
    with contextlib.suppress(EnvironmentUnfit):
        candidates.insert(0, user_folder("XDG_STATE_HOME", ".local/state") / "aiflame")
    return candidates


def _size_bytes(directory: Path) -> int:
    database = directory / _DATABASE
    return database.stat().st_size if database.exists() else 0


def _own(candidate: Path) -> Path | None:
    """Makes a candidate and its directory of recordings; None where others may write."""
    own = private_directory(candidate)
    return None if own is None or own.is_symlink() else private_directory(own / _RECORDINGS)


def _lock(directory: Path) -> int:
    """Locks a directory until the descriptor is closed; OSError if another process does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_locked(directory: Path) -> bool:
    """Whether another process, or another part of this one, has locked a directory."""
    try:
        os.close(_lock(directory))
    except OSError as error:
        return isinstance(error, BlockingIOError)  # else it is gone
    return False


@contextlib.contextmanager
def _locked(parent: Path, *, waits: bool = True) -> Iterator[None]:
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
