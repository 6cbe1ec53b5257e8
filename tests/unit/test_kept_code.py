# SPDX-License-Identifier: Apache-2.0
"""Code that captures keep: what is kept of it, and kernels that a report lists from it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from aiflame.agent import cli
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.devices.listings import with_listings
from aiflame.agent.file_questions import BadAnswer, Question
from aiflame.agent.inspector import tools
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import CodeObject
from aiflame.agent.model.profile import Loss, Profile
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.gpu.base import CodeKey, KernelSample
from aiflame.gpu.nvidia import disassembly
from aiflame.gpu.nvidia.code import KeptCode
from aiflame.gpu.nvidia.cubin import unneeded_for
from fatbins import needs_nvcc, needs_nvdisasm
from helper_memory import Host
from hypothesis import given, settings
from hypothesis import strategies as st

T = TypeVar("T")

_SOURCE = """extern "C" __global__ void scale(float *p, float f)
{
    p[threadIdx.x] = __sinf(p[threadIdx.x]) * f;
}
extern "C" __global__ void fill(float *p, float f)
{
    p[threadIdx.x] = f;
    __syncthreads();
    p[threadIdx.x + 1] += f;
}
"""
_META: dict[str, str | int] = {
    "aiflame_version": "1",
    "started_unix_ns": 1,
    "duration_ns": 10**9,
    "period_ns": 10**7,
    "command": "aiflame record",
    "target": "all",
    "complete": 1,
}


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("cubins")
    (folder / "k.cu").write_text(_SOURCE)
    command = ["nvcc", "-cubin", "-arch=sm_90", "-lineinfo", "-o", "k.cubin", "k.cu"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "k.cubin").read_bytes()


def _capture(path: Path, *objects: CodeObject, names: tuple[str, ...] = ("scale", "fill")) -> Path:
    """A capture in which two kernels of each code object were sampled, and none is listed."""
    writer = CaptureWriter(path)
    writer.put_meta(_META)
    writer.put("processes", [(1, 100, 1, "train", "", "", "", "", 0, None)])
    writer.put("devices", [(1, "nvidia", "H200", 2, "", 0, "")])
    writer.put("stall_reasons", [(1, "nvidia", "smsp__pcsamp_warps_issue_stalled_barrier")])
    code = 0
    for number, one in enumerate(objects, 1):
        writer.put("code_objects", [(number, one.family, one.size_bytes, one.content)])
        for name in names:
            code += 1
            writer.put("kernels", [(code, 1, "cuda", name, "")])
            writer.put("kernel_codes", [(code, code, None, 0, number)])
            writer.put("instructions", [(code, 16, "", "", 0)])
            writer.put("device_samples", [(0, 1, code, 16, 1, None, 0, 10, 5)])
    writer.put("losses", [("kernel_not_disassembled", code, "not known"), ("ring_full", 1, "lost")])
    writer.commit()
    writer.close()
    return path


def _packed(data: bytes, family: str = "nvidia") -> CodeObject:
    return CodeObject(family, len(data), zlib.compress(data))


def _sass(profile: Profile) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in profile.gpu.instructions:
        name = profile.gpu.kernels[profile.gpu.codes[one.code].kernel].name
        found.setdefault(name, []).append(one.text)
    return found


@needs_nvcc
@needs_nvdisasm
def test_a_report_lists_kernels_from_the_code_that_its_capture_has(
    cubin: bytes, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    # GIVEN a capture of a machine without nvdisasm
    capture = _capture(tmp_path / "run.aiflame", _packed(cubin))
    before = capture.read_bytes()
    # WHEN a report is made where there is one
    profile = with_listings(read_capture(capture))
    # THEN it has instructions, with their lines
    sass = _sass(profile)
    assert any("MUFU.SIN" in text for text in sass["scale"])
    assert any("BAR.SYNC" in text for text in sass["fill"])
    assert all(text for every in sass.values() for text in every)
    sine = next(one for one in profile.gpu.instructions if "MUFU.SIN" in one.text)
    assert (Path(sine.file).name, sine.line) == ("k.cu", 3)
    assert all(code.size_bytes % 128 == 0 and code.size_bytes for code in profile.gpu.codes)
    # AND they are missing no more
    assert [(loss.name, loss.count) for loss in profile.losses] == [("ring_full", 1)]
    # AND that is what a user sees, while the capture stays as it is
    assert cli.main(["report", str(capture), "-f", "folded", "--view", "gpu", "-o", "-"]) == 0
    assert b";scale_[G];k.cu:3_[G];S2R R5, SR_TID.X_[g];" in capsysbinary.readouterr().out
    assert cli.main(["report", str(capture), "-o", str(tmp_path / "page.html")]) == 0
    assert cli.main(["stats", str(capture), "--view", "gpu"]) == 0
    assert b"kernel_not_disassembled" not in capsysbinary.readouterr().err
    assert capture.read_bytes() == before


@needs_nvcc
def test_without_a_disassembler_a_report_is_as_it_was_but_for_lines(
    cubin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disassembly, "programs", lambda: iter(()))
    profile = with_listings(read_capture(_capture(tmp_path / "run.aiflame", _packed(cubin))))
    assert _sass(profile) == {"scale": [""], "fill": [""]}
    assert {one.line for one in profile.gpu.instructions} <= {*range(1, 11)}
    assert profile.losses[0] == Loss("kernel_not_disassembled", 2, "not known")


_BOMB = zlib.compress(bytes(80 << 20))


@pytest.mark.parametrize(
    "code",
    [
        CodeObject("nvidia", 100, b"no zlib"),
        CodeObject("nvidia", 100, b""),
        CodeObject("nvidia", 0, zlib.compress(b"")),
        CodeObject("nvidia", 5, zlib.compress(b"1234")),
        CodeObject("nvidia", 3, zlib.compress(b"1234")),
        CodeObject("nvidia", 80 << 20, _BOMB),
        CodeObject("nvidia", 64 << 20, _BOMB),
        CodeObject("nvidia", 1 << 62, _BOMB),
        CodeObject("../../bin/sh", 4, zlib.compress(b"1234")),
        _packed(b"\x7fELF" + bytes(10_000)),
        _packed(b"#!/bin/sh\ntouch /tmp/x\n"),
    ],
    ids=lambda code: f"{code.family[:6]}-{code.size_bytes}-{len(code.content)}",
)
def test_code_that_cannot_be_leaves_a_report_as_it_is(tmp_path: Path, code: CodeObject) -> None:
    # GIVEN a capture from elsewhere
    profile = read_capture(_capture(tmp_path / "run.aiflame", code, code))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun_s = time.monotonic()
    listed = with_listings(profile)
    assert listed.gpu.instructions == profile.gpu.instructions
    assert listed.losses == profile.losses
    # THEN it takes no more than the largest code object does
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000
    assert time.monotonic() - begun_s < 30


@needs_nvcc
@needs_nvdisasm
@settings(max_examples=5, deadline=None)
@given(where=st.integers(0, 9_000), junk=st.binary(min_size=4, max_size=64))
@pytest.mark.breadth
def test_damaged_code_costs_itself_alone(
    cubin: bytes, tmp_path_factory: pytest.TempPathFactory, where: int, junk: bytes
) -> None:
    damaged = bytearray(cubin)
    damaged[where : where + len(junk)] = junk
    path = tmp_path_factory.mktemp("damaged") / "run.aiflame"
    profile = with_listings(read_capture(_capture(path, _packed(bytes(damaged)), _packed(cubin))))
    sound = [one.text for one in profile.gpu.instructions if one.code in (2, 3)]
    assert any("MUFU.SIN" in text for text in sound)


@needs_nvcc
@needs_nvdisasm
def test_code_that_is_never_read_to_its_end_leaves_time_for_other_code(
    cubin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN damaged code, on which each nvdisasm computes for as long as it may
    now_s, damaged = [0.0], cubin[:-1] + b"!"

    def run_tool(path: str, arguments: list[str], data: bytes) -> bytes | None:
        if data == cubin:
            return tools.run_tool(path, arguments, data)
        now_s[0] += tools._MAX_CPU_S
        return None

    monkeypatch.setattr("aiflame.agent.devices.listings.run_tool", run_tool)
    for module in ("aiflame.agent.devices.listings", "aiflame.gpu.nvidia.listings"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    # WHEN it is the most sampled
    objects = _packed(damaged), _packed(cubin)
    profile = with_listings(read_capture(_capture(tmp_path / "run.aiflame", *objects)))
    # THEN other code is listed
    assert any("MUFU.SIN" in one.text for one in profile.gpu.instructions)


def test_a_report_waits_for_listings_no_longer_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN much code, of which each takes three seconds
    now_s, asked = [0.0], []

    def lists(tools: object, code: bytes, sampled: object) -> dict[str, Any]:
        asked.append(code)
        now_s[0] += 3
        return {}

    monkeypatch.setattr("aiflame.agent.devices.listings.LISTS", {"nvidia": lists})
    monkeypatch.setattr("aiflame.agent.devices.listings.time.monotonic", lambda: now_s[0])
    objects = [_packed(b"%d" % number) for number in range(20)]
    with_listings(read_capture(_capture(tmp_path / "run.aiflame", *objects)))
    assert len(asked) == 4


# ---- what is kept ------------------------------------------------------------------------------


class _Host(Host):
    """A host that reads code in this process: it is nvcc's, or none."""

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        return _answered(data, question)


def _answered(data: bytes, question: Question[T]) -> T:
    fd = os.memfd_create("cubin")
    try:
        os.write(fd, data)
        # As the parser's answer comes.
        answer = json.loads(json.dumps(question.read(TargetFile(fd), *question.arguments)))
        return question.checked(answer)
    finally:
        os.close(fd)


def _sample(name: str, process: int = 3, code: int = 7, count: int = 5) -> KernelSample:
    return KernelSample(0, 0, CodeKey(process, None, name, code), 16, "r", count)


def _key(name: str, process: int = 3, code: int = 7) -> CodeKey:
    return _sample(name, process, code).code


@needs_nvcc
def test_a_cubin_is_kept_as_it_is(cubin: bytes) -> None:
    kept = KeptCode(cast(Any, _Host()), lambda device: 90)
    kept.keep([_sample("scale")], lambda code: cubin)
    assert kept.code(_key("scale")) == cubin
    # AND of what was not sampled nothing is
    assert kept.code(_key("fill")) == b""
    assert kept.code(_key("scale", code=8)) == b""


@needs_nvcc
@needs_nvdisasm
def test_of_a_large_cubin_what_was_sampled_is_kept(
    cubin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiflame.gpu.nvidia.code._MAX_WHOLE_BYTES", 100)
    kept = KeptCode(cast(Any, _Host()), lambda device: 90)
    kept.keep([_sample("scale")], lambda code: cubin)
    found = kept.code(_key("scale"))
    # THEN it is smaller when it is compressed
    assert len(found) == len(cubin)
    assert len(zlib.compress(found)) < len(zlib.compress(cubin)) - 300
    # AND what was sampled has the same instructions and lines
    from_part, from_all = (
        with_listings(read_capture(_capture(tmp_path / name, _packed(data), names=("scale",))))
        for name, data in (("part.aiflame", found), ("all.aiflame", cubin))
    )
    assert from_part.gpu.instructions == from_all.gpu.instructions
    assert any("MUFU.SIN" in text for text in _sass(from_part)["scale"])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_parts_of_what_is_no_cubin(data: bytes, is_elf: bool) -> None:
    head = bytes.fromhex("7f454c460201010000000000000000000200be00") if is_elf else b""
    try:
        parts = _answered(head + data, unneeded_for(["scale"], len(head + data)))
    except (BadTargetFile, BadAnswer):
        return
    assert all(offset + size <= len(head + data) for offset, size in parts or ())


@pytest.mark.parametrize("answer", [7, [[0]], [[0, 11]], [[-1, 1]], [[10, 1]], [["a", 1]], [None]])
def test_parts_that_no_sound_parser_gives(answer: Any) -> None:
    with pytest.raises(BadAnswer):
        unneeded_for(["scale"], 10).checked(answer)


def test_what_is_known_of_objects_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.gpu.nvidia.code._MAX_OBJECTS", 100)
    host = Host()
    kept = KeptCode(cast(Any, host), lambda device: 90)
    # GIVEN processes that come and go, whose code was never kept where they ran
    for process in range(1000):
        kept.keep([_sample("k", process, code) for code in (1, 2)], lambda code: b"")
        kept.forget(process)
    assert not host.lost
    assert not kept._bytes and not kept._read and not kept._kept
    # AND one that invents objects
    for _ in range(2):
        kept.keep([_sample("k", 1, code) for code in range(1, 301)], lambda code: b"")
    assert len(kept._bytes) == 100
    assert host.lost == {LossKind.DEVICE_CODE_NOT_KEPT: 2 * 200}


def test_names_of_kernels_in_objects_do_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.gpu.nvidia.code._MAX_NAMES", 10)
    kept = KeptCode(cast(Any, Host()), lambda device: 90)
    kept.keep([_sample(f"k{number}") for number in range(50)], lambda code: b"code")
    kept.keep([_sample("k0", count=1)], lambda code: b"code")
    assert [bool(kept.code(_key(f"k{number}"))) for number in range(12)] == [True] * 10 + [
        False
    ] * 2


def test_one_process_does_not_take_the_room_of_all() -> None:
    host = _Host()
    kept = KeptCode(cast(Any, host), lambda device: 90)
    large = bytes(40 << 20)
    for process in (1, 2):
        code_of = lambda code, process=process: b"%d %d" % (process, code) + large  # noqa: E731
        kept.keep([_sample("k", process, code) for code in (1, 2)], code_of)
    # THEN each has one of its two, of 40 MB
    assert [bool(kept.code(_key("k", process, 1))) for process in (1, 2)] == [True, True]
    assert host.lost == {LossKind.DEVICE_CODE_NOT_KEPT: 2}


# ---- the program -------------------------------------------------------------------------------


def _as_user(script: str) -> bytes | None:
    """What a shell says that a user who is not root has run as a tool."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(4711, 4711, 4711)
            os.setresuid(4711, 4711, 4711)
            # What other tests have loaded here may be more than a tool's child may have.
            tools._MAX_MEMORY_BYTES = resource.RLIM_INFINITY
            found = tools.run_tool("/bin/sh", ["-c", script], b"")
            os.write(writing, b"-" if found is None else b"+" + found)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    return None if said == b"-" else said.removeprefix(b"+")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_tool_of_a_user_changes_none_of_the_users_files() -> None:
    # GIVEN files of the user's, which pytest's folders would hide
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    file = folder / "file"
    file.write_text("kept")
    try:
        for path in (folder, file):
            os.chown(path, 4711, 4711)
        # WHEN what is run as the user tries to change them
        for script in (
            f"echo x >> {file}",
            f": > {file}",
            f"echo x > {folder}/new",
            "exec /bin/rm -f " + str(file),
            f"exec /bin/mv {file} {folder}/other",
            f"exec /bin/mkdir {folder}/made",
            f"exec /bin/ln -s / {folder}/link",
        ):
            _as_user(script)
        # THEN they are as they were
        assert [path.name for path in folder.iterdir()] == ["file"]
        assert file.read_text() == "kept"
        # AND it can do what it is for
        assert _as_user("echo listed") == b"listed\n"
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_tool_of_a_user_does_not_run_where_it_could_change_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tools, "_forbid_changes", lambda: False)
    assert _as_user("echo listed") is None
    # Root's has become nobody.
    assert tools.run_tool("/bin/sh", ["-c", "echo listed"], b"") == b"listed\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_tool_runs_however_many_files_its_caller_has_open() -> None:
    with contextlib.ExitStack() as files:
        for _ in range(tools._MAX_DESCRIPTORS):
            files.enter_context(open("/dev/null", "rb"))  # noqa: PTH123 - a descriptor, no path
        assert _as_user("echo listed") == b"listed\n"
