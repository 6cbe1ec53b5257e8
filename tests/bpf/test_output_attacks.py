# SPDX-License-Identifier: Apache-2.0
"""A user without rights makes root delete, show, make or overwrite nothing.

Root records into a folder of that user, who is at work in it all the time (workloads/attacker.py).
Each attack is tried with the kernel's own protection of links off, and as Debian sets it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.errors import AiflameError
from aiflame.agent.outfile import refuse_existing, write_output
from breadth import cases
from recordings import frames_of, public_folder
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_NOBODY = 65534
_NOTHING: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
_SUDO = {"SUDO_UID": str(_NOBODY), "SUDO_GID": str(_NOBODY), "SUDO_USER": "nobody"}

# Documentation/admin-guide/sysctl/fs.rst; 99-protect-links.conf of Debian 12.
_PROTECTIONS = ("protected_symlinks", "protected_hardlinks", "protected_fifos", "protected_regular")
_SETTINGS = {"off": (0, 0, 0, 0), "Debian": (1, 1, 1, 2)}
_SYSCTLS = Path("/proc/sys/fs")

RunAiflame = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=_SETTINGS, autouse=True)
def protection(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets what the kernel keeps users from, for one test session at a time."""
    with (_SYSCTLS / _PROTECTIONS[0]).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = {name: (_SYSCTLS / name).read_text() for name in _PROTECTIONS}
        try:
            for name, value in zip(_PROTECTIONS, _SETTINGS[request.param], strict=True):
                (_SYSCTLS / name).write_text(f"{value}\n")
            yield
        finally:
            for name, text in before.items():
                (_SYSCTLS / name).write_text(text)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The user's folder."""
    with public_folder() as outer:
        inner = outer / "folder"
        inner.mkdir()
        os.chown(inner, _NOBODY, _NOBODY)
        yield inner


@pytest.fixture
def victim(folder: Path) -> Iterator[Path]:
    """A file that only root reads, where only root makes files; it stays as it is."""
    roots = folder.parent / "roots"
    roots.mkdir(mode=0o711)
    path = roots / "victim"
    path.write_text("precious")
    path.chmod(0o600)
    yield path
    assert [entry.name for entry in roots.iterdir()] == ["victim"]
    assert path.read_text() == "precious"
    facts = path.stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_uid, facts.st_nlink) == (0o600, 0, 1)


@contextmanager
def _attacker(how: str, folder: Path, target: Path) -> Iterator[None]:
    # The test's own interpreter may lie where this user does not come.
    script = shutil.copy(WORKLOADS / "attacker.py", folder.parent)
    command = ["/usr/bin/python3", script, how, str(folder), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **_NOTHING)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield
    assert process.poll() is None
    process.kill()
    process.communicate()


def _record(run_aiflame: RunAiflame, folder: Path, pid: int, *options: str) -> Any:
    output = folder / "run.aiflame"
    return run_aiflame(
        *("record", "-p", pid, "-d", 1, "-o", output, *options), env={**os.environ, **_SUDO}
    )


def _discard(run_aiflame: RunAiflame, folder: Path) -> None:
    run_aiflame("recover", folder / "run.aiflame", "--discard")


@cases(
    "how, mode, force",
    [
        ("journal", 0o1777, ()),
        ("journal", 0o755, ()),
        ("swap", 0o755, ()),
        ("swap", 0o755, ("--force",)),
        ("claim", 0o1777, ()),
        ("claim", 0o755, ("--force",)),
        ("flip", 0o755, ()),
    ],
)
def test_a_recording_into_a_folder_of_others(
    busy: subprocess.Popen[bytes],
    run_aiflame: RunAiflame,
    folder: Path,
    victim: Path,
    how: str,
    mode: int,
    force: tuple[str, ...],
) -> None:
    # GIVEN a folder that is the attacker's, or one like /tmp
    os.chown(folder, 0 if mode & stat.S_ISVTX else _NOBODY, 0)
    folder.chmod(mode)
    # WHEN root records into it, THEN the victim stays as it is,
    with _attacker(how, folder, victim):
        ended = _record(run_aiflame, folder, busy.pid, *force)
    # and the recording ends in order, or as far as the attacker lets it.
    assert ended.returncode in (0, 1, 2), ended.stderr
    assert "Traceback" not in ended.stderr
    assert "internal error" not in ended.stderr
    if how == "journal":
        assert ended.returncode == 0, ended.stderr
        assert len(read_capture(folder / "run.aiflame").samples)
    _discard(run_aiflame, folder)


@cases("how", ["swap", "claim"])
def test_a_link_that_would_make_a_file_elsewhere(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, folder: Path, victim: Path, how: str
) -> None:
    with _attacker(how, folder, victim.with_name("new")):
        ended = _record(run_aiflame, folder, busy.pid, "--force")
    assert ended.returncode in (0, 1), ended.stderr
    _discard(run_aiflame, folder)


@cases("name, force", [("run.html", ()), ("run.html", ("--force",)), ("run.aiflame", ("--force",))])
def test_a_link_to_a_device(
    busy: subprocess.Popen[bytes],
    run_aiflame: RunAiflame,
    folder: Path,
    name: str,
    force: tuple[str, ...],
) -> None:
    # GIVEN a terminal of root's, and a link to it
    terminal, end = os.openpty()
    device = Path(os.ttyname(end))
    subprocess.run(["ln", "-s", device, folder / name], check=True, **_NOTHING)
    # WHEN root records
    ended = _record(run_aiflame, folder, busy.pid, *force)
    # THEN the link is replaced or in the way, and nothing was written to the device.
    assert ended.returncode == (0 if force else 2), ended.stderr
    assert (folder / name).is_symlink() is not bool(force)
    os.set_blocking(terminal, False)
    with pytest.raises(BlockingIOError):
        os.read(terminal, 1)
    os.close(terminal)
    os.close(end)


@cases("force", [(), ("--force",)])
def test_a_fifo_in_the_place_of_the_page(
    busy: subprocess.Popen[bytes],
    run_aiflame: RunAiflame,
    folder: Path,
    victim: Path,
    force: tuple[str, ...],
) -> None:
    # GIVEN one that is there before
    subprocess.run(["mkfifo", folder / "run.html"], check=True, **_NOTHING)
    ended = _record(run_aiflame, folder, busy.pid, *force)
    assert ended.returncode == 2, ended.stderr
    assert "in the way" in ended.stderr
    (folder / "run.html").unlink()
    # or comes meanwhile, THEN nothing waits for its reader, and the capture is there.
    with _attacker("fifo", folder, victim):
        (folder / "run.html").unlink(missing_ok=True)
        ended = _record(run_aiflame, folder, busy.pid, *force)
    assert ended.returncode in (1, 2), ended.stderr
    assert "in the way" in ended.stderr


def test_a_fifo_of_another_user_that_was_named(folder: Path) -> None:
    subprocess.run(["mkfifo", folder / "run.svg"], check=True, **_NOTHING)
    with pytest.raises(AiflameError, match=f"a FIFO of user {_NOBODY}"):
        refuse_existing(folder / "run.svg", force=True)


def test_a_second_name_of_a_device_that_was_named(folder: Path) -> None:
    null = os.makedev(1, 3)
    device = folder.parent / "null"
    os.mknod(device, stat.S_IFCHR | 0o666, null)
    refuse_existing(device, force=False)
    os.link(device, folder / "run.svg")
    with pytest.raises(AiflameError, match="a second name"):
        write_output(folder / "run.svg", b"x", force=True)
    assert (folder / "run.svg").is_char_device()


@cases("force", [False, True])
@cases("how", ["swap", "claim", "flip", "fifo"])
def test_hundreds_of_outputs(folder: Path, victim: Path, how: str, force: bool) -> None:
    written = 0
    with _attacker(how, folder, victim):
        for number in range(500):
            for is_named in (False, True):
                with suppress(AiflameError):
                    path = folder / ("run.html" if number % 2 else "run.aiflame")
                    write_output(path, b"ours", force, is_named=is_named, is_private=True)
                    written += 1
    assert written or not force
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    for entry in folder.iterdir():
        facts = entry.lstat()
        # What is root's there has nothing in it but the output.
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == 0:
            assert entry.read_bytes() in (b"ours", b"")


@cases("target", ["roots", "/etc", "roots/../roots"])
def test_a_link_in_the_path_of_the_folder(folder: Path, victim: Path, target: str) -> None:
    # GIVEN a link of the user's to a folder of root's
    link = folder / "link"
    subprocess.run(["ln", "-s", folder.parent / target, link], check=True, **_NOTHING)
    for path in (link / "victim", link / "new", link / "../roots/new"):
        with pytest.raises(AiflameError, match=r"a link of another user|no such folder"):
            write_output(path, b"ours", force=True)
    # but links of the user's to a folder of the same user's, and of root's, are as good as any.
    link.unlink()
    subprocess.run(["ln", "-s", folder, link], check=True, **_NOTHING)
    write_output(link / "a", b"ours", force=False)
    (folder.parent / "roots-link").symlink_to(folder)
    write_output(folder.parent / "roots-link/link/b", b"ours", force=False)
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes() == b"ours"


def test_a_perf_map_that_is_a_link(
    workload: Callable[..., Path], run_aiflame: RunAiflame, folder: Path, victim: Path
) -> None:
    # GIVEN a program of the user's that runs generated code, and a map of it that only root reads
    program = shutil.copy(workload("generated"), folder.parent)
    secret = victim.parent / "secret.map"
    secret.write_text("0 7fffffffffff TOP_SECRET\n")
    secret.chmod(0o600)
    process = subprocess.Popen([program], stdout=subprocess.PIPE, **_NOTHING)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    perf_map = Path(f"/tmp/perf-{process.pid}.map")  # noqa: S108 - the interface
    try:
        subprocess.run(["ln", "-s", secret, perf_map], check=True, **_NOTHING)
        # WHEN root records it
        ended = _record(run_aiflame, folder, process.pid)
    finally:
        process.kill()
        process.communicate()
        perf_map.unlink()
        secret.unlink()
    # THEN nothing of it is in the capture, and that is said.
    assert ended.returncode == 0, ended.stderr
    profile = read_capture(folder / "run.aiflame")
    stacks = set(profile.samples["stack"].tolist())
    names = {name for stack in stacks for name in frames_of(profile, stack)}
    assert "[generated code]" in names
    assert b"TOP_SECRET" not in (folder / "run.aiflame").read_bytes()
    assert "perf_map_refused" in {loss.name for loss in profile.losses}


def test_nobody_else_reads_a_capture(
    busy: subprocess.Popen[bytes], run_aiflame: RunAiflame, folder: Path
) -> None:
    before = os.umask(0)
    try:
        output = folder / "run.aiflame"
        ended = run_aiflame("record", "-p", busy.pid, "-d", 1, "-o", output)
    finally:
        os.umask(before)
    assert ended.returncode == 0, ended.stderr
    for name in ("run.aiflame", "run.html"):
        read = subprocess.run(["cat", folder / name], capture_output=True, check=False, **_NOTHING)
        assert b"Permission denied" in read.stderr
