# SPDX-License-Identifier: Apache-2.0
"""Captures: what is written is what is read, and what is no whole capture is said to be none."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiflame.agent import cli
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.schema import APPLICATION_ID, SCHEMA_VERSION
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.commands import store
from aiflame.agent.commands.record_accounts import put_accounts
from aiflame.agent.errors import AiflameError, CaptureError, DiskFull
from aiflame.agent.model.accounts import THREAD_ACCOUNT_DTYPE, Delay
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.gpu import (
    BUSY_UNKNOWN,
    NO_END,
    NO_SIZE,
    NONE,
    ApiFunction,
    CodeObject,
    Device,
    Instruction,
    Kernel,
    KernelCode,
    Operation,
    StallReason,
    Tier,
)
from aiflame.agent.model.profile import (
    Binary,
    FrameKind,
    Function,
    GilState,
    Loss,
    Process,
    SampleClass,
    StopReason,
    Thread,
)
from aiflame.agent.processes.taskstats import ProcessDelay
from aiflame.agent.recording.kernel_accounts import GROWTH_DTYPE, Growth

_MS = 1_000_000

_META: dict[str, str | int] = {
    "aiflame_version": "0.1.0",
    "started_unix_ns": 1_795_000_000 * 10**9,
    "duration_ns": 2_000 * _MS,
    "period_ns": 10 * _MS,
    "command": "aiflame record -p 100",
    "target": "server (pid 100)",
    "recorder_cpu_ns": 15 * _MS,
    "recorder_peak_rss_bytes": 48 << 20,
    "fact:kernel": "6.8.0",
    "fact:host": "testhost",
    "complete": 1,
}

# Ids begin anywhere and have gaps: a reader may rely on neither.
_ROWS: dict[str, list[tuple[object, ...]]] = {
    "processes": [
        (3, 100, 1, "server", "/opt/server", "/opt/server --fast", "/a", "ab" * 32, 0, None),
        (7, 200, 100, "helper", "", "", "/", "", 5 * _MS, 900 * _MS),
    ],
    "threads": [
        (2, 7, 200, "helper", 3 * _MS, 895 * _MS),
        (9, 3, 101, "worker", 40 * _MS, 2_000 * _MS),
    ],
    "binaries": [(1, "/opt/server", "abcd"), (4, "/lib/libx.so.1", "")],
    "mappings": [
        (3, 0x5000_0000, 0x5001_0000, 0x1000, 0x4FFF_F000, 1),
        (3, 0x7000_0000, 0x7000_2000, 0, 0x7000_0000, 4),
    ],
    "functions": [
        (5, 0, "main", 1, "src/main.c"),
        (6, 1, "do_sys_read", None, ""),
        (8, 2, "train", None, "train.py"),
    ],
    "frames": [(10, 8, 31, 0, 0), (20, 5, 12, 0x1040, 0), (30, 6, 0, 0xFFFF_8100, 1)],
    "stacks": [
        (1, 3, 1, 0, bytes(24), struct.pack("<3I", 20, 10, 30), 0),
        (6, 3, 0, 5, b"", b"", 0),
        (8, 7, 0, 2, bytes(8), struct.pack("<I", 20), 0),
    ],
    "samples": [
        (0, 8, 2, 0, 3, 30 * _MS),
        (0, 1, 9, 1, 1, 500 * _MS),
        (1, 1, 9, 1, 2, 700 * _MS),
        (1, 6, 9, 3, 1, 9),
        (1, 1, 9, 0, 4, 40 * _MS),
    ],
    "waits": [(1, 9, 600 * _MS, 700 * _MS, 5), (1, 9, 20 * _MS, 500 * _MS, 0)],
    "thread_accounts": [(9, 41 * _MS, 5 * _MS, 12, 1_000, 30, 0), (2, 3 * _MS, 0, 4, 0, 0, 1)],
    "delays": [(3, "blkio", 7, 30 * _MS), (7, "swapin", 1, 9)],
    "losses": [("ring_full", 2, "events that were lost")],
    "devices": [
        (4, "opencl", "PoCL", 2, "", 10 * _MS, "driver 1"),
        (8, "nvidia", "", 0, "no driver", 0, ""),
    ],
    "api_functions": [(2, "opencl", "clEnqueueNDRangeKernel", 0), (7, "opencl", "clFinish", 1)],
    "kernels": [(3, 3, "opencl", "scale", ""), (5, 3, "opencl", "", "made before the recording")],
    "kernel_codes": [(6, 3, 4, 512, 2), (7, 5, None, 0, 5)],
    "code_objects": [(2, "opencl", 9, b"listed"), (5, "nvidia", 12, b"unlisted")],
    "instructions": [(6, 16, "vmulps ymm0", "k.cl", 7), (6, 0, "push rbp", "", 0)],
    "stall_reasons": [(1, "opencl", "issuing")],
    "api_calls": [
        (0, 1, 9, 2, 3, 0, 5, 5_000, 0),
        (1, 1, 9, 2, 5, 0, 1, 100, 0),
        (1, 6, 9, 7, None, 0, 2, 0, 0),
    ],
    "api_events": [(7 * _MS, 1, 9, 2, 3, 0, 0x5000, 10, 1, 1, 64, 1, 1, 0)],
    "launches": [
        (1, 9, 2, 3, 0x5000, 7 * _MS, 8 * _MS, 9 * _MS, 3, 192),
        (1, 9, 2, 3, 0x6000, 7 * _MS, 7 * _MS, None, 1, 64),
    ],
    "device_samples": [(0, 4, 6, 16, 1, None, 0, 1000 * _MS, 30), (1, 4, 6, 0, 1, 6, 9, 9, 2)],
    "kernel_times": [
        (4, 3, 0x5000, 6, 7 * _MS, 9 * _MS, 2, 3 * _MS, None),
        (4, 3, 0, 6, 7 * _MS, 9 * _MS, 1, _MS, 1),
    ],
    "device_readings": [
        (8, 0, 1000 * _MS, 370, 5 << 30, 80 << 30),
        (8, 1000 * _MS, 2000 * _MS, None, 6 << 30, 80 << 30),
        (4, 0, 1000 * _MS, 1000, None, None),
    ],
}


@cache
def _whole() -> bytes:
    """The capture with all that is above."""
    with tempfile.TemporaryDirectory() as folder:
        return _write_changed(Path(folder) / "run.aiflame", None).read_bytes()


def _write(path: Path, *, meta: dict[str, str | int] | None = None, **rows: list) -> Path:
    if meta is not None or rows:
        return _write_changed(path, meta, **rows)
    path.write_bytes(_whole())
    return path


def _write_changed(path: Path, meta: dict[str, str | int] | None, **rows: list) -> Path:
    writer = CaptureWriter(path)
    writer.put_meta(_META if meta is None else meta)
    for table, own in _ROWS.items():
        writer.put(table, rows.get(table, own))
    writer.commit()
    writer.close()
    return path


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return _write(tmp_path / "run.aiflame")


def test_what_was_written_is_read(capture: Path) -> None:
    profile = read_capture(capture)
    recording = profile.recording
    assert recording.started_unix_ns == 1_795_000_000 * 10**9
    assert (recording.duration_ns, recording.period_ns) == (2_000 * _MS, 10 * _MS)
    assert (recording.command, recording.target) == ("aiflame record -p 100", "server (pid 100)")
    assert (recording.recorder_cpu_ns, recording.recorder_peak_rss_bytes) == (15 * _MS, 48 << 20)
    assert recording.facts == (("kernel", "6.8.0"), ("host", "testhost"))
    assert profile.processes == (
        Process(100, 1, "server", "/opt/server", "/opt/server --fast", "/a", "ab" * 32, 0, None),
        Process(200, 100, "helper", "", "", "/", "", 5 * _MS, 900 * _MS),
    )
    assert profile.threads == (
        Thread(1, 200, "helper", 3 * _MS, 895 * _MS),
        Thread(0, 101, "worker", 40 * _MS, 2_000 * _MS),
    )
    assert profile.binaries == (Binary("/opt/server", "abcd"), Binary("/lib/libx.so.1", ""))
    assert profile.functions == (
        Function(FrameKind.NATIVE, "main", 0, "src/main.c"),
        Function(FrameKind.KERNEL, "do_sys_read", None, ""),
        Function(FrameKind.PYTHON, "train", None, "train.py"),
    )
    assert profile.losses == (Loss("ring_full", 2, "events that were lost"),)


def test_a_capture_is_read_without_the_seconds_of_its_time(capture: Path) -> None:
    whole, some = read_capture(capture), read_capture(capture, with_spans=False)
    assert len(whole.spans) > 0
    assert len(some.spans) == 0
    assert some.samples.tolist() == whole.samples.tolist()
    assert some.waits.tolist() == whole.waits.tolist()
    assert some.stacks.frames.tolist() == whole.stacks.frames.tolist()


def test_the_device_half_that_was_written_is_read(capture: Path) -> None:
    gpu = read_capture(capture).gpu
    assert gpu.devices == (
        Device("opencl", "PoCL", Tier.STALLS, "", 10 * _MS, "driver 1"),
        Device("nvidia", "", Tier.LAUNCHES, "no driver", 0),
    )
    assert gpu.functions == (
        ApiFunction("opencl", "clEnqueueNDRangeKernel", Operation.LAUNCH),
        ApiFunction("opencl", "clFinish", Operation.SYNCHRONIZE),
    )
    assert gpu.kernels == (
        Kernel(0, "opencl", "scale", ""),
        Kernel(0, "opencl", "", "made before the recording"),
    )
    assert gpu.codes == (KernelCode(0, 1, 512), KernelCode(1, None, 0, 0))
    assert gpu.objects == (CodeObject("nvidia", 12, b"unlisted"),)
    assert gpu.instructions == (
        Instruction(0, 0, "push rbp", "", 0),
        Instruction(0, 16, "vmulps ymm0", "k.cl", 7),
    )
    assert gpu.reasons == (StallReason("opencl", "issuing"),)
    assert gpu.calls.tolist() == [
        (0, 0, 1, 0, 0, 0, 5, 5_000, 0),
        (1, 0, 1, 0, 1, 0, 1, 100, 0),
        (1, 1, 1, 1, NONE, 0, 2, 0, 0),
    ]
    assert [gpu.events[name].tolist() for name in ("start_ns", "queue", "grid", "block")] == [
        [7 * _MS],
        [0x5000],
        [[10, 1, 1]],
        [[64, 1, 1]],
    ]
    assert gpu.launches.tolist() == [
        (0, 1, 0, 0, 0x5000, 7 * _MS, 8 * _MS, 9 * _MS, 3, 192),
        (0, 1, 0, 0, 0x6000, 7 * _MS, 7 * _MS, NO_END, 1, 64),
    ]
    assert gpu.samples.tolist() == [
        (0, 0, 0, 16, 0, NONE, 0, 1000 * _MS, 30),
        (1, 0, 0, 0, 0, 1, 9, 9, 2),
    ]
    assert gpu.times.tolist() == [
        (0, 0, 0x5000, 1, 7 * _MS, 9 * _MS, 2, 3 * _MS, NONE),
        (0, 0, 0, 1, 7 * _MS, 9 * _MS, 1, _MS, 0),
    ]
    assert gpu.readings.tolist() == [
        (1, 0, 1000 * _MS, 370, 5 << 30, 80 << 30),
        (1, 1000 * _MS, 2000 * _MS, BUSY_UNKNOWN, 6 << 30, 80 << 30),
        (0, 0, 1000 * _MS, 1000, NO_SIZE, 0),
    ]


def test_a_capture_from_before_devices_were_known(capture: Path) -> None:
    tables = ("devices", "api_functions", "kernels", "kernel_codes", "instructions")
    gone = (*tables, "stall_reasons", "api_calls", "api_events", "device_samples", "kernel_times")
    gone = (*gone, "launches", "device_readings", "code_objects")
    _change(capture, *(f"DROP TABLE {table}" for table in gone), "PRAGMA user_version = 2")
    profile = read_capture(capture)
    assert len(profile.samples) == 4
    assert (profile.gpu.devices, len(profile.gpu.calls)) == ((), 0)


def test_a_process_that_is_removed_leaves_nothing(capture: Path) -> None:
    whole = read_capture(capture)
    # WHEN all that the server did is removed
    writer = CaptureWriter(capture, is_new=False)
    writer.remove_processes([True, False])
    writer.commit()
    writer.close()
    # THEN the other process has what it had
    profile = read_capture(capture)
    (helper,), (thread,) = profile.processes, profile.threads
    assert (helper, thread.name) == (whole.processes[1], "helper")
    assert profile.samples[["klass", "count", "ns"]].tolist() == [(0, 3, 30 * _MS)]
    assert profile.functions == whole.functions[:1]
    assert profile.binaries == whole.binaries[:1]
    assert profile.losses == whole.losses
    gpu = profile.gpu
    assert (gpu.devices, gpu.reasons) == (whole.gpu.devices, whole.gpu.reasons)
    assert not (gpu.kernels or gpu.codes or gpu.objects or gpu.instructions)
    assert not sum(map(len, (gpu.calls, gpu.launches, gpu.samples, gpu.times, profile.waits)))
    # AND no name of the server's is in the file, not even where rows were
    content = capture.read_bytes()
    for name in (b"--fast", b"worker", b"do_sys_read", b"train", b"libx", b"scale", b"vmulps"):
        assert name not in content, name


def test_processes_that_are_not_removed_stay_as_they_were(capture: Path) -> None:
    whole = read_capture(capture)
    writer = CaptureWriter(capture, is_new=False)
    writer.remove_processes([False, True])
    writer.commit()
    writer.close()
    profile = read_capture(capture)
    assert profile.processes == whole.processes[:1]
    assert profile.samples["ns"].sum() == whole.samples["ns"].sum() - 30 * _MS
    assert profile.functions == whole.functions
    assert profile.gpu.kernels == whole.gpu.kernels
    assert profile.gpu.samples.tolist() == whole.gpu.samples.tolist()
    assert b"helper" not in capture.read_bytes()


_WHOSE = Labels(
    "shop", container_id="ab" * 32, container="web", node="n1", extra=(("team", "a"), ("x", "b"))
)


def test_a_capture_says_whose_processes_were(capture: Path) -> None:
    assert read_capture(capture).labels == ()
    writer = CaptureWriter(capture, is_new=False)
    assert writer.processes() == read_capture(capture).processes
    writer.put_labels([_WHOSE, None])
    writer.commit()
    writer.close()
    assert read_capture(capture).labels == (_WHOSE, None)
    # A newer aiflame may know more of them, and one process has none of the names of today.
    _change(
        capture,
        "INSERT INTO process_labels VALUES (3, 'colour', 'red')",
        "INSERT INTO process_labels VALUES (7, 'colour', 'blue')",
    )
    assert read_capture(capture).labels == (_WHOSE, Labels(""))


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO process_labels VALUES (99, 'service', 'shop')",
        "INSERT INTO process_labels VALUES (3, 'service', x'07')",
        "INSERT INTO process_labels VALUES (3, x'00', 'shop')",
        "DROP TABLE process_labels",
    ],
)
def test_labels_of_no_process_are_damage(capture: Path, change: str) -> None:
    _change(capture, change)
    with pytest.raises(CaptureError, match="damaged capture"):
        read_capture(capture)


def test_a_capture_from_before_processes_had_labels(capture: Path) -> None:
    _change(capture, "DROP TABLE intervals", "DROP TABLE process_labels", "PRAGMA user_version = 8")
    assert read_capture(capture).labels == ()


def test_what_the_kernel_accounts_is_read(capture: Path) -> None:
    _change(capture, "INSERT INTO meta VALUES ('interrupted_ns', '77')")
    accounts = read_capture(capture).accounts
    assert accounts.threads.tolist() == [
        (1, 41 * _MS, 5 * _MS, 12, 1_000, 30, False),
        (0, 3 * _MS, 0, 4, 0, 0, True),
    ]
    assert accounts.delays == (Delay(0, "blkio", 7, 30 * _MS), Delay(1, "swapin", 1, 9))
    assert accounts.interrupted_ns == 77
    # A later kernel may tell more causes apart.
    _change(capture, "INSERT INTO delays VALUES (3, 'cosmic rays', 1, 1)")
    assert read_capture(capture).accounts.delays == accounts.delays


def test_accounts_are_of_the_newest_thread_and_process_of_a_number(tmp_path: Path) -> None:
    rest = (100, 1, "a", "", "", "/", "")
    processes = [(1, *rest, 0, 5), (2, *rest, 9, None)]
    threads = [(4, 1, 100, "a", 1, 1), (5, 2, 100, "b", 1, 1), (6, 2, 101, "b", 1, 1)]
    tables = {name: [] for name in _ROWS} | {"processes": processes, "threads": threads}
    writer = CaptureWriter(_write(tmp_path / "run.aiflame", **tables), is_new=False)
    rows = [(100, 100, 50, 5, 1, 2, 6), (100, 101, 40, 4, 3, 2, 0), (100, 999, 1, 1, 1, 1, 1)]
    delays = (ProcessDelay(100, "blkio", 3, 30), ProcessDelay(300, "blkio", 1, 1))
    # Those that have ended are named; the second was read once more, and the third is not there.
    ended = [(4, 20, 2, 1, 0, 0, True), (6, 39, 4, 3, 0, 0, True), (9, 1, 1, 1, 1, 1, True)]
    growth = Growth(
        np.array(rows, GROWTH_DTYPE),
        11,
        delays,
        np.array(ended, THREAD_ACCOUNT_DTYPE),
        (Delay(1, "swapin", 2, 22), Delay(2, "blkio", 1, 9), Delay(9, "blkio", 1, 1)),
    )
    put_accounts(writer, growth)
    writer.commit()
    writer.close()
    accounts = read_capture(writer.path).accounts
    assert sorted(accounts.threads.tolist()) == [
        (0, 20, 2, 1, 0, 0, True),
        (1, 50, 5, 1, 2, 6, False),
        (2, 40, 4, 3, 2, 0, False),
    ]
    assert accounts.delays == (Delay(0, "swapin", 2, 22), Delay(1, "blkio", 3, 30))
    assert accounts.interrupted_ns == 11


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE thread_accounts SET thread_id = 99",
        "UPDATE thread_accounts SET thread_id = 9",
        "UPDATE thread_accounts SET on_cpu_ns = -1",
        "UPDATE thread_accounts SET run_queue_ns = 9223372036854775807",
        "UPDATE delays SET process_id = 99",
        "UPDATE delays SET cause = x'00'",
        "UPDATE delays SET ns = -1",
        "UPDATE delays SET count = 'many'",
        "INSERT INTO meta VALUES ('interrupted_ns', '-1')",
        "INSERT INTO meta VALUES ('interrupted_ns', 'long')",
        "DROP TABLE thread_accounts",
        "DROP TABLE delays",
    ],
)
def test_accounts_that_cannot_be_are_damage(capture: Path, change: str) -> None:
    _change(capture, change)
    with pytest.raises(CaptureError, match="damaged capture"):
        read_capture(capture)


# As intervals were before version 11: one of five seconds.
_WHOLE_SECONDS = (
    "DROP TABLE intervals",
    "CREATE TABLE intervals (interval INTEGER PRIMARY KEY, seconds INTEGER NOT NULL)",
    "INSERT INTO intervals VALUES (0, 5)",
)


def test_a_capture_from_before_ends_were_accounted(capture: Path) -> None:
    without = "ALTER TABLE thread_accounts DROP COLUMN has_ended"
    _change(capture, without, *_WHOLE_SECONDS, "PRAGMA user_version = 10")
    profile = read_capture(capture)
    accounts = profile.accounts.threads
    assert accounts["on_cpu_ns"].tolist() == [41 * _MS, 3 * _MS]
    assert not accounts["has_ended"].any()
    assert profile.recording.window_s == 5


def test_a_capture_from_before_the_kernel_was_asked(capture: Path) -> None:
    gone = ("thread_accounts", "delays")
    without = [f"DROP TABLE {table}" for table in gone]
    _change(capture, *without, *_WHOLE_SECONDS, "PRAGMA user_version = 9")
    profile = read_capture(capture)
    assert len(profile.samples) == 4
    assert (len(profile.accounts.threads), profile.accounts.delays) == (0, ())


def test_a_store_is_told_whose_the_processes_of_a_capture_were(
    capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a capture of an agent
    writer = CaptureWriter(capture, is_new=False)
    writer.put_labels([_WHOSE, None])
    writer.commit()
    writer.close()
    inserted: list[tuple[str, bytes]] = []
    engine = SimpleNamespace(
        insert=lambda table, rows, token: inserted.append((table, rows)),
        query=lambda statement, parameters: SimpleNamespace(rows=[]),
        execute=lambda statement: None,
        close=lambda: None,
    )
    monkeypatch.setattr(store, "open_store", lambda name, is_read_only: engine)
    monkeypatch.setattr(store, "require", lambda engine: SimpleNamespace(keep_days=0))
    # WHEN it is added THEN each process is its container's, and what is nobody's has its own name
    assert cli.main(["store", "add", str(capture), "--store", "x", "--node", "n7"]) == 0
    rows = [json.loads(line) for _, some in inserted for line in some.splitlines()]
    samples = [row for row in rows if "comm" in row and "class" in row]
    assert {(row["node"], row["service"], row["container"]) for row in samples} == {
        ("n7", "shop", "web"),
        ("n7", "helper", ""),
    }
    # AND what the command line says is said of all
    inserted.clear()
    assert cli.main(["store", "add", str(capture), "--store", "x", "--service", "mine"]) == 0
    rows = [json.loads(line) for _, some in inserted for line in some.splitlines()]
    assert {row["service"] for row in rows if "comm" in row} == {"mine"}
    assert {row["node"] for row in rows if row.get("container") == "web"} == {"n1"}


# What version 8 brought.
_AS_VERSION_7 = (
    "DROP TABLE device_readings",
    "DROP TABLE code_objects",
    "ALTER TABLE kernel_codes DROP COLUMN object_id",
    "ALTER TABLE kernel_times DROP COLUMN built_stack_id",
)
# And version 7.
_AS_VERSION_6 = (*_AS_VERSION_7, "ALTER TABLE devices DROP COLUMN details")
# And version 6.
_AS_VERSION_5 = (
    *_AS_VERSION_6,
    "ALTER TABLE device_samples DROP COLUMN stack_id",
    "ALTER TABLE kernel_times DROP COLUMN stack_id",
)
# And version 5.
_AS_VERSION_4 = (
    *_AS_VERSION_5,
    "DROP TABLE launches",
    "ALTER TABLE device_samples DROP COLUMN begin_ns",
    "ALTER TABLE device_samples DROP COLUMN end_ns",
)


def test_a_capture_from_before_kernel_times_were_known(capture: Path) -> None:
    _change(capture, *_AS_VERSION_4, "DROP TABLE kernel_times", "PRAGMA user_version = 3")
    profile = read_capture(capture)
    assert (len(profile.gpu.samples), len(profile.gpu.times)) == (2, 0)


def test_a_capture_from_before_times_of_launches_and_samples_were_known(capture: Path) -> None:
    _change(capture, *_AS_VERSION_4, "PRAGMA user_version = 4")
    gpu = read_capture(capture).gpu
    assert len(gpu.launches) == 0
    assert gpu.samples[["begin_ns", "end_ns"]].tolist() == [
        (0, 1000 * _MS),
        (1000 * _MS, 2000 * _MS),
    ]


def test_a_capture_from_before_devices_told_how_busy_they_were(capture: Path) -> None:
    _change(capture, *_AS_VERSION_7, "PRAGMA user_version = 7")
    gpu = read_capture(capture).gpu
    assert (len(gpu.readings), len(gpu.times), gpu.devices[0].details) == (0, 2, "driver 1")


def test_a_capture_from_before_code_and_builders_of_graphs_were_kept(capture: Path) -> None:
    _change(capture, *_AS_VERSION_7, "PRAGMA user_version = 7")
    gpu = read_capture(capture).gpu
    assert gpu.codes == (KernelCode(0, 1, 512), KernelCode(1, None, 0))
    assert gpu.objects == ()
    assert gpu.times["built"].tolist() == [NONE, NONE]


def test_a_capture_from_before_devices_told_details(capture: Path) -> None:
    _change(capture, *_AS_VERSION_6, "PRAGMA user_version = 6")
    assert [device.details for device in read_capture(capture).gpu.devices] == ["", ""]


def test_a_capture_from_before_devices_named_launches(capture: Path) -> None:
    _change(capture, *_AS_VERSION_5, "PRAGMA user_version = 5")
    gpu = read_capture(capture).gpu
    assert gpu.samples["stack"].tolist() == [NONE, NONE]
    assert gpu.times["stack"].tolist() == [NONE, NONE]


@pytest.mark.parametrize("change", [
    "UPDATE launches SET kernel_id = 99",
    "UPDATE launches SET first_ns = last_ns + 1",
    "UPDATE launches SET count = 9223372036854775807",
    "UPDATE launches SET ended_ns = last_ns - 1",
    "UPDATE launches SET queue = -2",
    "UPDATE device_samples SET begin_ns = end_ns + 1",
    "UPDATE kernel_times SET duration_ns = 9223372036854775807",
    "UPDATE kernel_times SET begin_ns = -1",
    "UPDATE kernel_times SET kernel_id = 99",
    "UPDATE device_samples SET stack_id = 2",
    "UPDATE device_samples SET stack_id = -2",
    "UPDATE kernel_times SET stack_id = 2",
    "UPDATE device_readings SET busy_permille = 1001",
    "UPDATE device_readings SET begin_ns = end_ns + 1",
    "UPDATE device_readings SET end_ns = begin_ns + 10000000001",
    "UPDATE device_readings SET begin_ns = 1 << 62, end_ns = (1 << 62) + 1",
    "UPDATE device_readings SET used_bytes = total_bytes + 1",
    "UPDATE device_readings SET used_bytes = NULL",
    "UPDATE device_readings SET total_bytes = NULL",
    "UPDATE device_readings SET used_bytes = -2",
    "UPDATE device_readings SET device_id = 3",
    "UPDATE kernel_times SET built_stack_id = 2",
    "UPDATE kernel_times SET built_stack_id = -2",
    "UPDATE device_samples SET code_id = 99",
    "UPDATE device_samples SET count = 9223372036854775807",
    "UPDATE api_calls SET direction = 5",
    "UPDATE api_calls SET kernel_id = -7",
    "UPDATE api_calls SET stack_id = 2",
    "UPDATE api_calls SET interval = 4294967296",
    "UPDATE api_events SET grid_y = 4294967296",
    "UPDATE devices SET period_ns = -1",
    "UPDATE kernel_codes SET size_bytes = -1",
    "UPDATE kernel_codes SET object_id = 99",
    "UPDATE code_objects SET size_bytes = -1",
    "UPDATE code_objects SET content = zeroblob(70000000)",
    "UPDATE instructions SET offset = -9223372036854775808 WHERE offset = 16",
    "UPDATE api_functions SET operation = 9",
    "UPDATE devices SET tier = 3",
    "DELETE FROM kernels WHERE id = 3",
])  # fmt: skip
def test_a_device_half_that_cannot_be(
    capture: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    _change(capture, change)
    assert _refusal(capsys, capture).startswith("damaged capture: PATH: ")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE stacks SET frames = zeroblob(2000000)",
        "UPDATE functions SET name = replace(hex(zeroblob(2000000)), '00', 'x')",
    ],
)
def test_a_value_larger_than_any_is_refused(
    capture: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    _change(capture, change)
    assert "larger than any" in _refusal(capsys, capture)


def test_ids_become_indexes(capture: Path) -> None:
    profile = read_capture(capture)
    assert profile.frames.tolist() == [
        (2, 31, 0, False),
        (0, 12, 0x1040, False),
        (1, 0, 0xFFFF_8100, True),
    ]
    assert profile.stacks.offsets.tolist() == [0, 3, 3, 4]
    assert profile.stacks.frames.tolist() == [1, 0, 2, 1]
    assert profile.stacks.ends.tolist() == [0, 5, 2]


def test_samples_are_summed_over_the_intervals(capture: Path) -> None:
    assert sorted(read_capture(capture).samples.tolist()) == [
        (0, 1, SampleClass.ON_CPU, 4, 40 * _MS),
        (0, 1, SampleClass.BLOCKED, 3, 1_200 * _MS),
        (1, 1, SampleClass.PREEMPTED, 1, 9),
        (2, 0, SampleClass.ON_CPU, 3, 30 * _MS),
    ]


def test_waits_are_in_order(capture: Path) -> None:
    assert read_capture(capture).waits.tolist() == [
        (0, 1, 20 * _MS, 500 * _MS, 0),
        (0, 1, 600 * _MS, 700 * _MS, 5),
    ]


def test_a_capture_of_nothing(tmp_path: Path) -> None:
    empty = _write(tmp_path / "run.aiflame", **{table: [] for table in _ROWS})
    profile = read_capture(empty)
    assert len(profile.stacks) == len(profile.samples) == len(profile.waits) == 0
    assert profile.threads == profile.functions == profile.losses == ()


_ADDRESSES = [0xFFFF_FFFF_8100_0000, 0x5000_0040, 0x7000_1234, 0x9999_0000]


def test_unresolved_stacks_are_read_by_module_and_offset(tmp_path: Path) -> None:
    # GIVEN a recording that was killed: one stack has its names, and one has not
    raw = struct.pack("<4Q", *_ADDRESSES)
    meta = {key: value for key, value in _META.items() if key not in ("complete", "duration_ns")}
    stacks = [_ROWS["stacks"][0], (6, 3, 1, 5, raw, None, 0), _ROWS["stacks"][2]]
    profile = read_capture(_write(tmp_path / "run.aiflame", meta=meta, stacks=stacks))
    # THEN its frames are named by where they are, root first
    begin, end = profile.stacks.offsets[1:3]
    functions = [
        profile.functions[profile.frames["function"][frame]]
        for frame in profile.stacks.frames[begin:end]
    ]
    assert functions == [
        Function(FrameKind.NATIVE, "[native 0x99990000]", None, ""),
        Function(FrameKind.NATIVE, "[libx.so.1+0x1234]", 1, ""),
        Function(FrameKind.NATIVE, "[server+0x1040]", 0, ""),
        Function(FrameKind.KERNEL, "[kernel 0xffffffff81000000]", None, ""),
    ]
    assert profile.frames["address"][profile.stacks.frames[begin:end]].tolist()[1:3] == [
        0x1234,
        0x1040,
    ]
    # and the others are as they were, and the reader is told
    assert profile.stacks.frames[:begin].tolist() == [1, 0, 2]
    assert profile.stacks.frames[end:].tolist() == [1]
    assert ("incomplete", "the recording did not end in order") in profile.recording.facts


def test_an_unresolved_stack_of_an_unmapped_process(tmp_path: Path) -> None:
    stacks = [(i, 7, 0, 2, struct.pack("<Q", 0x5000_0040), None, 0) for i in (1, 6, 8)]
    profile = read_capture(_write(tmp_path / "run.aiflame", stacks=stacks))
    assert profile.functions[-1].name == "[native 0x50000040]"
    assert np.unique(profile.stacks.frames).size == 1


def test_only_what_was_committed_is_there(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.aiflame")
    before = path.read_bytes()
    other = tmp_path / "other.aiflame"
    writer = CaptureWriter(other)
    writer.put_meta(_META)
    writer.put("binaries", [(1, "/a", "")])
    writer.commit()
    writer.put("binaries", [(2, "/b", "")])
    writer.rollback()
    writer.put("binaries", [(3, "/c", "")])
    writer.commit()
    writer.put("binaries", [(4, "/d", "")])
    writer.close()
    assert [binary.path for binary in read_capture(other).binaries] == ["/a", "/c"]
    # and reading changes nothing, nor leaves files beside it
    read_capture(path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.aiflame", "run.aiflame"]


def test_rows_with_the_same_key_are_replaced(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "run.aiflame")
    writer.put_meta(_META)
    for name in ("sh", "python3"):
        writer.put("processes", [(0, 1, 0, name, "", "", "", "", 0, None)])
        writer.put_meta({"target": name})
    writer.commit()
    writer.close()
    profile = read_capture(tmp_path / "run.aiflame")
    assert [process.name for process in profile.processes] == ["python3"]
    assert profile.recording.target == "python3"


def test_a_capture_is_written_on_later(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.aiflame")
    before = read_capture(path)
    writer = CaptureWriter(path, is_new=False)
    known = before.binaries[0]
    assert writer.binary_id(known.path, known.build_id) == writer.binary_id(
        known.path, known.build_id
    )
    new = writer.binary_id("/new", "ab")
    assert new == writer.binary_id("/new", "ab") != writer.binary_id("/new", "cd")
    writer.commit()
    writer.close()
    after = read_capture(path)
    assert [binary.path for binary in after.binaries[: len(before.binaries)]] == [
        binary.path for binary in before.binaries
    ]
    assert [binary.path for binary in after.binaries[len(before.binaries) :]] == ["/new", "/new"]
    assert len(after.samples) == len(before.samples)


def _with_python(path: Path) -> Path:
    writer = CaptureWriter(path)
    writer.put_meta(_META)
    for table, own in _ROWS.items():
        writer.put(table, own)
    writer.put("functions", [(9, 4, "_PyEval_EvalFrameDefault", 4, "")])
    writer.put("frames", [(40, 9, 0, 0x2000, 0)])
    frames = struct.pack("<3I", 20, 40, 10)
    writer.put("stacks", [(1, 3, 1, 0, bytes(24), frames, GilState.HELD)])
    writer.put("stacks", [(6, 3, 0, 5, b"", b"", GilState.UNKNOWN)])
    writer.commit()
    writer.close()
    return path


def test_python_in_stacks(tmp_path: Path) -> None:
    profile = read_capture(_with_python(tmp_path / "run.aiflame"))
    assert profile.stacks.gil.tolist() == [GilState.HELD, GilState.UNKNOWN, GilState.NO_PYTHON]
    start, stop = profile.stacks.offsets[:2]
    assert [
        (profile.functions[profile.frames["function"][frame]].kind, profile.frames["line"][frame])
        for frame in profile.stacks.frames[start:stop]
    ] == [(FrameKind.NATIVE, 12), (FrameKind.INTERPRETER, 0), (FrameKind.PYTHON, 31)]


def test_a_capture_without_python_has_no_gil(capture: Path) -> None:
    assert read_capture(capture).stacks.gil.tolist() == [GilState.NO_PYTHON] * 3


def test_a_capture_of_the_schema_before_python(capture: Path) -> None:
    before = read_capture(capture)
    _change(capture, "ALTER TABLE stacks DROP COLUMN gil", "PRAGMA user_version = 1")
    profile = read_capture(capture)
    assert profile.functions == before.functions
    assert profile.stacks.frames.tolist() == before.stacks.frames.tolist()
    assert profile.stacks.gil.tolist() == [GilState.NO_PYTHON] * 3


def test_a_capture_of_this_schema_needs_all_its_columns(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _change(capture, "ALTER TABLE stacks DROP COLUMN gil")
    assert _refusal(capsys, capture).startswith("damaged capture: PATH: ")


@pytest.mark.parametrize("name", ["x" * 10_000, "\u202e\u05d0\U0001f525", "a\0b\nc\x1b[31m", ""])
def test_names_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    path = _write(
        tmp_path / "run.aiflame",
        functions=[(5, 0, name, 1, name), *_ROWS["functions"][1:]],
        processes=[(3, 1, 0, name, name, name, name, name, 0, None), _ROWS["processes"][1]],
    )
    profile = read_capture(path)
    assert profile.functions[0] == Function(FrameKind.NATIVE, name, 0, name)
    assert profile.processes[0].command_line == name


def test_a_command_line_that_is_not_utf8_does_not_end_the_recording(tmp_path: Path) -> None:
    meta = {**_META, "command": "aiflame record -- ./" + os.fsdecode(b"\xff")}
    path = _write(tmp_path / "run.aiflame", meta=meta)
    assert read_capture(path).recording.command == "aiflame record -- ./\ufffd"


def test_a_full_disk_keeps_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "run.aiflame"
    writer = CaptureWriter(path)
    writer.put_meta(_META)
    writer.commit()
    # GIVEN a limit on the size of files, which is as good as a disk's end
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4096, hard))
    try:
        with pytest.raises(DiskFull, match=f"^cannot write {path}: ") as error:
            for i in range(1_000):
                writer.put("binaries", [(i, "x" * 10_000, "")])
                writer.commit()
        writer.rollback()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space" in (error.value.hint or "")
    writer.close()
    assert read_capture(path).recording.target == "server (pid 100)"


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_capture_that_cannot_be_made(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AiflameError, match=r"^cannot write .*: unable to open database file$"):
        CaptureWriter(tmp_path / folder / "run.aiflame")


# What is no whole capture. Each is read through the command line, as a user would.


def _refusal(capsys: pytest.CaptureFixture[str], path: Path, verb: str = "stats") -> str:
    """The one line that both verbs print; anything else fails."""
    arguments = {"stats": [], "report": ["-f", "folded", "-o", "-"]}[verb]
    assert cli.main([verb, str(path), *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aiflame: ")
    assert "internal error" not in err
    assert "Traceback" not in err
    return err.removeprefix("aiflame: ").partition("\n")[0].replace(str(path), "PATH")


def test_what_is_there_instead_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")  # reading it would wait forever
    (tmp_path / "loop").symlink_to("loop")
    assert _refusal(capsys, tmp_path / "missing") == "no such capture: PATH"
    assert _refusal(capsys, tmp_path) == "not a file: PATH"
    assert _refusal(capsys, tmp_path / "fifo") == "not a file: PATH"
    assert _refusal(capsys, Path("/dev/zero")) == "not a file: PATH"
    assert _refusal(capsys, tmp_path / "loop") == "no such capture: PATH"
    assert _refusal(capsys, tmp_path / ("x" * 10_000)) == "cannot read PATH: File name too long"


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"SQLite", b"SQLite format 3", b"<!doctype html>", os.urandom(4096)]
)
def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "run.aiflame"
    path.write_bytes(content)
    assert _refusal(capsys, path) == "not an aiflame capture: PATH"
    assert _refusal(capsys, path, "report") == "not an aiflame capture: PATH"


def test_another_programs_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "places.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE samples (a)")
    database.close()
    assert _refusal(capsys, path) == "not an aiflame capture: PATH"


def _change(path: Path, *statements: str) -> Path:
    with sqlite3.connect(path) as database:
        # Nobody needs it after a power cut.
        database.execute("PRAGMA synchronous = OFF")
        for statement in statements:
            database.execute(statement)
    database.close()
    return path


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, 2**31 - 1])
def test_another_schema(capture: Path, capsys: pytest.CaptureFixture[str], version: int) -> None:
    _change(capture, f"PRAGMA user_version = {version}")
    assert (
        _refusal(capsys, capture)
        == f"PATH has schema {version}, this aiflame reads up to {SCHEMA_VERSION}"
    )


def test_a_database_with_nothing_but_our_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _change(
        tmp_path / "run.aiflame",
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {SCHEMA_VERSION}",
    )
    assert _refusal(capsys, path) == "damaged capture: PATH: no table meta"


def test_a_capture_that_was_cut_anywhere(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = capture.read_bytes()
    said = set()
    for length in [*range(0, 200, 7), *range(200, len(whole), 997), len(whole) - 1]:
        capture.write_bytes(whole[:length])
        said.add(_refusal(capsys, capture).partition(":")[0])
    assert said == {"not an aiflame capture", "damaged capture"}


@pytest.mark.breadth
def test_a_capture_with_bytes_changed_is_read_or_refused(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = capture.read_bytes()
    codes = []
    for offset in range(100, len(whole), 499):
        capture.write_bytes(whole[:offset] + b"\xa5" * 9 + whole[offset + 9 :])
        codes.append(cli.main(["report", str(capture), "-f", "folded", "-o", "-"]))
        assert "internal error" not in capsys.readouterr().err
    assert set(codes) == {0, 1}


_COLUMNS = {
    "meta": "key value",
    "processes": "id pid parent_pid name executable command_line cgroup container_id started_ns"
    " exited_ns",
    "threads": "id process_id tid name on_cpu_ns observed_ns",
    "binaries": "id path build_id",
    "functions": "id kind name binary_id file",
    "frames": "id function_id line address inlined",
    "stacks": "id process_id kernel_depth end_reason addresses frames gil",
    "samples": "stack_id thread_id class count ns",
    "waits": "stack_id thread_id start_ns blocked_ns runnable_ns",
    "thread_accounts": "thread_id on_cpu_ns run_queue_ns timeslices misaligned_ns open_wait_ns"
    " has_ended",
    "delays": "process_id cause count ns",
    "losses": "name count meaning",
    "devices": "id family name tier limit_reason period_ns details",
    "api_functions": "id api name operation",
    "kernels": "id process_id api name unnamed",
    "kernel_codes": "id kernel_id binary_id size_bytes object_id",
    "code_objects": "id family size_bytes content",
    "instructions": "code_id offset text file line",
    "stall_reasons": "id family name",
    "api_calls": "interval stack_id thread_id function_id kernel_id direction count work bytes",
    "api_events": "start_ns stack_id thread_id function_id kernel_id direction queue grid_x bytes",
    "launches": "stack_id thread_id function_id kernel_id queue first_ns last_ns ended_ns count"
    " work",
    "device_samples": "interval device_id code_id offset reason_id stack_id begin_ns end_ns count",
}
_MAY_BE_NULL = {
    *("processes.exited_ns", "functions.binary_id", "stacks.frames", "kernel_codes.binary_id"),
    *("api_calls.kernel_id", "api_events.kernel_id", "launches.ended_ns"),
    *("device_samples.stack_id", "kernel_codes.object_id"),
}
_TEXTS = {
    "meta": "key value",
    "processes": "name executable command_line cgroup container_id",
    "threads": "name",
    "binaries": "path build_id",
    "functions": "name file",
    "delays": "cause",
    "losses": "name meaning",
    "devices": "family name limit_reason details",
    "api_functions": "api name",
    "kernels": "api name unnamed",
    "instructions": "text file",
    "code_objects": "family",
    "stall_reasons": "family name",
}


# What is not read of stacks that have names.
_OF_UNNAMED_STACKS = ("stacks.process_id", "stacks.kernel_depth", "stacks.addresses")


def _cells(columns: dict[str, str]) -> list[str]:
    return [f"{table}.{column}" for table, names in columns.items() for column in names.split()]


def _put(path: Path, cell: str, value: str) -> Path:
    """Puts an SQL value into a column of each row, whatever the schema says."""
    table, column = cell.split(".")
    with sqlite3.connect(path) as database:
        names = [f'"{row[1]}"' for row in database.execute(f"PRAGMA table_info({table})")]
        statements = (
            f"ALTER TABLE {table} RENAME TO strict",
            f"CREATE TABLE {table} ({', '.join(names)})",  # without types it takes anything
            f"INSERT INTO {table} SELECT * FROM strict",  # noqa: S608
            f"UPDATE {table} SET {column} = {value}",  # noqa: S608
        )
    database.close()
    return _change(path, *statements)


@pytest.mark.parametrize("cell", _cells(_COLUMNS))
def test_values_of_the_wrong_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    wrong = ["x'fffe'", "1e999", "7" if cell in _cells(_TEXTS) else "'abc'"]
    if cell in ("stacks.addresses", "stacks.frames", "code_objects.content"):
        wrong.remove("x'fffe'")
    if cell not in _MAY_BE_NULL:
        wrong.append("NULL")
    for i, value in enumerate(wrong):
        path = _put(_write(tmp_path / f"{i}.aiflame"), cell, value)
        if cell in _OF_UNNAMED_STACKS:
            _change(path, "UPDATE stacks SET frames = NULL")
        assert _refusal(capsys, path).startswith("damaged capture: PATH: ")


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("threads.process_id", "99"),
        ("functions.binary_id", "99"),
        ("functions.kind", "9"),
        ("frames.function_id", "99"),
        ("frames.line", "-1"),
        ("frames.line", "1 << 40"),
        ("frames.address", "-1"),
        ("stacks.end_reason", str(max(StopReason) + 1)),
        ("stacks.end_reason", "256"),
        ("stacks.end_reason", "-1"),
        ("stacks.gil", "5"),
        ("stacks.gil", "256"),
        ("stacks.gil", "-1"),
        ("stacks.frames", "x'63000000'"),
        ("stacks.frames", "x'0a0000'"),
        ("stacks.frames", "x'0a000000' || x'00'"),
        ("samples.stack_id", "99"),
        ("samples.thread_id", "0"),
        ("samples.class", "4"),
        ("samples.class", "256"),
        ("samples.ns", "-1"),
        ("samples.ns", str(2**63 - 1)),
        ("waits.stack_id", "2"),
        ("waits.thread_id", "-1"),
        ("waits.blocked_ns", "-5"),
        ("meta.value", "'abc'"),
    ],
)
def test_numbers_that_cannot_be(
    capture: Path, capsys: pytest.CaptureFixture[str], cell: str, value: str
) -> None:
    _put(capture, cell, value)
    assert _refusal(capsys, capture).startswith("damaged capture: PATH: ")
    assert _refusal(capsys, capture, "report").startswith("damaged capture: PATH: ")


@pytest.mark.parametrize("table", _COLUMNS)
def test_a_missing_table_and_a_view_in_its_place(
    capture: Path, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    _change(capture, f"DROP TABLE {table}")
    assert _refusal(capsys, capture) == f"damaged capture: PATH: no table {table}"
    # This one would never end.
    endless = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
    _change(capture, f"CREATE VIEW {table} AS {endless}")
    assert _refusal(capsys, capture) == f"damaged capture: PATH: no table {table}"


@pytest.mark.parametrize("key", ["aiflame_version", "started_unix_ns", "period_ns", "target"])
def test_a_missing_fact_is_named(
    capture: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    _change(capture, f"DELETE FROM meta WHERE key = '{key}'")  # noqa: S608
    assert _refusal(capsys, capture) == f"damaged capture: PATH: '{key}' is missing"


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats"],
        *(
            ["report", "-f", f, "-o", "-"]
            for f in ("html", "svg", "folded", "speedscope", "pprof", "pstats")
        ),
    ],
)
@pytest.mark.parametrize("change", [
    "UPDATE meta SET value = '0' WHERE key LIKE '%_ns'",
    "UPDATE meta SET value = '-5' WHERE key LIKE '%_ns'",
    "UPDATE meta SET value = '9999999999999999999999' WHERE key LIKE '%_ns'",
    "UPDATE meta SET value = replace(hex(zeroblob(400)), '0', '9') WHERE key LIKE '%_ns'",
    "UPDATE processes SET pid = -1, parent_pid = -1, started_ns = -1",
    "UPDATE functions SET name = replace(hex(zeroblob(5000)), '00', 'xx')",
    "UPDATE threads SET on_cpu_ns = 9223372036854775807, observed_ns = 0",
    "DELETE FROM losses",
])  # fmt: skip
def test_odd_but_possible_captures_are_shown_or_refused(
    capture: Path, capsysbinary: pytest.CaptureFixture[bytes], change: str, arguments: list[str]
) -> None:
    _change(capture, change)
    assert cli.main([arguments[0], str(capture), *arguments[1:]]) in (0, 1)
    assert b"internal error" not in capsysbinary.readouterr().err


def test_a_path_with_characters_of_urls(tmp_path: Path) -> None:
    make: Callable[[str], Path] = lambda name: _write(tmp_path / name)  # noqa: E731
    for name in ("a?mode=rw.aiflame", "50%41#x.aiflame", "sp ace\u05d0.aiflame"):
        assert read_capture(make(name)).recording.target == "server (pid 100)"


def test_a_foreign_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CaptureError):
        read_capture(tmp_path / "missing")
