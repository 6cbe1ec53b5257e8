# SPDX-License-Identifier: Apache-2.0
"""What `aiflame doctor` makes of findings; tests/bpf/test_doctor_real.py runs the real checks."""

from __future__ import annotations

import errno
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support
from aiflame.agent import kernelfs, rights
from aiflame.agent.doctor import cpu, host, out
from aiflame.agent.doctor.base import Check, Context, Finding, Result, Status, ok, run_checks, warn
from aiflame.agent.doctor.checks import AGENT_CHECKS, CHECKS, TARGET_CHECKS
from aiflame.agent.doctor.text import as_json, exit_code, lines, summary
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import checks, loader
from aiflame.agent.kernel.bytecode import Refused
from aiflame.agent.rights import Capability
from aiflame.agent.symbols.kallsyms import KernelSymbols, KernelSymbolsHidden

ALL_IDS = [check.id for check in (*CHECKS, *TARGET_CHECKS)]
AGENT_IDS = [check.id for check in (*AGENT_CHECKS, *TARGET_CHECKS)]


def _check(
    name: str, outcome: Finding | Exception | None = None, needs: tuple[str, ...] = ()
) -> Check:
    def find(_: Context) -> Finding:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome or ok("fine")

    return Check(name, find, needs=needs)


def _result(name: str, status: Status, limit: str = "") -> Result:
    return Result(Check(name, lambda _: ok(""), limit), Finding(status, "as found"))


def _statuses(*table: Check, left_out: tuple[str, ...] = ()) -> list[str]:
    return [r.finding.status.value for r in run_checks(table, Context(), left_out)]


def test_ids_are_unique_and_tell_their_group() -> None:
    for ids in (ALL_IDS, AGENT_IDS):
        assert len(set(ids)) == len(ids)
    for name in {*ALL_IDS, *AGENT_IDS}:
        assert re.fullmatch(r"(os|cpu|bpf|gpu|out|target|agent)\.[a-z0-9_]+", name)


@pytest.mark.parametrize("checks", [CHECKS, AGENT_CHECKS])
def test_what_a_check_needs_comes_before_it(checks: tuple[Check, ...]) -> None:
    seen: set[str] = set()
    for check in (*checks, *TARGET_CHECKS):
        assert set(check.needs) <= seen
        seen.add(check.id)


def test_failure_skips_what_builds_on_it_and_nothing_else() -> None:
    table = (
        _check("a.first", EnvironmentUnfit("no such thing", "buy one")),
        _check("a.second", needs=("a.first",)),
        _check("a.third", needs=("a.second",)),
        _check("b.other"),
    )
    results = list(run_checks(table, Context(), ()))
    assert [r.finding.status.value for r in results] == ["FAIL", "skip", "skip", "ok"]
    assert results[0].finding.cure == "buy one"
    assert results[2].finding.text == "not tried, because a.first failed"


def test_check_that_is_left_out_does_not_stop_what_needs_it() -> None:
    table = (
        _check("a.first", EnvironmentUnfit("no")),
        _check("a.second", needs=("a.first",)),
    )
    assert _statuses(*table, left_out=("a.first",)) == ["skip", "ok"]


def test_warning_does_not_stop_what_needs_it() -> None:
    table = (_check("a.first", warn("hm", None)), _check("a.second", needs=("a.first",)))
    assert _statuses(*table) == ["warn", "ok"]


def test_refusal_by_the_system_is_a_failure_with_its_words() -> None:
    (result,) = run_checks(
        [_check("a.first", PermissionError(13, "Permission denied"))], Context(), ()
    )
    assert result.finding.status is Status.FAIL
    assert "Permission denied" in result.finding.text


def test_words_of_the_compiler_are_shown_only_when_asked_for() -> None:
    error = EnvironmentUnfit("the programs were not accepted:\nR1 invalid\n\nR2 \033[2Jinvalid")
    (result,) = run_checks([_check("bpf.load", error)], Context(), ())
    brief = lines(result, 8, is_coloured=False, is_verbose=False)
    assert brief == [
        " FAIL  bpf.load  the programs were not accepted",
        "       3 more lines: aiflame doctor -v",
    ]
    full = lines(result, 8, is_coloured=False, is_verbose=True)
    assert full[1:] == ["       | R1 invalid", "       |", "       | R2 \ufffd[2Jinvalid"]


def test_finding_is_one_line_and_its_cure_another() -> None:
    result = Result(_check("out.cache"), warn("a\nname with a line break", "do this"))
    assert lines(result, 10, is_coloured=False, is_verbose=False) == [
        " warn  out.cache   a\ufffdname with a line break",
        "       fix: do this",
    ]


def test_colour_changes_nothing_but_the_colour() -> None:
    for status in Status:
        plain, coloured = (
            lines(_result("a.b", status), 3, is_coloured, False) for is_coloured in (False, True)
        )
        assert coloured != plain
        assert [re.sub(r"\033\[[\d;]*m", "", line) for line in coloured] == plain


@pytest.mark.parametrize(
    ("results", "expected", "code"),
    [
        (
            [_result("bpf.sample", Status.OK), _result("bpf.off_cpu", Status.OK)],
            "2 ok: recording on and off the CPU will work.",
            0,
        ),
        (
            [
                _result("bpf.sample", Status.OK),
                _result("bpf.off_cpu", Status.OK),
                _result("a.b", Status.WARN, "no names"),
                _result("a.c", Status.WARN, "no disk"),
            ],
            "2 ok, 2 warn: recording on and off the CPU will work,"
            " with limits (no names; no disk).",
            0,
        ),
        (
            [_result("bpf.sample", Status.OK), _result("bpf.off_cpu", Status.SKIP)],
            "1 ok, 1 skip: recording on the CPU will work; off the CPU was not tried.",
            0,
        ),
        (
            [_result("bpf.sample", Status.SKIP)],
            "0 ok, 1 skip: nothing found that prevents recording, but it was not tried.",
            0,
        ),
        (
            [_result("bpf.btf", Status.FAIL), _result("a.b", Status.WARN, "no names")],
            "0 ok, 1 warn, 1 FAIL: recording will not work here; report and stats will.",
            3,
        ),
        (
            [_result("bpf.sample", Status.OK), _result("target.visible", Status.FAIL)],
            "1 ok, 1 FAIL: this process cannot be recorded; others can.",
            3,
        ),
        (
            [_result("bpf.sample", Status.OK), _result("agent.config", Status.FAIL)],
            "1 ok, 1 FAIL: the agent will not start; record will work.",
            3,
        ),
    ],
)
def test_summary_says_what_will_work(results: list[Result], expected: str, code: int) -> None:
    assert summary(results) == expected
    assert exit_code(results) == code


def test_json_has_a_schema_and_keeps_every_finding() -> None:
    result = Result(_check("bpf.load"), Finding(Status.FAIL, "refused", "be root", "R1\nR2"))
    assert as_json([result], {"kernel": "6.1"}) == {
        "schema": 1,
        "kernel": "6.1",
        "exit_code": 3,
        "summary": "0 ok, 1 FAIL: recording will not work here; report and stats will.",
        "checks": [
            {
                "id": "bpf.load",
                "status": "fail",
                "finding": "refused",
                "cure": "be root",
                "details": "R1\nR2",
            }
        ],
    }


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("[none] integrity confidentiality\n", "none"),
        ("none [integrity] confidentiality\n", "integrity"),
        ("none integrity [confidentiality]\n", "confidentiality"),
        (None, None),
    ],
)
def test_only_confidentiality_lockdown_prevents_recording(
    tmp_path: Path, text: str | None, mode: str | None
) -> None:
    file = tmp_path / "lockdown"
    if text is not None:
        file.write_text(text)
    assert checks.lockdown_mode(file) == mode
    if mode == "confidentiality":
        with pytest.raises(EnvironmentUnfit, match="lockdown"):
            checks.require_no_lockdown(file)
    else:
        checks.require_no_lockdown(file)


class _LoaderOf:
    """A kernel that refuses all programs, with a verifier's last words."""

    bytecode = SimpleNamespace(compiler="another one")

    def __init__(self, words: str) -> None:
        self._log = f"24: (85) call 4\n{words}\nprocessed 23 insns (limit 1000000)"

    def load(self, names: object) -> dict[str, int]:
        del names
        raise Refused("on_clock", OSError(errno.EINVAL, os.strerror(errno.EINVAL)), self._log)

    def replace(self, bytecode: object) -> bool:
        raise AssertionError(f"another compiler is asked for {bytecode}")


def _refusal(monkeypatch: pytest.MonkeyPatch, words: str, compiler: str | None) -> EnvironmentUnfit:
    monkeypatch.setattr(loader.compile, "compiler_words", lambda: compiler)
    kernel: Any = _LoaderOf(words)
    with pytest.raises(EnvironmentUnfit) as caught:
        loader._load(kernel, ["on_clock"], kernel)
    return caught.value


@pytest.mark.parametrize("helper", ["read_kernel#113", "read_kernel_str#115", "read#4"])
@pytest.mark.parametrize("words", ["unknown func", "program of this type cannot use helper"])
def test_lockdown_is_named_where_only_the_verifier_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, helper: str
) -> None:
    # GIVEN a container, which has no securityfs
    checks.require_no_lockdown(tmp_path / "lockdown")
    # WHEN the kernel refuses a program THEN it is said as where there is one
    said = _refusal(monkeypatch, f"{words} bpf_probe_{helper}", "a compiler")
    (tmp_path / "lockdown").write_text("none integrity [confidentiality]\n")
    with pytest.raises(EnvironmentUnfit) as caught:
        checks.require_no_lockdown(tmp_path / "lockdown")
    assert (str(said), said.hint) == (str(caught.value), caught.value.hint)


def test_what_lockdown_does_not_keep_is_no_lockdown(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _refusal(monkeypatch, "unknown func bpf_probe_read_user#112", None)
    assert "unknown func bpf_probe_read_user#112" in str(said) and "lockdown" not in str(said)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "PyPI's unrelated package"),
        ("raise ImportError('no bcc here')", "not installed"),
        ("raise OSError('libbcc.so.0: cannot open')", r"does not import: OSError: libbcc\.so\.0"),
    ],
)
def test_wrong_bcc_is_named_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/__init__.py").write_text(source)
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), others])))
    with pytest.raises(EnvironmentUnfit, match=message) as caught:
        checks.require_compiler()
    assert "python3-bpfcc" in (caught.value.hint or "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("level", "status"), [("126\n", Status.WARN), ("127\n", Status.OK), ("", Status.OK)]
)
def test_kernel_that_cuts_stacks_shorter_than_aiflame_is_named(
    monkeypatch: pytest.MonkeyPatch, level: str, status: Status
) -> None:
    monkeypatch.setattr(kernelfs, "read_text", lambda *_: level)
    assert cpu.perf_event_max_stack(Context()).status is status


@pytest.mark.parametrize(("level", "cure"), [("1", "run as root"), ("2", "sysctl")])
def test_hidden_kernel_names_are_a_warning_with_the_cure_that_helps(
    monkeypatch: pytest.MonkeyPatch, level: str, cure: str
) -> None:
    def load() -> KernelSymbols:
        raise KernelSymbolsHidden("hidden", "sudo sysctl kernel.kptr_restrict=1")

    monkeypatch.setattr(KernelSymbols, "load", load)
    monkeypatch.setattr(kernelfs, "read_text", lambda *_: level)
    finding = cpu.kptr_restrict(Context())
    assert finding.status is Status.WARN
    assert cure in (finding.cure or "")


def test_folder_that_takes_files_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert out.folder(Context()) == ok(f"files can be made in {tmp_path}")
    assert not list(tmp_path.iterdir())


def test_folder_that_takes_no_files_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    finding = out.folder(Context())
    assert finding.status is Status.WARN
    assert "-o" in (finding.cure or "")


@pytest.mark.parametrize(
    ("level", "status"), [("3\n", Status.WARN), ("2\n", Status.OK), ("", Status.OK)]
)
def test_only_the_scope_that_forbids_all_reading_is_a_limit(
    monkeypatch: pytest.MonkeyPatch, level: str, status: Status
) -> None:
    monkeypatch.setattr(kernelfs, "read_text", lambda *_: level)
    assert host.ptrace_scope(Context()).status is status


@pytest.mark.parametrize(
    ("setting", "missing", "status", "words"),
    [
        ("0", [], Status.OK, "kernel.task_delayacct=1, set before targets start"),
        ("", [Capability.NET_ADMIN], Status.OK, "delay accounting is off"),
        ("1", [], Status.OK, "delay accounting is on"),
        ("1", [Capability.NET_ADMIN], Status.WARN, "takes CAP_NET_ADMIN"),
    ],
)
def test_what_delay_accounting_would_add_is_said_here(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    missing: list[Capability],
    status: Status,
    words: str,
) -> None:
    monkeypatch.setattr(kernelfs, "read_text", lambda *_: f"{setting}\n")
    monkeypatch.setattr(rights, "missing", lambda _: missing)
    found = host.delay_accounting(Context())
    assert (found.status, words in found.text) == (status, True)


@pytest.mark.parametrize(("free", "status"), [(10**6, Status.WARN), (10**12, Status.OK)])
def test_nearly_full_disk_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, free: int, status: Status
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert out.space(Context()).status is status


@pytest.mark.parametrize(("free", "status"), [(10**6, Status.WARN), (10**12, Status.OK)])
def test_room_for_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: Status
) -> None:
    monkeypatch.setattr(out, "recordings_directory", lambda: tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    finding = out.recordings(Context())
    assert finding.status is status
    assert str(tmp_path) in finding.text


def test_cache_that_cannot_be_made_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(out, "cache_dir", lambda: in_the_way / "aiflame")
    assert out.cache(Context()).status is Status.WARN
    monkeypatch.setattr(out, "cache_dir", lambda: tmp_path / "aiflame")
    assert out.cache(Context()).status is Status.OK
    assert not list((tmp_path / "aiflame").iterdir())


def test_unknown_id_is_a_usage_error_that_lists_the_known(
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_aiflame("doctor", "--skip-checks", "os.linux,os.magic")
    assert done.returncode == 2
    assert "no such check: os.magic" in done.stderr
    assert "bpf.load" in done.stderr
    assert not done.stdout


def test_every_check_can_be_left_out(
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_aiflame("doctor", "--pid", "1", "--skip-checks", ",".join(ALL_IDS))
    assert done.returncode == 0
    *shown, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in shown] == [["skip", name] for name in ALL_IDS]
    assert "was not tried" in last


def test_configuration_without_the_agent_is_a_usage_error(
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_aiflame("doctor", "--config", "/etc/aiflame/agent.toml")
    assert done.returncode == 2
    assert "aiflame doctor --agent --config /etc/aiflame/agent.toml" in done.stderr


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_colour_is_for_terminals_without_no_color(no_color: str, is_coloured: bool) -> None:
    ours, theirs = pty.openpty()
    command = [*support.AIFLAME, "doctor", "--skip-checks", ",".join(ALL_IDS)]
    environment = {**os.environ, "NO_COLOR": no_color}
    subprocess.run(command, stdout=theirs, env=environment, check=True, timeout=60)
    os.close(theirs)
    # What was written stays readable; the terminal's own buffer holds more than these few lines.
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"os.linux" in shown
    assert (b"\033[" in shown) is is_coloured
