# SPDX-License-Identifier: Apache-2.0
"""What a thread that is lent is handed, and what filters would say to that."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import aiflame.agent.injection
import capstone
import pytest
from aiflame.agent.injection import load_worker, requests, seccomp
from aiflame.agent.injection.code import CODE, WAIT
from aiflame.agent.injection.delivery import DeliveredFile, deliver_file, fill_memory, memory_path
from aiflame.agent.injection.fitness import Fitness, fitness_of, require_fit_thread
from aiflame.agent.injection.inject import Injected
from aiflame.agent.injection.questions import LIBRARY, LibraryFacts, Role, unsafe_parts
from aiflame.agent.injection.requests import Functions, Overwritten, Registers
from aiflame.agent.injection.seccomp import BadFilter, Call, Verdict, verdict
from aiflame.agent.injection.threads import why_not
from aiflame.agent.injection.tracer import InjectionRefused, RefusedForGood, Tracer
from aiflame.agent.injection.tracer_worker import Outcome
from aiflame.agent.inspector.sandbox import filter_of
from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage
from aiflame.agent.processes.thread_walk import WalkedThread
from aiflame.agent.target_files import TargetFile
from aiflame.gpu.nvidia.family import NvidiaFamily
from nvidia_helper import prebuilt

_SOURCE = Path(aiflame.agent.injection.__file__).parent / "code.S"
_U64 = 1 << 64
HELPER_LIBRARY = NvidiaFamily.helper
_ALLOW, _KILL, _EPERM = 0x7FFF_0000, 0x8000_0000, 0x0005_0000 | errno.EPERM


def test_the_code_is_what_its_source_says(tmp_path: Path) -> None:
    built, code = tmp_path / "code.o", tmp_path / "code.bin"
    subprocess.run(["as", "--64", "-o", built, _SOURCE], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", built, code], check=True)
    assert code.read_bytes() == CODE
    symbols = subprocess.run(["nm", built], check=True, capture_output=True, text=True).stdout
    places = {line.split()[2]: int(line.split()[0], 16) for line in symbols.splitlines()}
    assert places["borrowed"] == 0
    assert range(places["give_back"], places["loading"]) == WAIT


def test_the_code_is_read_to_its_end_and_writes_nothing_beside_its_arguments() -> None:
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    lines = [*decoder.disasm(CODE, 0)]
    assert sum(line.size for line in lines) == len(CODE)
    # The page is not writable: no operand but constants and code is relative to RIP.
    assert [line.mnemonic for line in lines if "rip" in line.op_str] == ["lea"]
    assert len(CODE) % 8 == 0  # it is written in words


def _registers(**values: int) -> Registers:
    words = {name: 1000 + number for number, name in enumerate(Registers._fields)}
    return Registers(**{**words, "orig_rax": _U64 - 1, "rsp": 0x7FFF_0000_1238, **values})


@pytest.mark.parametrize(
    ("call", "result", "expected"),
    [
        (0, -512, (0, 998)),  # ERESTARTSYS: it is begun again
        (7, -516, (7, 998)),  # ERESTART_RESTARTBLOCK
        (34, -514, (34, 998)),  # ERESTARTNOHAND
        (3, -errno.EINTR, (-errno.EINTR % _U64, 1000)),  # close(2) is never begun again
        (1, 17, (17, 1000)),  # it is done
    ],
)
def test_a_thread_goes_on_by_itself(call: int, result: int, expected: tuple[int, int]) -> None:
    own = _registers(orig_rax=call, rax=result % _U64, rip=1000)
    resumed = requests.resumed(own)
    assert (resumed.rax, resumed.rip) == expected
    assert resumed._replace(rax=own.rax, rip=own.rip) == own


def test_a_thread_outside_of_calls_goes_on_where_it_was() -> None:
    own = _registers(rax=-512 % _U64)
    assert requests.resumed(own) == own


# mov $230, %eax; syscall: clock_nanosleep(2), as glibc calls it.
_SLEEPS = bytes.fromhex("b8e60000000f05")


@pytest.mark.parametrize(
    ("before", "code", "expected"),
    [
        ({"orig_rax": 35}, b"", 35),  # it was stopped before in that call
        ({"orig_rax": 35}, _SLEEPS, 35),
        ({"orig_rax": 35, "rdi": 1}, _SLEEPS, 230),  # in another one: the code tells
        (None, _SLEEPS, 230),
        (None, bytes.fromhex("4889f80f1f0f05"), None),  # mov %rdi, %rax: as syscall(3) has it
        (None, b"", None),  # it begins in a page that cannot be read
    ],
)
def test_a_call_that_the_kernel_continues_is_begun_anew_only_if_it_is_known(
    before: dict[str, int] | None, code: bytes, expected: int | None
) -> None:
    own = _registers(orig_rax=219, rax=-516 % _U64)  # restart_syscall, ERESTART_RESTARTBLOCK
    begun = requests.begun_call(own, None if before is None else own._replace(**before), code)
    assert begun == (None if expected is None else own._replace(orig_rax=expected))


def test_a_call_that_was_not_continued_is_what_it_is() -> None:
    for own in (_registers(orig_rax=230, rax=-516 % _U64), _registers(orig_rax=219, rax=0)):
        assert requests.begun_call(own, None, _SLEEPS) == own


def _loan(xstate: bytes, own: Registers) -> requests.Loan:
    functions = Functions(11, 12, 13, 14, 15, 16, False)
    return requests.loan(own, b"\1" + bytes(7), xstate, 0x5000, functions, "/lib.so", "entry")


def test_a_request_leaves_the_red_zone_alone_and_is_aligned() -> None:
    own = _registers()
    loan = _loan(bytes(832), own)
    assert loan.request_at % 64 == 0
    assert loan.request_at + len(loan.request) <= own.rsp - 128
    assert loan.lowest < loan.request_at
    assert loan.registers.rsp <= loan.request_at
    assert loan.registers.rip == 0x5000
    assert loan.registers.orig_rax == _U64 - 1  # or the kernel would restart a system call
    assert (loan.registers.fs_base, loan.registers.gs_base) == (own.fs_base, own.gs_base)


@pytest.mark.parametrize(
    ("size", "features", "expected"),
    [
        (832, 0b111, 832),  # AVX
        (2696, 0b1110_0111, 2696),  # AVX-512
        (11008, 0b1110_0111, 2816),  # AMX that the thread does not use: it has no room for that
        (11008, 0b1110_0111 | 3 << 17, 11008),
    ],
)
def test_a_signal_frame_says_how_long_it_is(size: int, features: int, expected: int) -> None:
    xstate = bytearray(size)
    struct.pack_into("<Q", xstate, 512, features)
    loan = _loan(bytes(xstate), _registers())
    (at,) = struct.unpack_from("<Q", loan.request, 576 + 224)
    assert at % 64 == 0
    image = loan.request[at - loan.request_at :]
    magic, whole, _, length = struct.unpack_from("<IIQI", image, 464)
    assert (magic, whole, length) == (0x46505853, expected + 4, expected)
    assert struct.unpack_from("<I", image, expected) == (0x46505845,)


def _head(state: int, result: int, task: int) -> bytes:
    return struct.pack("<IiQQQQQ", state, result, 0, 0, task, 0, 0)


@pytest.mark.parametrize(
    "head",
    [
        _head(1, 0, _U64 - 1),
        _head(1, 0, _U64 - 4096),
        _head(1, 0, 0x7F00_0000_0008),
        _head(1, -(1 << 31), 0),
        _head(1, 0, 0x7F00_0000_0000)[:30],
    ],
)
def test_a_request_that_was_overwritten_is_told(head: bytes) -> None:
    assert requests.result_of(_head(1, 11, 0x7F00_0000_0000)) == (1, 11, 0x7F00_0000_0000)
    assert requests.result_of(_head(0, 418201600, 0))[0] == 0  # not done: no result yet
    with pytest.raises(Overwritten, match="its request"):
        requests.result_of(head)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I4xi4xQQi", 1, -(1 << 31), 0, 0, 0),
        struct.pack("<I4xi4xQQi", 1, 3, 0, _U64 - 1, 0),
        struct.pack("<I4xi4xQQi", 1, 3, 0, 0, 0)[:20],
        b"",
    ],
)
def test_a_task_that_was_overwritten_is_told(data: bytes) -> None:
    good = struct.pack("<I4xi4xQQi", 1, -errno.ENOSYS, 0, 0x7F00_0000_1234, 7)
    assert requests.task_state(good) == (1, -errno.ENOSYS, 0, 0x7F00_0000_1234, 7)
    with pytest.raises(Overwritten, match="its task"):
        requests.task_state(data)


def test_one_target_does_not_end_the_loading_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {
        10: struct.error("unexpected"),
        12: InjectionRefused("stopped", "SIGCONT"),
        13: RefusedForGood("static"),
    }

    def load(pid: int, *_: object) -> Injected:
        if pid in errors:
            raise errors[pid]
        return Injected(was_there=False, stopped_ns=5)

    monkeypatch.setattr(load_worker, "_load", load)
    monkeypatch.setattr(load_worker.priority, "hurry", lambda: None)
    monkeypatch.setattr(load_worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(load_worker.ctypes, "CDLL", MagicMock())
    load_worker.main(Path("library.so"), None, (), ["10:1", "11:1", "12:1", "13:1"])
    assert [*map(json.loads, capsys.readouterr().out.splitlines())] == [
        {"pid": 10, "why": "error: unexpected", "hint": "", "is_final": False},
        {"pid": 11, "stopped_ns": 5, "tries": 0, "was_there": False, "why_held": ""},
        # And it is told whether it is of use to try again.
        {"pid": 12, "why": "stopped", "hint": "SIGCONT", "is_final": False},
        {"pid": 13, "why": "static", "hint": "", "is_final": True},
    ]


def test_a_name_that_has_no_room_is_refused() -> None:
    functions = Functions(11, 12, 13, 14, 15, 16, False)
    with pytest.raises(ValueError, match="no name"):
        requests.loan(_registers(), bytes(8), bytes(832), 0, functions, "n" * 300, "")


def _program(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)


def test_filters_are_asked_before() -> None:
    # The filter of our own children: a list of what is allowed, EPERM for all else.
    allowing = filter_of([call.value for call in seccomp.INJECTION])
    assert {verdict([allowing], call) for call in seccomp.INJECTION if call is not Call.MMAP} == {
        Verdict.ALLOWED
    }
    assert verdict([allowing], Call.MMAP) is Verdict.REFUSED  # of code, which we ask about
    assert verdict([filter_of([])], Call.CLONE) is Verdict.REFUSED
    killing = _program((0x20, 0, 0, 0), (0x15, 0, 1, Call.CLONE.value), (6, 0, 0, _KILL))
    killing += _program((6, 0, 0, _ALLOW))
    assert verdict([killing], Call.CLONE) is Verdict.FATAL
    # The strictest answer holds, whichever was installed first.
    assert verdict([allowing, killing], Call.CLONE) is Verdict.FATAL
    assert verdict([killing, filter_of([])], Call.CLONE) is Verdict.FATAL
    assert verdict([killing], Call.MMAP) is Verdict.ALLOWED
    assert verdict([_program((6, 0, 0, 0x7FC0_0000))], Call.READ) is Verdict.FATAL  # it would wait


def test_calls_of_the_library_are_asked_about() -> None:
    def killing(call: Call) -> bytes:
        asked = _program((0x20, 0, 0, 0), (0x15, 0, 1, call.value), (6, 0, 0, _KILL))
        return asked + _program((6, 0, 0, _ALLOW))

    calls = {Call.FTRUNCATE, Call.MEMFD_CREATE}
    assert seccomp.why_not([killing(Call.FTRUNCATE)], ()) == ""
    assert seccomp.why_not([killing(Call.FTRUNCATE)], calls) == "ftruncate"
    # An injection goes on without a memory file, a library that shares one does not.
    refusing = killing(Call.MEMFD_CREATE).replace(
        struct.pack("<I", _KILL), struct.pack("<I", _EPERM)
    )
    assert seccomp.why_not([refusing], ()) == ""
    assert seccomp.why_not([refusing], calls) == "memfd_create"
    # Without fchmod it is there for those alone who may open files of others.
    refusing = killing(Call.FCHMOD).replace(struct.pack("<I", _KILL), struct.pack("<I", _EPERM))
    assert seccomp.why_not([refusing], {*calls, Call.FCHMOD}) == ""
    assert seccomp.why_not([killing(Call.FCHMOD)], {*calls, Call.FCHMOD}) == "fchmod"


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_helper_makes_the_calls_that_are_known_of_it(tmp_path: Path) -> None:
    library, trace = prebuilt() / "libaiflame-nvidia.so", tmp_path / "trace"
    script = """
import ctypes, os, sys
os.write(1, b"begin")
ctypes.CDLL(sys.argv[1])
os.write(1, b"end")
tid = max(os.listdir("/proc/self/task"), key=int)
while not open(f"/proc/self/task/{tid}/syscall").read().startswith("232 "):  # epoll_wait
    pass
"""
    command = ("strace", "-f", "-o", trace, sys.executable, "-c", script, library)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [line.split(maxsplit=1) for line in trace.read_text().splitlines()]
    (begin,) = (at for at, (_, text) in enumerate(lines) if text.startswith('write(1, "begin"'))
    (end,) = (at for at, (_, text) in enumerate(lines) if text.startswith('write(1, "end"'))
    first = lines[0][0]
    made = [text for at, (tid, text) in enumerate(lines) if tid != first or begin < at < end]
    found = {match[0] for text in made if (match := re.match(r"\w+(?=\()", text))}
    assert HELPER_LIBRARY is not None
    known = {*HELPER_LIBRARY.calls, *(call.name.lower() for call in seccomp.INJECTION)}
    assert found - known == set()
    assert {"ftruncate", "epoll_wait", "prctl"} <= found
    assert {name.upper() for name in HELPER_LIBRARY.calls} <= set(Call.__members__)


def test_instructions_of_filters() -> None:
    data = struct.pack("<iIQ6Q", 5, 0xC000003E, 0, *range(6))

    def result(*instructions: tuple[int, int, int, int]) -> int:
        return seccomp.run(_program(*instructions, (0x16, 0, 0, 0)), data)  # ret a

    assert result((0x20, 0, 0, 24)) == 1  # the second argument
    assert result((0x00, 0, 0, 7), (0x04, 0, 0, 0xFFFF_FFFF)) == 6  # 32 bits
    assert result((0x00, 0, 0, 7), (0x07, 0, 0, 0), (0x24, 0, 0, 3), (0x0C, 0, 0, 0)) == 28
    assert result((0x00, 0, 0, 9), (2, 0, 0, 3), (0x00, 0, 0, 1), (0x60, 0, 0, 3)) == 9
    assert result((0x00, 0, 0, 6), (0x54, 0, 0, 3)) == 2
    assert result((0x00, 0, 0, 6), (0x45, 0, 1, 2), (6, 0, 0, 42)) == 42
    assert result((0x05, 0, 0, 1), (6, 0, 0, 1), (0x80, 0, 0, 0)) == 64  # its length
    for bad in [(0x05, 0, 0, 9)], [(0x00, 0, 0, 1), (0x34, 0, 0, 0)]:
        with pytest.raises(BadFilter):
            result(*bad)


def test_shadow_stacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # arch/x86/kernel/shstk.c, Linux 6.6: a line of /proc/PID/status, empty without.
    features = {"x86_Thread_features": []}
    monkeypatch.setattr(procfs, "status_field", lambda tid, name: features[name])
    require_fit_thread(10, 11)
    features["x86_Thread_features"] = ["shstk", "wrss"]
    with pytest.raises(InjectionRefused, match="process 10 has shadow stacks"):
        require_fit_thread(10, 11)


@pytest.mark.parametrize(
    ("answers", "refused"),
    [
        ((Role.MUSL,), RefusedForGood),
        ((Role.OTHER,), RefusedForGood),  # statically linked
        ((Role.OTHER, None), InjectionRefused),  # or its libc could not be read
    ],
)
def test_what_a_process_lacks_for_good(
    answers: tuple[Role | None, ...], refused: type[InjectionRefused]
) -> None:
    found = [None if role is None else LibraryFacts(role, {}, ()) for role in answers]
    binaries, images = MagicMock(ask=lambda binary, _: found[binary]), MagicMock()
    images.of.return_value = None
    mappings = [MagicMock(binary=binary) for binary in range(len(found))]
    with pytest.raises(InjectionRefused) as raised:
        fitness_of(MagicMock(mappings=mappings), binaries, images, MagicMock())
    assert raised.type is refused


@pytest.mark.parametrize(
    ("code", "refused"), [(errno.EPERM, RefusedForGood), (errno.ENOMEM, InjectionRefused)]
)
def test_a_right_that_is_missing_stays_so(
    code: int, refused: type[InjectionRefused], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracer, "_question", lambda *_: (Outcome.FAILED, code, b""))
    with pytest.raises(InjectionRefused, match="refuses to trace") as raised:
        Tracer().stop(10)
    assert raised.type is refused


def test_what_a_thread_may_be_inside_of() -> None:
    libc = LibraryFacts(Role.GLIBC, {}, ((0x100, 0x200, "malloc"),))
    libraries = {
        0: LibraryFacts(Role.ALLOCATOR, {}, ()),
        1: libc,
        2: LibraryFacts(Role.LOADER, {}, ()),
        3: LibraryFacts(Role.ALLOCATOR, {}, ()),
        4: LibraryFacts(Role.OTHER, {}, ()),
    }
    image = ProcessImage(0, 1, 1, 0)
    image.replace_mappings([Mapping(0x1000 * b, 0x1000 * b + 0x1000, 0, b) for b in range(5)])
    image.replace_mappings([Mapping(0x9000, 0xA000, 0, NO_BINARY)])
    fitness = Fitness(libraries, 0, Functions(1, 2, 3, 4, 5, 6, False), 0)
    images = SimpleNamespace(bias=lambda mapping: mapping.start)

    def why(*addresses: int, end: StopReason = StopReason.ROOTED_BY_TABLE, **call: int) -> str:
        walked = WalkedThread(addresses, end, frozenset(), call.pop("signal", 0) == 1)
        return why_not(image, fitness, images, _registers(**call), walked)

    futex, munmap, nanosleep = 202, 11, 35
    assert why(0x1300, 0x4100, 0x1400, orig_rax=futex) == ""
    assert why(0x4300, 0x4100, 0x1400) == ""
    # In libc it has to wait: it may have a lock that nobody sees.
    assert why(0x1300, 0x4100, 0x1400) == "at work in libc"
    assert why(0x1300, 0x4100, 0x1400, orig_rax=munmap) == "at work in libc"
    assert why(0x4300, 0x1300, 0x4100, 0x1400) == ""  # it has called back
    assert why(0x1150, 0x4100, 0x1400) == "inside malloc"
    assert why(0x1300, 0x1200, 0x4100, 0x1400, orig_rax=futex) == "inside malloc"  # at its end
    assert why(0x4300, 0x2100, 0x4200, 0x1400) == "inside the dynamic loader"
    assert why(0x3100, 0x4100, 0x1400) == "inside malloc"
    assert why(0x1300, 0x1400, 0x1500, orig_rax=futex).startswith("inside libc alone")
    assert why(0x9100, 0x1500) == ""  # of a JIT
    assert why(0x4300, 0x4100, signal=1) == "in a signal handler"
    assert "no table" in why(0x4100, 0x9100, end=StopReason.NO_TABLE)
    # In a program with a malloc of its own only what that does not wait in.
    assert why(0x4300, 0x0100, 0x1400) == "inside a program with a malloc of its own"
    assert why(0x1300, 0x0100, 0x1400, orig_rax=nanosleep) == ""
    assert why(0x1300, 0x0100, 0x1400, orig_rax=futex) != ""


def _facts(path: Path) -> LibraryFacts:
    fd = os.open(path, os.O_RDONLY)
    try:
        return LIBRARY.checked(json.loads(json.dumps(unsafe_parts(TargetFile(fd)))))
    finally:
        os.close(fd)


def _mapped(name: str) -> Path:
    maps = Path("/proc/self/maps").read_text()
    return next(Path(word) for word in maps.split() if Path(word).name.startswith(name))


def test_what_the_system_libraries_are() -> None:
    libc, loader = _facts(_mapped("libc.so.6")), _facts(_mapped("ld-linux"))
    assert (libc.role, loader.role) == (Role.GLIBC, Role.LOADER)
    assert libc.is_libc
    assert not loader.is_libc
    own = ctypes.CDLL("libc.so.6")

    def address(name: str) -> int:
        return ctypes.cast(getattr(own, name), ctypes.c_void_p).value or 0

    bias = address("dlopen") - libc.called["dlopen"]
    for name in ("pthread_create", "pthread_detach", "dlsym", "dlerror"):
        assert libc.called[name] + bias == address(name)
    # The last byte of one, and what is not exported between two of them.
    for name in ("malloc", "free", "malloc_trim", "posix_memalign"):
        assert libc.why_unsafe(address(name) + 4 - bias) == "malloc"
    assert libc.why_unsafe(address("malloc") - 0x1000 - bias) == "malloc"  # _int_malloc and others
    assert libc.why_unsafe(address("fork") - bias) in ("fork", "__libc_fork")
    for name in ("nanosleep", "read", "pthread_cond_wait", "printf", "waitpid", "poll"):
        assert libc.why_unsafe(address(name) - bias) == ""


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ("__libc_start_main malloc dlopen pthread_create __tls_get_addr", Role.MUSL),
        ("malloc free calloc je_arena", Role.ALLOCATOR),
        ("pthread_create pthread_exit", Role.OTHER),
    ],
)
def test_what_other_libraries_are(tmp_path: Path, names: str, role: Role) -> None:
    source, built = tmp_path / "made.c", tmp_path / "made.so"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names.split()))
    flags = ("-fno-builtin", "-w", "-shared", "-fPIC", "-nostdlib")
    subprocess.run(["gcc", *flags, "-o", built, source], check=True)
    facts = _facts(built)
    assert facts.role is role
    assert facts.is_libc is (role is Role.OTHER or "pthread_create" in names)


def test_a_script_is_no_library(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    assert _facts(script) == LibraryFacts(Role.OTHER, {}, ())


def test_each_memory_path_is_another_and_leads_to_the_same_file(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        paths = {memory_path(file.fileno()) for _ in range(100)}
        assert len(paths) == 100
        assert {Path(path).stat().st_ino for path in paths} == {os.fstat(file.fileno()).st_ino}


def test_a_file_in_place_of_memory_is_not_written_to(tmp_path: Path) -> None:
    pid = os.getpid()
    memory_fd = os.memfd_create("memory")
    with (tmp_path / "precious").open("w+b") as precious:
        with pytest.raises(OSError, match="another file"):
            fill_memory(pid, precious.fileno(), b"library")
        assert os.fstat(precious.fileno()).st_size == 0
        fill_memory(pid, memory_fd, b"library")
        assert os.pread(memory_fd, 100, 0) == b"library"
        with pytest.raises(OSError, match="another file"):  # it has something in it by now
            fill_memory(pid, memory_fd, b"library")
    os.close(memory_fd)


def test_a_file_is_put_where_nobody_else_can_change_it(tmp_path: Path) -> None:
    # Of this process, whose root is the host's: /tmp belongs to root, and is sticky.
    file = deliver_file(os.getpid(), os.getuid(), "library.so", b"library")
    path = Path(file.path)
    assert path.read_bytes() == b"library"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    file.remove()
    assert not path.parent.exists()


def test_what_was_left_behind_is_removed() -> None:
    def deliver() -> DeliveredFile:
        return deliver_file(os.getpid(), os.getuid(), "library.so", b"library")

    left, other, recent = deliver(), deliver(), deliver()
    (Path(other.path).parent / "more").touch()
    for file in (left, other):
        os.utime(Path(file.path).parent, (0, 0))
    deliver().remove()
    assert not Path(left.path).parent.exists()
    assert [path.name for path in Path(other.path).parent.iterdir()] == ["more"]  # not ours
    assert Path(recent.path).exists()
    (Path(other.path).parent / "more").unlink()
    for file in (left, other, recent):
        file.remove()
    assert not Path(other.path).parent.exists()
