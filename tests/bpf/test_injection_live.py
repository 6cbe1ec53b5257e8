# SPDX-License-Identifier: Apache-2.0
"""Libraries are loaded into programs that notice whatever that changes for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import interpreters
import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.errors import AiflameError
from aiflame.agent.injection import threads
from aiflame.agent.injection.inject import Injected, Injection, inject
from aiflame.agent.injection.seccomp import Call
from aiflame.agent.injection.tracer import InjectionRefused, Tracer, TryAgain
from aiflame.agent.processes import procfs
from aiflame.agent.symbols.store import cache_dir
from breadth import cases
from injectees import LIBRARY_FLAGS, PROGRAMS, Program
from support import WORKLOADS, wait_until

pytestmark = pytest.mark.bpf

# As often as there is time for; by hand: 100.
TIMES = int(os.environ.get("INJECTIONS", "3"))
LONGEST_STOP_NS = 50_000_000


@pytest.fixture
def start(workload: Callable[..., Path]) -> Iterator[Callable[..., Program]]:
    """`start("rest", "malloc:3")`: the program injectee, which does that."""
    programs: list[Program] = []

    def run(*kinds: object, before: Sequence[object] = (), flags: Sequence[str] = ()) -> Program:
        program = Program([*before, workload("injectee", *flags), *kinds])
        programs.append(program)
        return program

    yield run
    for program in programs:
        program.process.kill()
        program.process.communicate()


@pytest.fixture
def libraries(workload: Callable[..., Path], tmp_path: Path) -> Iterator[Path]:
    """An endless supply of different libraries: each has a build id of its own."""
    original = workload("injected", *LIBRARY_FLAGS)
    fd = os.open(original, os.O_RDONLY)
    build_id = bytes.fromhex(ElfImage.from_fd(fd).build_id)
    os.close(fd)
    data = original.read_bytes()
    assert data.count(build_id) == 1

    def made() -> Iterator[Path]:
        for number in itertools.count():
            path = tmp_path / f"libinjected{number}.so"
            path.write_bytes(data.replace(build_id, number.to_bytes(len(build_id), "big")))
            yield path

    return made()


def _inject(pid: int, library: Path) -> Injected:
    injected = inject(pid, library, cache_dir(), "injected_entry")
    assert (injected.was_there, injected.answer) == (False, 1)
    return injected


def _memory_files(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(path.readlink()))
    return [name for name in found if name.startswith("/memfd:")]


def _is_clean(pid: int, threads: int) -> bool:
    """Whether the thread that loads a library has gone, with its memory file."""
    return len([*Path(f"/proc/{pid}/task").iterdir()]) == threads and not _memory_files(pid)


def test_a_library_is_loaded_once(
    start: Callable[..., Program], libraries: Iterator[Path], tmp_path: Path
) -> None:
    program = start("rest")
    library = next(libraries)
    injected = _inject(program.pid, library)
    assert injected.stopped_ns < LONGEST_STOP_NS
    maps = Path(f"/proc/{program.pid}/maps").read_text()
    assert f"/memfd:/{library.name} (deleted)" in maps
    wait_until(lambda: _is_clean(program.pid, 2))
    assert inject(program.pid, library, cache_dir()) == Injected(was_there=True)
    # The same by another name, or another by the same name: there is one helper in a process.
    copy = tmp_path / "copy.so"
    copy.write_bytes(library.read_bytes())
    assert inject(program.pid, copy, cache_dir()).was_there
    library.write_bytes(next(libraries).read_bytes())
    assert inject(program.pid, library, cache_dir()).was_there
    program.end()


@cases("name", PROGRAMS)
def test_a_program_notices_nothing(
    start: Callable[..., Program], libraries: Iterator[Path], name: str
) -> None:
    program = start(*PROGRAMS[name])
    stops, tries = [], []
    for library in itertools.islice(libraries, TIMES):
        injected = _inject(program.pid, library)
        stops.append(injected.stopped_ns)
        tries.append(injected.tries)
    rounds = program.end()
    assert min(rounds.values()) > 0
    print(f"{name}: stopped up to {max(stops) / 1e6:.1f} ms; tries up to {max(tries)}")
    assert sorted(stops)[len(stops) // 2] < LONGEST_STOP_NS


@pytest.mark.parametrize("version", interpreters.each())
def test_python_notices_nothing(version: str, libraries: Iterator[Path]) -> None:
    program = Program([interpreters.executable(version), WORKLOADS / "pyinjectee.py"])
    try:
        for library in itertools.islice(libraries, TIMES):
            _inject(program.pid, library)
        assert min(program.end().values()) > 0
    finally:
        program.process.kill()
        program.process.communicate()


def test_a_library_that_fails_says_why(
    start: Callable[..., Program], workload: Callable[..., Path], libraries: Iterator[Path]
) -> None:
    program = start("rest", "registers")
    with pytest.raises(AiflameError, match="undefined symbol: no_such_entry"):
        inject(program.pid, next(libraries), cache_dir(), "no_such_entry")
    large = workload("injected", *LIBRARY_FLAGS, "-DSTATIC_TLS")
    with pytest.raises(AiflameError, match="static TLS block") as raised:
        inject(program.pid, large, cache_dir(), "injected_entry")
    assert "GLIBC_TUNABLES" in str(raised.value.hint)
    program.end()


def test_a_slow_function_is_waited_for(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program = start("rest")
    assert inject(program.pid, next(libraries), cache_dir(), "injected_sleep").answer == 0
    program.end()


# Options of unshare(1), and what is mounted over what the program has.
TMP, VAR_TMP, SHM = "/tmp", "/var/tmp", "/dev/shm"  # noqa: S108 - in a namespace of the test's
NAMESPACES = {
    "read-only and noexec": ("-m", f"{TMP} -o noexec", f"{VAR_TMP} -o ro", f"{SHM} -o ro"),
    "pids": ("-mpf --mount-proc --kill-child", TMP),
    "no proc": ("-m", TMP, "/proc"),
}


@cases("name", NAMESPACES)
def test_other_namespaces(
    start: Callable[..., Program], libraries: Iterator[Path], name: str
) -> None:
    options, *mounts = NAMESPACES[name]
    script = "; ".join(
        ('cd "$(dirname "$1")"', "shift", *(f"mount -t tmpfs none {where}" for where in mounts))
    )
    script += '; exec ./injectee "$@"'
    program = start(
        "rest", "registers", before=("unshare", *options.split(), "sh", "-c", script, "sh")
    )
    pid = program.pid
    if name == "pids":
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        pid = int(children)
    _inject(pid, next(libraries))
    assert [*Path(f"/proc/{pid}/root/tmp").iterdir()] == []
    program.end()


@cases("way", ["terminated", "without its parent"])
def test_a_loader_that_is_ended_leaves_no_file(
    start: Callable[..., Program], workload: Callable[..., Path], way: str
) -> None:
    library = workload("injected", *LIBRARY_FLAGS, "-DSLOW")
    script = f'cd "$(dirname "$1")"; shift; mount -t tmpfs none {TMP}; mount -t tmpfs none /proc; '
    script += 'exec ./injectee "$@"'
    program = start("rest", before=("unshare", "-m", "sh", "-c", script, "sh"))
    directory = Path(f"/proc/{program.pid}/root/tmp")
    command = [sys.executable, "-m", "aiflame.agent.injection.load_worker"]
    command += [
        str(library),
        str(cache_dir()),
        "",
        f"{program.pid}:{procfs.start_ticks(program.pid)}",
    ]
    if way != "terminated":
        command = ["sh", "-c", '"$@"; true', "sh", *command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as loader:
        wait_until(lambda: [*directory.glob("*/*")])
        loader.terminate()
    wait_until(lambda: not [*directory.iterdir()])
    program.end()


def test_without_a_way_for_the_library(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    directories = (TMP, VAR_TMP, SHM, "/run", "/proc")
    script = 'cd "$(dirname "$1")"; shift; ' + "".join(
        f"mount -t tmpfs -o noexec none {where}; " for where in directories
    )
    script += 'exec ./injectee "$@"'
    program = start("rest", before=("unshare", "-m", "sh", "-c", script, "sh"))
    with pytest.raises(InjectionRefused, match="mounted noexec") as raised:
        inject(program.pid, next(libraries), cache_dir())
    assert "cannot open shared object file" in str(raised.value)
    assert [*Path(f"/proc/{program.pid}/root/tmp").iterdir()] == []
    program.end()


@cases("answer", ["nosys=clone3", "refuse=memfd_create", "kill=reboot"])
def test_filters_that_let_it_through(
    start: Callable[..., Program], libraries: Iterator[Path], answer: str
) -> None:
    program = start("alone", answer, "rest")
    _inject(program.pid, next(libraries))
    program.end()


@cases("answer", ["kill=memfd_create", "kill=clone3", "trap=madvise", "refuse=mprotect"])
def test_filters_that_do_not(
    start: Callable[..., Program], libraries: Iterator[Path], answer: str
) -> None:
    program = start("alone", answer, "rest")
    call = answer.partition("=")[2]
    with pytest.raises(InjectionRefused, match=rf"seccomp filter .* {call}\(2\)"):
        inject(program.pid, next(libraries), cache_dir())
    program.end()


def test_filters_that_the_library_does_not_get_through(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program = start("alone", "kill=ftruncate", "rest")
    with pytest.raises(InjectionRefused, match=r"seccomp filter .* ftruncate\(2\)"):
        inject(program.pid, next(libraries), cache_dir(), calls={Call.FTRUNCATE})
    _inject(program.pid, next(libraries))  # this one does not call it
    program.end()


def test_a_strict_process_is_left_alone(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program = start("alone", "strict")
    with pytest.raises(InjectionRefused, match="strict seccomp"):
        inject(program.pid, next(libraries), cache_dir())


def test_a_static_program_is_left_alone(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program = start("rest", flags=("-static",))
    with pytest.raises(InjectionRefused, match="statically linked") as raised:
        inject(program.pid, next(libraries), cache_dir())
    assert raised.value.exit_code == 3
    program.end()


def test_a_process_that_is_being_traced_is_left_alone(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    script = """
import sys
from aiflame.agent.injection.tracer_worker import Tracee
tracee = Tracee(int(sys.argv[1]))
print("held", flush=True)
input()
"""
    program = start("rest")
    command = [sys.executable, "-c", script, str(program.pid)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InjectionRefused, match=rf"traced by .* \(process {other.pid}\)"):
            inject(program.pid, next(libraries), cache_dir())
    _inject(program.pid, next(libraries))
    program.end()


def test_a_process_that_another_recorder_holds_is_waited_for(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program, other = start("alone", "nap"), Tracer()
    with other:
        other.stop(program.pid)
        _inject(program.pid, next(libraries))
    program.end()


def test_what_another_recorder_has_loaded_meanwhile_is_not_loaded_again(
    start: Callable[..., Program], libraries: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, library = start("nap"), next(libraries)
    with Injection(program.pid, cache_dir()) as injection:
        candidates = threads.candidates

        def meanwhile(pid: int) -> Sequence[int]:
            monkeypatch.undo()
            _inject(pid, library)
            assert candidates(pid)
            return []

        monkeypatch.setattr(threads, "candidates", meanwhile)
        assert injection.load(library).was_there
    program.end()


def test_a_child_that_uses_its_parents_memory_is_left_alone(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program = start("rest", "lend")
    lending = Path(f"/proc/{program.pid}/task")

    def children() -> list[int]:
        lists = [(path / "children").read_text().split() for path in lending.iterdir()]
        return [int(child) for found in lists for child in found]

    wait_until(children)
    with pytest.raises(InjectionRefused, match="uses the memory of its parent"):
        inject(children()[0], next(libraries), cache_dir())
    _inject(program.pid, next(libraries))  # by another thread than the one that waits
    program.end()


def test_a_stopped_process_is_left_alone(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program = start("rest")
    program.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: procfs.status_field(program.pid, "State")[0] == "T")
    with pytest.raises(InjectionRefused, match="stopped by a signal") as raised:
        inject(program.pid, next(libraries), cache_dir())
    assert raised.value.hint == f"let it go on: kill -CONT {program.pid}"
    program.process.send_signal(signal.SIGCONT)
    program.end()


def test_a_thread_of_another_process_is_let_go(
    start: Callable[..., Program], libraries: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the id of a thread that has ended were another process's by now.
    program, other = start("rest"), start("alone", "nap")
    monkeypatch.setattr(threads, "candidates", lambda pid: [other.pid])
    with pytest.raises(InjectionRefused, match="times the thread has ended"):
        inject(program.pid, next(libraries), cache_dir(), patience_s=0.2)
    monkeypatch.undo()
    _inject(program.pid, next(libraries))
    assert len([*Path(f"/proc/{other.pid}/task").iterdir()]) == 1
    for one in (program, other):
        one.end()


def test_a_process_that_has_ended(start: Callable[..., Program], libraries: Iterator[Path]) -> None:
    program = start("rest")
    program.process.kill()
    wait_until(lambda: procfs.status_field(program.pid, "State")[0] == "Z")
    with pytest.raises(InjectionRefused, match="has ended"):
        inject(program.pid, next(libraries), cache_dir())


def test_threads_that_are_always_inside_malloc_are_left_alone(
    start: Callable[..., Program], libraries: Iterator[Path], workload: Callable[..., Path]
) -> None:
    library = workload("stuckmalloc", "-shared", "-fPIC")
    program = start("alone", "stuck", before=("env", f"LD_PRELOAD={library}"))
    with pytest.raises(InjectionRefused, match="times inside malloc") as raised:
        inject(program.pid, next(libraries), cache_dir(), patience_s=0.5)
    assert raised.value.hint == "try again"


def test_a_program_with_a_malloc_of_its_own(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    flags = (str(WORKLOADS / "stuckmalloc.c"), "-rdynamic")
    stuck = start("alone", "stuck", flags=flags)
    with pytest.raises(InjectionRefused, match="inside a program with a malloc of its own"):
        inject(stuck.pid, next(libraries), cache_dir(), patience_s=0.5)
    program = start("rest", "malloc", flags=flags)
    _inject(program.pid, next(libraries))
    program.end()


@cases("silent_on", ["14", "3", "17", "25"], ids=["open", "getattr", "statfs", "flush"])
def test_a_file_that_its_target_serves_is_not_waited_for(tmp_path: Path, silent_on: str) -> None:
    if not Path("/dev/fuse").exists():
        pytest.skip("no FUSE in this kernel")
    source, mount, silence = (tmp_path / name for name in ("source", "mount", "silence"))
    source.touch()
    mount.mkdir()
    command = [sys.executable, WORKLOADS / "fuseserver.py", source, mount, silence]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    with (mount / "program").open() as served:
        target = subprocess.Popen(["sleep", "600"], stdin=served)
    silence.write_text(silent_on)
    script = (
        "import sys; from aiflame.agent.injection.delivery import fill_memory;"
        f"fill_memory({target.pid}, 0, b'library')"
    )
    filler = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    try:
        _, words = filler.communicate(timeout=20)
        assert "it is another file by now" in words
    finally:
        # First: whoever waits for an answer gets an error then, and can be killed.
        server.kill()
        server.communicate()
        for process in (filler, target):
            process.kill()
            process.wait()
        subprocess.run(["umount", "--lazy", mount], check=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was no longer needed
        os.kill(pid, signal.SIGKILL)


# From before the first thread is stopped to after the library has been loaded.
DELAYS_S = [0.0005 * step for step in range(0, 60, 1 if TIMES > 10 else 5)]


@cases("kinds", [("alone", "registers"), ("nap", "poll", "malloc:2", "registers")])
def test_the_tracer_dies_at_any_moment(
    start: Callable[..., Program], libraries: Iterator[Path], kinds: Sequence[str]
) -> None:
    program = start(*kinds)
    with Injection(program.pid, cache_dir()) as injection:
        for delay_s in DELAYS_S:
            with contextlib.suppress(TryAgain):  # that one has ended
                injection.tracer.release()
            injection.tracer.release()
            tracer = injection.tracer.pid
            assert tracer is not None
            killer = threading.Timer(delay_s, _kill, (tracer,))
            killer.start()
            with contextlib.suppress(AiflameError):
                injection.load(next(libraries), "injected_entry")
            killer.join()
    _inject(program.pid, next(libraries))
    assert min(program.end().values()) > 0


def test_the_injector_dies_at_any_moment(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    script = """
import sys
from pathlib import Path
from aiflame.agent.injection.inject import Injection
injection = Injection(int(sys.argv[1]), Path(sys.argv[3]))
print("begins", flush=True)
injection.load(Path(sys.argv[2]), "injected_entry")
"""
    program = start("nap", "registers", "malloc")
    for delay_s in DELAYS_S[::2]:
        command = [sys.executable, "-c", script, str(program.pid), next(libraries), cache_dir()]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as injector:
            assert injector.stdout is not None
            assert injector.stdout.readline() == b"begins\n"
            time.sleep(delay_s)
            injector.kill()
    _inject(program.pid, next(libraries))
    assert min(program.end().values()) > 0


def _never_take_back(tracer: Tracer) -> None:
    """Has lent threads wait for the tracer in vain, as if it had died."""
    lend = tracer.lend
    tracer.lend = lambda loan, at, code, _: lend(loan, at, code, range(0))


@cases("kind", ["nap", "poll", "wait"])
@cases("signals", [(), (signal.SIGSTOP, signal.SIGCONT)])
def test_a_lent_thread_goes_on_by_itself_in_a_wait_that_was_stopped_before(
    start: Callable[..., Program], libraries: Iterator[Path], kind: str, signals: Sequence[int]
) -> None:
    # GIVEN a program whose only thread waits, and is stopped more than once in one wait, by us or
    # by others
    program = start("alone", kind)
    # WHEN it is lent, and nobody gives it its registers back
    for library in itertools.islice(libraries, 10):
        with Injection(program.pid, cache_dir()) as injection:
            _never_take_back(injection.tracer)
            for number in signals:
                os.kill(program.pid, number)
            injection.load(library, "injected_entry")
    # THEN it gives them back itself, and its wait ends as if nothing had been.
    assert min(program.end().values()) > 0


@cases("kind", ["nap", "poll", "select", "epoll", "receive", "wait"])
def test_a_thread_that_is_held_goes_on_when_its_tracer_dies(
    start: Callable[..., Program], kind: str
) -> None:
    program = start("alone", kind)
    for _ in range(20):
        with Tracer() as tracer:
            with contextlib.suppress(TryAgain):
                tracer.stop(program.pid)
            assert tracer.pid is not None
            _kill(tracer.pid)
    assert min(program.end().values()) > 0


@cases("is_released", [True, False])
def test_a_process_that_is_killed_while_a_thread_is_held_is_over(
    start: Callable[..., Program], is_released: bool
) -> None:
    program = start("nap", "poll")
    tid = max(procfs.thread_ids(program.pid))
    with Tracer() as tracer:
        tracer.stop(tid)
        program.process.kill()
        wait_until(lambda: procfs.status_field(program.pid, "State")[:1] == ["Z"])
        if is_released:
            tracer.release()
        assert program.process.wait(5) == -signal.SIGKILL


def test_a_filter_without_restart_syscall_ends_no_process(
    start: Callable[..., Program], libraries: Iterator[Path]
) -> None:
    program = start("alone", "kill=restart_syscall", "nap")
    for library in itertools.islice(libraries, 3):
        _inject(program.pid, library)
    assert min(program.end().values()) > 0


def test_a_thread_that_writes_is_not_stopped(
    libraries: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os; r, w = os.pipe(); os.write(w, bytes(1 << 20))"
    with subprocess.Popen([sys.executable, "-c", script]) as writer:
        try:
            call = Path(f"/proc/{writer.pid}/syscall")
            wait_until(lambda: call.read_text().startswith("1 "))
            assert threads.candidates(writer.pid) == []
            assert not threads.may_be_stopped(writer.pid, writer.pid)
            with pytest.raises(InjectionRefused, match="1 times in a system call that a stop"):
                inject(writer.pid, next(libraries), cache_dir(), patience_s=0)
            # Nor where it was in none when it was listed.
            monkeypatch.setattr(threads, "candidates", lambda pid: [pid])
            with pytest.raises(InjectionRefused, match="times in a system call that a stop"):
                inject(writer.pid, next(libraries), cache_dir(), patience_s=0.2)
        finally:
            writer.kill()
