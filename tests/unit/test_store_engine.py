# SPDX-License-Identifier: Apache-2.0
"""Stores in directories: tables, profiles out of them, questions, and what may not be asked."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent import cli
from aiflame.agent.commands import store as store_verb
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import (
    NS_PER_S,
    Binary,
    FrameKind,
    Function,
    Profile,
    SampleClass,
    StopReason,
)
from aiflame.agent.reports import FORMATS, ReportOptions, View
from aiflame.agent.reports.base import Leaf
from aiflame.agent.reports.change import TooFewSamples, grown
from aiflame.agent.store import engine as engine_module
from aiflame.agent.store import engines, questions, schema
from aiflame.agent.store.address import PASSWORD_VARIABLE
from aiflame.agent.store.comparison import compare
from aiflame.agent.store.engine import MOST_KEEP_DAYS, StoreError, parameter_text
from aiflame.agent.store.engines import DirectoryEngine, open_store
from aiflame.agent.store.inserts import inserts_of
from aiflame.agent.store.profiles import By, profile_of
from aiflame.agent.store.rows import json_lines
from aiflame.agent.store.selector import (
    CLASS_WORDS,
    LABELS,
    NothingThere,
    Selector,
    held_range,
    moment_words,
)
from clickhouse_server import PASSWORD, clickhouse
from device_profiles import small_device_profile, small_timed_profile
from profiles import (
    HOSTILE_NAMES,
    MS,
    RECORDING,
    Sample,
    hostile_profile,
    large_profile,
    python_profile,
    small_profile,
)
from profiles import profile_of as literal_profile
from support import wait_until

pytest.importorskip("chdb", reason="chDB is not installed")

_BEGIN_S = RECORDING.started_unix_ns // NS_PER_S
_ALL = Selector(_BEGIN_S - 10, _BEGIN_S + 100_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryEngine]:
    engine = open_store(str(tmp_path / "fleet"), is_read_only=False, is_new=True)
    schema.migrate(engine, 0)
    assert isinstance(engine, DirectoryEngine)
    yield engine
    engine.close()


def _add(
    engine: DirectoryEngine, profile: Profile, minute: int = 0, cluster: str = "", **labels: str
) -> None:
    begin = RECORDING.started_unix_ns + minute * 60 * NS_PER_S
    own = Labels(**{"service": "train", **labels})
    batch = Batch(own, profile, begin, profile.recording.duration_ns)
    for piece in inserts_of([batch], cluster, lambda _: True):
        engine.insert(piece.table.value, piece.rows, piece.token)


def test_tables_are_made_once(tmp_path: Path) -> None:
    # GIVEN no store WHEN it is made twice THEN it is there, and says what it is
    folder = tmp_path / "new" / "fleet"
    engine = open_store(str(folder), is_read_only=False, is_new=True)
    with pytest.raises(StoreError):
        engine.query("SELECT 1 FROM samples")
    assert schema.migrate(engine, 9) == (0, schema.VERSION)
    assert schema.migrate(engine, 3) == (schema.VERSION, schema.VERSION)
    assert schema.require(engine) == schema.State(schema.VERSION, 9)
    # and its owner's alone, and one of a later version is refused
    assert folder.stat().st_mode & 0o077 == 0
    engine.execute("INSERT INTO schema_versions (version, keep_days) VALUES (99, 0)")
    for use in (schema.require, lambda store: schema.migrate(store, 0)):
        with pytest.raises(AiflameError, match="later aiflame"):
            use(engine)
    engine.close()


def test_tables_that_were_half_made_are_finished(tmp_path: Path) -> None:
    engine = open_store(str(tmp_path / "fleet"), is_read_only=False, is_new=True)
    schema.migrate(engine, 0)
    engine.execute("DROP TABLE gpu")
    engine.execute("ALTER TABLE schema_versions DELETE WHERE 1 SETTINGS mutations_sync = 1")
    assert schema.migrate(engine, 0) == (0, schema.VERSION)
    _add(engine, small_timed_profile())
    assert engine.query("SELECT sum(samples) FROM gpu").rows[0][0] > 0
    engine.close()


def test_tables_are_made_on_servers_that_replicate_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN one that tells of each server what it did, unless it is told not to
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    with clickhouse(tmp_path / "server") as (stand_in, url):
        stand_in.engine.execute(
            "ALTER TABLE schema_versions DELETE WHERE 1 SETTINGS mutations_sync = 1"
        )
        # WHEN tables are made there THEN that is no answer of something else
        engine = open_store(url, is_read_only=False, is_new=True)
        assert schema.migrate(engine, 9) == (0, schema.VERSION)
        assert schema.require(engine).keep_days == 9


_SUMMED = ("samples", "stacks_1h", "gpu", "agents")


def _forget_inserts(engine: DirectoryEngine) -> None:
    """Makes tables tell but the last insert from its repetition, and inserts something else."""
    for table in _SUMMED:
        engine.execute(f"ALTER TABLE {table} MODIFY SETTING non_replicated_deduplication_window=1")
    _add(engine, small_timed_profile(), 9)
    _add(engine, small_profile(), 9)


def _sums(engine: DirectoryEngine) -> list[int]:
    """Returns the sums of tables, of the first minutes."""
    before = f"< {_BEGIN_S + 300}"
    (row,) = engine.query(
        f"SELECT (SELECT sum(value) FROM samples WHERE t {before}),"  # noqa: S608
        " (SELECT sum(value) FROM stacks_1h),"
        f" (SELECT sum(busy_ns) FROM gpu WHERE t {before}),"
        f" (SELECT sum(samples) FROM agents WHERE t {before})"
    ).rows
    return [int(value) for value in row]


def test_a_capture_is_added_once_whatever_came_in_between(
    store: DirectoryEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a capture that was added, and so many others since that tables have forgotten it
    monkeypatch.setattr(store_verb, "read_recording", lambda _: small_timed_profile())
    words = ["store", "add", "run.aiflame", "--store", store.name, "--service", "train"]
    assert cli.main(words) == 0
    assert "in the store already" not in capsys.readouterr().err
    _forget_inserts(store)
    before = _sums(store)
    assert all(before)
    # WHEN it is added again THEN nothing is doubled, and it is said
    assert cli.main(words) == 0
    assert re.search(
        r": 0 samples of .*; [\d,]+ were in the store already", capsys.readouterr().err
    )
    assert _sums(store) == before
    # AND under another name it is another
    assert cli.main([*words[:-1], "other"]) == 0
    assert _sums(store)[0] == 2 * before[0]


def test_tables_know_their_inserts_for_hours_of_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a store of the first version, with something in it
    engine = open_store(str(tmp_path / "fleet"), is_read_only=False, is_new=True)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "VERSION", 1)
        assert schema.migrate(engine, 14) == (0, 1)
    profile = small_timed_profile()
    begin_ns = time.time_ns()
    batch = Batch(Labels("train"), profile, begin_ns, profile.recording.duration_ns)
    pieces = [*inserts_of([batch], "", lambda _: True)]
    for piece in pieces:
        engine.insert(piece.table.value, piece.rows, piece.token)
    # WHEN it is brought up to date THEN nothing is lost, and known inserts stay known
    assert schema.migrate(engine, 0) == (1, schema.VERSION)
    assert schema.require(engine).keep_days == 14
    for piece in pieces:
        engine.insert(piece.table.value, piece.rows, piece.token)
    assert engine.query("SELECT sum(value) FROM samples").rows == [
        [int(profile.samples["ns"].sum())]
    ]
    # AND so are those of a thousand hosts for hours, as in a new one
    for table in _SUMMED:
        ((text,),) = engine.query(
            "SELECT engine_full FROM system.tables WHERE database = 'aiflame'"
            " AND name = {table:String}",
            {"table": table},
        ).rows
        (window,) = re.findall(r"non_replicated_deduplication_window = (\d+)", text)
        assert int(window) >= 8 * 60 * 1_000, table
    engine.close()


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(UsageError, match="not empty"):
        open_store(str(tmp_path / "mine"), is_read_only=False, is_new=True)
    with pytest.raises(UsageError, match="no store here"):
        open_store(str(tmp_path / "mine"), is_read_only=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter"]


def test_one_process_at_a_time(store: DirectoryEngine) -> None:
    # GIVEN a store that is open WHEN another process opens it THEN it says so, in words
    words = [sys.executable, "-m", "aiflame.agent", "query", "top", "--store", store.name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "is open in another process; chDB lets one at a time" in done.stderr
    assert "internal error" not in done.stderr


def test_a_store_of_somebody_else_says_so(
    store: DirectoryEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a store that may be looked at, and not be written, as the engine does
    store.close()
    words = ["query", "top", "--store", store.name]
    with monkeypatch.context() as may:
        may.setattr("os.access", lambda path, mode: not mode & os.W_OK)
        for uid, why in ((1000, "Permission denied"), (0, "Read-only file system")):
            may.setattr("os.geteuid", lambda uid=uid: uid)
            assert cli.main(words) == 3
            said = capsys.readouterr().err
            assert f"the store {store.name} cannot be opened" in said
            assert why in said
            assert "run it as the owner of the store" in said

    # and one that may not even be looked at
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert cli.main(words) == 3
    assert "run it as the owner of the store" in capsys.readouterr().err


def test_a_long_question_is_interrupted(store: DirectoryEngine) -> None:
    # GIVEN a question that takes minutes, and that the engine has begun to answer
    store.close()
    words = ["query", "sql", "--store", store.name, _SLOW]
    code = [sys.executable, "-m", "aiflame.agent", *words]
    with subprocess.Popen(code, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as asking:
        tasks = Path(f"/proc/{asking.pid}/task")
        wait_until(lambda: any(name.startswith("QueryPull") for name in _names(tasks)), 60)
        # WHEN Ctrl-C is pressed THEN it ends at once
        asking.send_signal(signal.SIGINT)
        assert asking.wait(20) in (-signal.SIGINT, 130)
        assert asking.stderr is not None
        assert b"Traceback" not in asking.stderr.read()
    # and the store is as it was
    reopened = open_store(store.name, is_read_only=True)
    assert schema.require(reopened).version == schema.VERSION
    reopened.close()


_SLOW = (
    "SELECT sum(sleepEachRow(0.5)) FROM numbers(240)"
    " SETTINGS max_block_size = 1, function_sleep_max_microseconds_per_block = 1000000000"
)


def _names(tasks: Path) -> list[str]:
    """Returns the names of a process's threads; those that end meanwhile have none."""
    names = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text())
    return names


def test_without_chdb_it_says_what_to_install(
    store: DirectoryEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "chdb.session", None)
    assert cli.main(["query", "top", "--store", store.name]) == 3
    assert "-m pip install chdb" in capsys.readouterr().err


_VALUES = [
    *(name for name in HOSTILE_NAMES if "\ud800" not in name),
    "x' OR 1=1 --",
    "\\",
    "\\'",
    "{other:String}",
    "\\N",
    "NULL",
    "%",
    "[]",
    "\x1a\x08\x0c",
]


def test_values_stay_values(store: DirectoryEngine) -> None:
    # GIVEN values that would be something else in a statement THEN they come back as they are
    for value in _VALUES:
        found = store.query(
            "SELECT {one:String}, {many:Array(String)}", {"one": value, "many": [value, "", value]}
        )
        assert found.rows == [[value, [value, "", value]]]
    assert parameter_text("a\ud800") == "a?"
    numbers = store.query("SELECT {a:UInt64}, {b:Array(UInt64)}", {"a": 2**64 - 1, "b": [2**63]})
    assert numbers.rows == [[2**64 - 1, [2**63]]]


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE samples",
        "INSERT INTO agents (t) VALUES (1)",
        "ALTER TABLE samples DELETE WHERE 1",
        "SET readonly = 0",
        "SELECT 1 SETTINGS readonly = 0",
        "CREATE TABLE x (a UInt8) ENGINE = Memory",
        "SELECT * FROM url('http://127.0.0.1:1/', 'CSV', 'a String') INTO OUTFILE '/tmp/x'",
        "SELECT 1; DROP TABLE samples",
        "SELECT 1 FORMAT CSV",
    ],
)
def test_questions_change_nothing(store: DirectoryEngine, statement: str) -> None:
    _add(store, small_profile())
    name = store.name
    before = store.query("SELECT count(), sum(value) FROM samples").rows
    store.close()
    reader = open_store(name, is_read_only=True)
    with pytest.raises(StoreError):
        reader.query(statement)
    assert reader.query("SELECT count(), sum(value) FROM samples").rows == before
    reader.close()


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1 INTO OUTFILE '{0}'",
        "SELECT 1 into/**/outfile '{0}'",
        "SELECT 1 INTO -- x\nOUTFILE '{0}'",
        "SELECT 1 INTO #! x\nOUTFILE '{0}'",
        "SELECT $$'$$ AS a INTO OUTFILE '{0}'",
        "SELECT 1 AS `a\\`` INTO OUTFILE '{0}'",
        "INSERT INTO FUNCTION file('{0}', 'CSV', 'a Int8') SELECT 1",
        "WITH 1 AS a INSERT INTO FUNCTION file('{0}', 'CSV', 'a Int8') SELECT a",
    ],
)
def test_questions_write_no_files(store: DirectoryEngine, tmp_path: Path, statement: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(StoreError, match="may only read"):
        store.query(statement.format(out))
    assert not out.exists()


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 'into outfile'",
        "SELECT 1 AS `insert`",
        "SELECT $x$insert ' into$x$",
        "SELECT 1 -- insert ; into outfile",
        "SELECT /* ; insert */ 1;",
    ],
)
def test_words_of_values_and_comments_forbid_nothing(
    store: DirectoryEngine, statement: str
) -> None:
    assert len(store.query(statement).rows) == 1


def test_answers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines._LIMITS, "max_result_rows", "1000")
    engine = open_store(str(tmp_path / "fleet"), is_read_only=True, is_new=True)
    engine.create_database()
    assert len(engine.query("SELECT number FROM numbers(1000)").rows) == 1_000
    with pytest.raises(StoreError, match="Limit for result") as caught:
        engine.query("SELECT number FROM numbers(1000000)")
    assert caught.value.hint is not None
    engine.close()
    assert engine_module.MAX_ROWS < 10**7


def _folded(profile: Profile, view: View) -> Counter[str]:
    options = ReportOptions(view=view, leaf=Leaf.STALL)
    found: Counter[str] = Counter()
    for line in FORMATS["folded"].render(profile, options).decode().splitlines():
        # A store has no source lines of GPU kernels.
        stack, _, weight = re.sub(r";\w+\.cl:\d+_\[G\]", "", line).rpartition(" ")
        found[stack] += int(weight)
    return found


@pytest.mark.parametrize(
    "make",
    [small_profile, python_profile, small_device_profile, small_timed_profile],
)
def test_a_profile_from_the_store_is_the_one_that_was_put_there(
    store: DirectoryEngine, make
) -> None:
    # GIVEN a profile in a store, added twice
    profile = make()
    for _ in range(2):
        _add(store, profile)
    # WHEN it is asked for by processes THEN folded stacks are those of the capture, line by line
    found = profile_of(store, _ALL, By.PROCESS, 10_000)
    for view in View:
        assert _folded(found.profile, view) == _folded(profile, view), view
    assert (found.left_out, found.left_out_ns) == (0, 0)
    assert {(loss.name, loss.count) for loss in found.profile.losses} == {
        (loss.name, loss.count) for loss in profile.losses
    }


def test_every_format_of_report_is_made(store: DirectoryEngine) -> None:
    _add(store, small_timed_profile())
    _add(store, hostile_profile(), 1)
    profile = profile_of(store, _ALL, By.SERVICE, 10_000).profile
    for report in FORMATS.values():
        assert report.render(profile, ReportOptions())
    # Services have no pid.
    assert all(line.startswith("train;") for line in _folded(profile, View.WALL))


@pytest.mark.parametrize("is_page", [False, True])
def test_a_profile_of_one_class_has_nothing_of_devices(
    store: DirectoryEngine, is_page: bool
) -> None:
    # GIVEN a profile with device samples and kernel times, which are of no class
    _add(store, small_timed_profile())
    of_class = replace(_ALL, classes=("blocked",))
    whole, found = (
        profile_of(store, each, By.POD, 10_000, is_page=is_page).profile
        for each in (_ALL, of_class)
    )
    assert len(whole.gpu.samples) and len(whole.gpu.times)
    assert not len(found.gpu.samples) and not len(found.gpu.times)
    assert {*found.samples["klass"].tolist()} == {SampleClass.BLOCKED}


def test_lighter_stacks_are_left_out_and_said(store: DirectoryEngine) -> None:
    _add(store, small_profile())
    found = profile_of(store, _ALL, By.PROCESS, 4)
    whole = int(small_profile().samples["ns"].sum())
    assert len(found.profile.samples) == 4
    assert found.left_out == len(small_profile().samples) - 4
    assert found.left_out_ns == whole - int(found.profile.samples["ns"].sum())


def test_a_flame_graph_is_of_one_class_where_that_is_asked_for(
    store: DirectoryEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = small_timed_profile()
    _add(store, profile)
    store.close()

    def flame(*words: str) -> tuple[int, str, str]:
        code = cli.main(["query", "flame", "--store", store.name, *words])
        return (code, *capsys.readouterr())

    # GIVEN time on the CPU and waits of a class THEN each is there alone, and together they are all
    wholes = {}
    for name in ("all", *questions.CLASSES):
        code, out, said = flame("-f", "folded", "-o", "-", "--class", name)
        wholes[name] = sum(int(line.rpartition(" ")[2]) for line in out.splitlines())
        klass = name == "all" or np.any(profile.samples["klass"] == SampleClass[name.upper()])
        assert (code, bool(out)) == ((0, True) if klass else (4, False)), said
        assert code == 0 or f" UTC, {CLASS_WORDS[name]}\n" in said
    assert 0 < wholes["on_cpu"] < wholes["all"] == sum(wholes[name] for name in questions.CLASSES)
    assert flame("-f", "folded", "-o", "-")[1] == flame("-f", "folded", "-o", "-", "--view", "wall",
                                                        "--class", "all")[1]  # fmt: skip
    # AND a page says which.
    page = tmp_path / "page.html"
    assert flame("-o", str(page), "--class", "blocked")[0] == 0
    assert "blocked time" in page.read_text()
    # AND a view that has nothing of the class is refused.
    for view in ("cpu", "gpu", "gputime"):
        code, _, said = flame("-f", "folded", "-o", "-", "--class", "blocked", "--view", view)
        assert (code, "blocked is no class of" in said) == (2, True)


def test_a_store_without_devices_has_a_newest_window(
    store: DirectoryEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(store, small_profile(), 0, service="old")
    _add(store, small_profile(), 9, service="new")
    store.close()
    assert cli.main(["query", "flame", "--store", store.name, "--last", "1ms", "-f", "folded",
                     "-o", "-"]) == 0  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("new;") for line in lines)


def test_stacks_that_have_not_arrived_keep_their_time(store: DirectoryEngine) -> None:
    _add(store, small_profile())
    store.execute("TRUNCATE TABLE stacks")
    found = profile_of(store, _ALL, By.SERVICE, 100).profile
    assert int(found.samples["ns"].sum()) == int(small_profile().samples["ns"].sum())
    assert any("[frames not in the store]" in line for line in _folded(found, View.CPU))


def test_tables_keep_the_time_of_stacks_that_are_not_there(store: DirectoryEngine) -> None:
    # GIVEN two versions, of which the store has lost a stack with half of each's time
    for host in range(10):
        for version in "12":
            profile = literal_profile(
                Sample("main;step", 500 * MS, count=500), Sample("gone;old", 500 * MS, count=500)
            )
            _add(store, profile, node=f"n{host}", version=version)
    store.execute("ALTER TABLE stacks DELETE WHERE has(frames, 'old') SETTINGS mutations_sync = 1")
    # THEN their time has a row, in sums by hour too, and neither name is missing without a word
    hour = Selector(_BEGIN_S // 3600 * 3600, _BEGIN_S // 3600 * 3600 + 7200, {}, ("on_cpu",))
    for selector in (replace(_ALL, classes=("on_cpu",)), hour, _ALL):
        for is_raw in (False, True):
            rows = questions.top(store, selector, 9, is_raw=is_raw).rows
            assert [(row[1], row[3], row[4]) for row in rows] == [
                ("50.0 %", "50.0 %", "[frames not in the store]"),
                ("50.0 %", "50.0 %", "step"),
                ("0.0 %", "50.0 %", "main"),
            ]
    # AND it is compared as any other
    sides = [replace(_ALL, labels={"version": (v,)}, classes=("on_cpu",)) for v in "12"]
    found = compare(store, *sides, is_self=True, least_share=0.01)
    shares = {one.name: (one.change.before, one.change.after) for one in found.functions}
    assert shares == {"[frames not in the store]": (0.5, 0.5), "step": (0.5, 0.5)}


def test_names_are_kept_as_long_as_sums(tmp_path: Path) -> None:
    # GIVEN a store that keeps samples for two weeks, and what ran in an hour ten weeks ago
    engine = open_store(str(tmp_path / "fleet"), is_read_only=False, is_new=True)
    schema.migrate(engine, 14)
    hour_s = int(time.time()) // 3600 * 3600 - 70 * 86_400
    profile = literal_profile(Sample("main;old", 500 * MS, count=500))
    batch = Batch(Labels("train"), profile, hour_s * NS_PER_S, 60 * NS_PER_S)
    for piece in inserts_of([batch], "", lambda _: True):
        engine.insert(piece.table.value, piece.rows, piece.token)
    # WHEN all that may go is gone THEN that hour's functions are there by their names
    for table in ("samples", "stacks", "stacks_1h"):
        engine.execute(f"OPTIMIZE TABLE {table} FINAL")
    assert engine.query("SELECT count() FROM samples").rows == [[0]]
    hour = Selector(hour_s, hour_s + 3600, {}, ("on_cpu",))
    assert [row[4] for row in questions.top(engine, hour, 9).rows] == ["old", "main"]
    engine.close()


def test_sums_by_hour_last_whatever_days_a_store_is_made_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / "fleet")
    # GIVEN more days than the engine can add to a date, six times WHEN tables are asked for
    with pytest.raises(SystemExit) as ended:
        cli.main(["store", "init", "--store", name, "--keep-days", str(MOST_KEEP_DAYS + 1)])
    # THEN it says how many there may be
    assert ended.value.code == 2
    assert f"more than {MOST_KEEP_DAYS:,} days" in capsys.readouterr().err
    # AND of as many, nothing goes as it comes
    assert cli.main(["store", "init", "--store", name, "--keep-days", str(MOST_KEEP_DAYS)]) == 0
    engine = open_store(name, is_read_only=False)
    profile = literal_profile(Sample("main;new", 500 * MS, count=500))
    batch = Batch(Labels("train"), profile, int(time.time()) * NS_PER_S, 60 * NS_PER_S)
    for piece in inserts_of([batch], "", lambda _: True):
        engine.insert(piece.table.value, piece.rows, piece.token)
    parts = engine.query(
        "SELECT table, min(delete_ttl_info_min) > now() FROM system.parts WHERE active"
        " AND table IN ('samples', 'stacks', 'stacks_1h') GROUP BY table ORDER BY table"
    )
    assert parts.rows == [["samples", 1], ["stacks", 1], ["stacks_1h", 1]]
    engine.close()


def test_selectors_choose(store: DirectoryEngine) -> None:
    _add(store, small_profile(), 0, node="a1", pod="x")
    _add(store, small_profile(), 5, node="a2", pod="100%", version="1")
    _add(store, small_profile(), 9, node="b_1", pod="100a")
    one = int(small_profile().samples["ns"].sum())

    def ns(begin_min: float = 0, end_min: float = 100, **labels: str) -> int:
        selector = Selector(
            _BEGIN_S + int(60 * begin_min),
            _BEGIN_S + int(60 * end_min),
            {name: (value,) for name, value in labels.items()},
        )
        where, values = selector.where()
        rows = store.query(f"SELECT sum(value) FROM samples WHERE {where}", values).rows  # noqa: S608
        return int(rows[0][0])

    assert ns() == 3 * one
    assert ns(0, 5) == ns(5, 9) == ns(9) == one
    assert ns(node="a*") == 2 * one
    assert ns(node="?1") == one
    assert ns(node="b_1") == one
    assert ns(pod="100%") == ns(pod="100%*") == one
    assert ns(pod="' OR 1=1 --") == ns(pod="*' OR 1=1 --") == ns(node="zz") == 0
    with pytest.raises(NothingThere, match="pod none"):
        profile_of(store, replace(_ALL, labels={"pod": ("none",)}), By.POD, 10)
    assert held_range(store) == (_BEGIN_S, _BEGIN_S + 9 * 60 + 2)


def test_a_table_of_functions(store: DirectoryEngine) -> None:
    # GIVEN a function that calls itself, the interpreter's own, and one that is only called
    profile = literal_profile(
        Sample("main;fib;fib;fib", 60 * MS, count=6),
        Sample("main;[i]eval;[p]step@/a.py:3;[i]eval", 30 * MS, count=3),
        Sample("main;fib;leaf", 10 * MS, count=1),
    )
    _add(store, profile)
    table = questions.top(store, replace(_ALL, classes=("on_cpu",)), 3)
    # THEN each stack counts once for a function, and the interpreter is nowhere
    assert [(row[0], row[2], row[4]) for row in table.rows] == [
        ("60.00", "70.00", "fib"),
        ("30.00", "30.00", "step"),
        ("10.00", "10.00", "leaf"),
    ]
    # and where it is: in a binary, or in a file of Python
    assert [row[5] for row in table.rows] == ["/opt/server", "/a.py", "/opt/server"]
    assert (table.left_out, table.whole.startswith("100 % = 100.000 ms")) == (1, True)
    # and sums by hour, which whole hours are asked of, give the same
    hour = Selector(_BEGIN_S // 3600 * 3600, _BEGIN_S // 3600 * 3600 + 7200, {}, ("on_cpu",))
    assert questions.top(store, hour, 3).rows == table.rows


def test_functions_of_one_name_are_told_apart_by_file(store: DirectoryEngine) -> None:
    # GIVEN methods of one name in two files of Python, and a C function in two binaries
    _add(
        store,
        literal_profile(
            Sample("main;[p]forward@/app/a.py:3", 40 * MS, count=4),
            Sample("main;[p]forward@/app/b.py:3", 30 * MS, count=3),
        ),
    )
    elsewhere = literal_profile(Sample("main", 30 * MS, count=3))
    _add(store, replace(elsewhere, binaries=(Binary("/srv/server", ""),)), 1)
    # THEN the methods are two rows, and the C function is one, which says where else it is
    table = questions.top(store, _ALL, 9)
    assert [(row[0], row[2], *row[4:]) for row in table.rows] == [
        ("40.00", "40.00", "forward", "/app/a.py"),
        ("30.00", "100.00", "main", "/opt/server and 1 more"),
        ("30.00", "30.00", "forward", "/app/b.py"),
    ]


def test_time_without_a_stack_is_in_the_table(store: DirectoryEngine) -> None:
    # GIVEN time of which an agent has lost the stack, or has taken none
    blocked = SampleClass.BLOCKED
    lost, not_sampled = StopReason.LOST, StopReason.NOT_SAMPLED
    _add(
        store,
        literal_profile(
            Sample("main;wait", 10 * MS, blocked, count=1),
            Sample("", 60 * MS, blocked, count=6, end=lost),
            Sample("", 30 * MS, blocked, count=3, end=not_sampled),
        ),
    )
    # THEN rows add up to the whole, under the names that a flame graph has for it
    for is_raw in (True, False):
        table = questions.top(store, _ALL, 9, is_raw=is_raw)
        assert [(row[0], row[1], row[4]) for row in table.rows[:3]] == [
            ("60.00", "60.0 %", lost.marker),
            ("30.00", "30.0 %", not_sampled.marker),
            ("10.00", "10.0 %", "wait"),
        ]


_SUMS_ELSEWHERE = """
import sys
from aiflame.agent.store.engines import open_store
from aiflame.agent.store.selector import Selector
from aiflame.agent.store import questions, schema
engine = open_store(sys.argv[1], is_read_only=False, is_new=True)
schema.migrate(engine, 0)
hour = 1_795_003_200  # 2026-11-18 12:00:00
rows = [{"t": hour + s, "class": "on_cpu", "stack_id": 1, "value": n * 10**6} for s, n in
        ((-600, 100), (600, 20), (3_000, 3), (4_200, 4_000))]
from aiflame.agent.store.rows import json_lines
engine.insert("samples", json_lines(rows), "rows")
(found,) = questions.top(engine, Selector(hour, hour + 3_600), 9).rows
print(found[0], engine.query("SELECT uniq(hour) FROM stacks_1h").rows)
# Samples are kept for a shorter time than their sums.
engine.execute("TRUNCATE TABLE samples")
print(*(row[0] for row in questions.top(engine, Selector(hour, hour + 3_600), 9).rows))
engine.close()
"""


@pytest.mark.parametrize(
    ("zone", "hours", "later_ms"),
    [("UTC", 3, "23.00"), ("Asia/Kolkata", 2, "4,003.00"), ("Asia/Tokyo", 3, "23.00")],
)
def test_hours_of_a_store_in_another_zone_are_those_of_utc(
    tmp_path: Path, zone: str, hours: int, later_ms: str
) -> None:
    # GIVEN a store whose engine has its own time zone WHEN an hour of UTC is asked for
    code = [sys.executable, "-c", _SUMS_ELSEWHERE, str(tmp_path / "fleet")]
    environment = {**os.environ, "TZ": zone}
    done = subprocess.run(code, env=environment, capture_output=True, text=True, timeout=60)
    # THEN what is counted is of that hour, or, where samples are gone, of the nearest of its own
    assert done.stdout == f"23.00 [[{hours}]]\n{later_ms}\n", done.stderr


def _waiting(*frames: tuple[str, FrameKind, str]) -> Profile:
    """Returns a profile of one wait, 5 ms of the stack of (name, kind, module or file)."""
    binaries = tuple(Binary(where, "") for _, kind, where in frames if kind is FrameKind.NATIVE)
    of = {binary.path: at for at, binary in enumerate(binaries)}
    functions = tuple(
        Function(kind, name, of.get(where), "" if where in of else where)
        for name, kind, where in frames
    )
    profile = literal_profile(
        Sample(";".join(name for name, *_ in frames), 5 * MS, SampleClass.BLOCKED)
    )
    return replace(profile, functions=functions, binaries=binaries)


_KERNEL = [("[entry]", FrameKind.KERNEL, ""), ("futex_wait", FrameKind.KERNEL, "")]
_SCHEDULED = [("schedule", FrameKind.KERNEL, ""), ("__schedule", FrameKind.KERNEL, "")]
_LIBC = ("pthread_cond_wait", FrameKind.NATIVE, "/usr/lib/x86_64-linux-gnu/libc.so.6")


@pytest.mark.parametrize(
    ("frames", "own"),
    [
        ([("main", FrameKind.NATIVE, "/opt/app"), _LIBC, *_KERNEL], "main"),
        # libc's by itself, and of kernel threads what they do
        ([_LIBC, *_KERNEL, *_SCHEDULED], "pthread_cond_wait"),
        ([("kthread", FrameKind.KERNEL, ""), *_SCHEDULED], "kthread"),
        (_SCHEDULED, "__schedule"),
        # Python's own library waits for its caller, in its functions and modules
        (
            [
                ("serve", FrameKind.PYTHON, "/srv/app.py"),
                ("_eval", FrameKind.INTERPRETER, ""),
                ("Condition.wait", FrameKind.PYTHON, "/usr/lib/python3.11/threading.py"),
                ("lock_acquire", FrameKind.NATIVE, "/usr/bin/python3.11"),
                _LIBC,
                *_KERNEL,
            ],
            "serve",
        ),
        (
            [
                ("serve", FrameKind.PYTHON, "/srv/app.py"),
                ("get", FrameKind.PYTHON, "/v/lib/python3.12/site-packages/redis/client.py"),
                ("sleep", FrameKind.NATIVE, "/v/lib/python3.12/lib-dynload/time.cpython-312.so"),
            ],
            "get",
        ),
        # nobody's code but Python's library
        (
            [
                ("_worker", FrameKind.PYTHON, "/usr/lib/python3.11/concurrent/futures/thread.py"),
                _LIBC,
                *_KERNEL,
            ],
            "_worker",
        ),
        # names that begin alike are others'
        ([("wait", FrameKind.NATIVE, "/opt/libcuda.so.1"), _LIBC, *_KERNEL], "wait"),
        ([("wait", FrameKind.NATIVE, "/opt/python-sampler"), _LIBC, *_KERNEL], "wait"),
        # code of no file
        ([("main", FrameKind.NATIVE, "/opt/app"), ("[jit]", FrameKind.NATIVE, ""), _LIBC], "[jit]"),
    ],
)
def test_waits_are_of_who_waits(
    store: DirectoryEngine, frames: list[tuple[str, FrameKind, str]], own: str
) -> None:
    _add(store, _waiting(*frames))
    for classes in (("blocked",), ()):
        table = questions.top(store, replace(_ALL, classes=classes), 1)
        assert (table.rows[0][0], table.rows[0][-2]) == ("5.00", own)
        raw = questions.top(store, replace(_ALL, classes=classes), 1, is_raw=True)
        assert (raw.rows[0][0], raw.rows[0][-2]) == ("5.00", frames[-1][0])


def test_time_on_the_cpu_is_of_the_innermost(store: DirectoryEngine) -> None:
    _add(store, literal_profile(Sample("main;[k]sys_read;[k]copy", 5 * MS)))
    for classes in (("on_cpu",), ()):
        table = questions.top(store, replace(_ALL, classes=classes), 1)
        assert (table.rows[0][0], table.rows[0][-2]) == ("5.00", "copy")


@pytest.mark.parametrize(
    "inner",
    ["/v/lib/python3.11/site-packages/pyopencl/__init__.py", "<pyopencl invoker for 'scale'>"],
)
def test_launches_are_of_lines_of_no_package(store: DirectoryEngine, inner: str) -> None:
    # GIVEN launches by a package that a program calls, and by one that only a script of pip calls
    profile = small_timed_profile()
    packaged = replace(
        profile,
        functions=tuple(
            replace(f, file=inner) if f.name == "step" else f for f in profile.functions
        ),
    )
    _add(store, packaged)

    def stalled(*, is_raw: bool) -> dict[str, int]:
        lines = questions.stalls_by_line(store, _ALL, 9, is_raw=is_raw)
        return {row[4]: int(row[0]) for row in lines.rows}

    # THEN the line of the program has what is the package's otherwise
    assert stalled(is_raw=True)[f"step ({inner}:21)"] == 40
    assert f"step ({inner}:21)" not in stalled(is_raw=False)
    assert sum(stalled(is_raw=True).values()) == sum(stalled(is_raw=False).values())


def test_tables_of_devices(store: DirectoryEngine) -> None:
    _add(store, small_timed_profile(), 0, pod="a", node="n1")
    _add(store, small_timed_profile(), 1, pod="b", node="n2")
    kernels = questions.kernels(store, _ALL, 2)
    name = kernels.columns.index("kernel")
    assert [row[name] for row in kernels.rows] == ["matmul", "scale_b<float, 4>"]
    assert kernels.rows[0][:5] == ("1,600", "85.0 %", "80", "40.00", "2")
    assert (
        kernels.rows[0][-1] == "long_scoreboard 58.8 %, barrier 29.4 %, math_pipe_throttle 11.8 %"
    )
    # 2 kernels of 3 ms and 2 ms, and 20 ms of matmul, in a window of two seconds
    busy = questions.busy_by(store, replace(_ALL, end_s=_BEGIN_S + 2), "pod", 9)
    assert {row[-1]: row[:2] for row in busy.rows} == {"a": ("1.2 %", "1")}
    stalls = questions.stalls(store, _ALL, 1)
    assert stalls.rows[0][:2] == ("800", "50.0 %")
    assert stalls.rows[0][3:] == ("Test 100", "matmul", "long_scoreboard", "memory")
    lines = questions.stalls_by_line(store, _ALL, 9)
    stalled = {row[4]: int(row[0]) for row in lines.rows}
    assert sum(stalled.values()) == 2 * (400 + 80 + 200 + 40 + 50 + 50)
    assert stalled["step (/app/train.py:21)"] == 80
    assert stalled["[unknown launch]"] == stalled["[no Python]"] == 100


def _ran(
    store: DirectoryEngine,
    minutes: range,
    busy_s: int,
    device: int = 0,
    *,
    pod: str,
    **labels: str,
) -> None:
    """Adds minutes in which kernels of a pod ran on a device for so long."""
    row = {"span_s": 60, "family": "nvidia", "model": "H200", "kernel": "k", "pod": pod, **labels}
    row["device"] = device
    rows = [
        {"t": _BEGIN_S + 60 * minute, "busy_ns": busy_s * NS_PER_S, **row} for minute in minutes
    ]
    store.insert("gpu", json_lines(rows), "-".join((pod, str(device), *labels.values())))


def test_how_busy_a_pod_kept_devices_is_of_the_time_that_is_asked_for(
    store: DirectoryEngine,
) -> None:
    # GIVEN an hour of a pod that used a device in its first minute alone, one that used one for
    # half of all of it, and one that had two devices of one model for all of it
    _ran(store, range(1), 57, pod="short", node="n1")
    _ran(store, range(60), 30, pod="half", node="n1")
    for device in (3, 4):
        _ran(store, range(60), 60, device, pod="whole", node="n2")
    # THEN they are told by the hour, and of the minute by that
    for end_s, shares in (
        (_BEGIN_S + 100_000, [("whole", "100.0 %", "2"), ("half", "50.0 %", "1"),
                              ("short", "1.6 %", "1")]),
        (_BEGIN_S + 60, [("whole", "100.0 %", "2"), ("short", "95.0 %", "1"),
                         ("half", "50.0 %", "1")]),
    ):  # fmt: skip
        busy = questions.busy_by(store, replace(_ALL, end_s=end_s), "pod", 9)
        assert [(row[-1], *row[:2]) for row in busy.rows] == shares


def test_devices_of_one_model_in_a_host_are_told_apart(store: DirectoryEngine) -> None:
    # GIVEN kernels on two devices of one model, in a stretch of time in which a third is idle
    profile = small_timed_profile()
    times = profile.gpu.times.copy()
    times["device"] = 1 + np.arange(len(times)) % 2
    gpu = replace(profile.gpu, devices=profile.gpu.devices * 3, times=times)
    _add(store, replace(profile, gpu=gpu), pod="a", node="n1")
    # THEN these are two
    (row,) = questions.busy_by(store, _ALL, "pod", 9).rows
    assert row[1] == "2"


def test_pods_of_one_name_are_one_in_their_namespace_alone(store: DirectoryEngine) -> None:
    where = (
        {"namespace": "shop"},
        {"namespace": "lab"},
        {"namespace": "lab", "cluster": "eu"},
        {"pod": "", "namespace": "lab"},
    )
    for minute, labels in enumerate(where):
        _ran(store, range(60), 1 + minute, **{"pod": "web-1", "node": "n1", **labels})
        _add(store, small_profile(), minute, **{"pod": "web-1", **labels})
    names = ["[none]", "eu/lab/web-1", "lab/web-1", "shop/web-1"]
    # THEN each has its time in the table of devices
    busy = questions.busy_by(store, _ALL, "pod", 9)
    assert [row[-1] for row in busy.rows] == names
    assert [row[2] for row in busy.rows] == [f"{n * 60_000:,}.00" for n in (4, 3, 2, 1)]
    # AND in a flame graph, also in one of a page, whole or of the heaviest stacks.
    for most, is_page in ((10_000, False), (10_000, True), (8, True)):
        profile = profile_of(store, _ALL, By.POD, most, is_page=is_page).profile
        for view in (View.WALL, View.GPU_TIME):
            roots = {line.partition(";")[0] for line in _folded(profile, view)}
            assert roots == {"[not known]", *names[1:]}, (most, view)


def test_lines_that_are_not_known_are_not_called_another_language(
    store: DirectoryEngine,
) -> None:
    # GIVEN launches of a stack that has not arrived, and of C
    begin_s = _BEGIN_S + 60
    rows = [
        {"t": begin_s, "kernel": "k", "reason": "r", "launch_stack": at, "stalled": 5, "samples": n}
        for at, n in ((1, 5), (2, 50))
    ]
    stack = {"frames": ["main"], "kinds": ["native"], "files": ["/app/run.c"], "lines": [1]}
    store.insert("gpu", json_lines(rows), "gpu-rows")
    store.insert("stacks", json_lines([{"stack_id": 2, "modules": [""], **stack}]), "stack-rows")
    lines = questions.stalls_by_line(store, replace(_ALL, begin_s=begin_s), 9)
    # THEN each is called what it is; of those that stalled alike, that with most samples is first
    assert [(row[0], row[2], row[4]) for row in lines.rows] == [
        ("5", "50", "[no Python]"),
        ("5", "5", "[frames not in the store]"),
    ]


def test_a_kernel_on_devices_of_several_models_is_one(store: DirectoryEngine) -> None:
    # GIVEN a kernel on devices of two models, each on a host of its own, whose launches nobody saw
    profile = small_timed_profile()
    gpu = replace(profile.gpu, calls=profile.gpu.calls[:0])
    for minute, model in enumerate(("Test 100", "Test 200")):
        devices = tuple(replace(device, name=model) for device in gpu.devices)
        of_model = replace(profile, gpu=replace(gpu, devices=devices))
        _add(store, of_model, minute, node=f"n{minute}")
    # THEN it ran on two hosts and both models, and each reason is there once
    kernels = questions.kernels(store, _ALL, 1)
    assert kernels.rows == (
        (
            *("1,600", "85.0 %", "0", "40.00", "2", "matmul", "Test 100, Test 200"),
            "long_scoreboard 58.8 %, barrier 29.4 %, math_pipe_throttle 11.8 %",
        ),
    )


def test_time_of_devices_that_tell_none_is_not_zero(store: DirectoryEngine) -> None:
    _add(store, small_device_profile())
    kernels = questions.kernels(store, _ALL, 9)
    assert {row[kernels.columns.index(">GPU ms")] for row in kernels.rows} == {"-"}
    (busy,) = questions.busy_by(store, _ALL, "service", 9).rows
    assert busy[:2] == ("-", "-")


@pytest.mark.parametrize("question", [("top",), ("kernels",), ("flame", "-f", "folded", "-o", "-")])
def test_a_label_that_nothing_has_is_told_with_those_that_there_are(
    store: DirectoryEngine, capsys: pytest.CaptureFixture[str], question: tuple[str, ...]
) -> None:
    _add(store, small_profile(), 0, service="train", container="shop-web", node="n1")
    _add(store, small_profile(), 1, service="train", container="db", node="n1")
    store.close()
    words = ["query", *question, "--store", store.name]
    # WHEN labels are asked for, of which one matches nothing
    code = cli.main([*words, "--node", "n*", "--container", "web", "--container", "x*"])
    # THEN that one is told, with what it may have been
    assert code == 4
    said = capsys.readouterr()
    assert "no container is called web or x*; there are shop-web, db\n" in said.err
    assert said.out == ""
    # AND no label is blamed where the time is what nothing is of
    assert cli.main([*words, "--from", "0", "--to", "9", "--container", "db"]) == 4
    assert "ask for another time" in capsys.readouterr().err


def test_an_unknown_label_of_a_side_is_told_as_one(
    store: DirectoryEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(store, small_profile())
    store.close()
    words = ["query", "diff", "--store", store.name, "--new", "version=2"]
    assert cli.main([*words, "--base", "contaner=web"]) == 2
    assert "--base: no such label: contaner (did you mean container?)" in capsys.readouterr().err
    assert cli.main([*words, "--base", "container"]) == 2
    assert "--base: not a KEY=VALUE: container" in capsys.readouterr().err


def test_a_table_of_hosts(store: DirectoryEngine) -> None:
    _add(store, small_profile(), 5, node="n2")
    _add(store, small_profile(), 0, node="n1")
    rows = questions.agents(store, _ALL, 9).rows
    assert [row[5] for row in rows] == ["n1", "n2"]
    assert rows[0][-1] == "stacks_full 3"
    assert rows[0][0] < rows[1][0]
    # The line above the table says that these are UTC; no time is wrapped in a narrow terminal.
    assert len(rows[0][0]) == len("2026-11-25 09:20:00")
    # AND a gap is none of the time that was recorded
    _add(store, small_profile(), 500, node="n1")
    recorded = {
        row[5]: int(row[1].removesuffix(" s")) for row in questions.agents(store, _ALL, 9).rows
    }
    assert recorded["n1"] == 2 * recorded["n2"] > 0
    with pytest.raises(AiflameError, match="no pod"):
        questions.agents(store, replace(_ALL, labels={"pod": ("x",)}), 9)


def _side(store: DirectoryEngine, version: str, share: float, hosts: int = 12) -> None:
    """Puts two windows of some hosts there, in which `step` has a share that varies a little."""
    random = np.random.default_rng(int(1000 * share))
    for host in range(hosts):
        for minute in range(2):
            count = int(random.normal(share, 0.01) * 1_000)
            profile = literal_profile(
                Sample("main;step", count * MS, count=count),
                Sample("main;load", (1_000 - count) * MS, count=1_000 - count),
            )
            _add(store, profile, minute, node=f"{version}-{host}", version=version)


def test_a_growth_fails_and_no_growth_does_not(
    store: DirectoryEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN three versions, of which the third spends 8 points more in a function
    for version, share in (("1", 0.200), ("2", 0.203), ("3", 0.28)):
        _side(store, version, share)
    _side(store, "few", 0.5, hosts=1)
    name = store.name
    store.close()

    def diff(base: str, new: str, *more: str) -> int:
        words = ["query", "diff", "--store", name, "--base", f"version={base}"]
        return cli.main([*words, "--new", f"version={new}", "--fail-on", "+2%", *more])

    # THEN it fails there only, and says which
    assert diff("1", "2") == 0
    assert "grew" not in capsys.readouterr().err
    assert diff("2", "3") == 1
    out, err = capsys.readouterr()
    assert re.search(r"aiflame: step grew by \+7\.\d+ points, at least by \+[67]\.\d+\n", err)
    assert "load" not in err
    assert "24,000 samples of 12 hosts" in " ".join(out.split())
    assert diff("2", "3", "--self") == 1
    assert diff("3", "1") == 1, "the rest has grown"
    assert "load grew" in capsys.readouterr().err
    # and not of time that is not of the class
    assert diff("2", "3", "--class", "blocked") == 4
    capsys.readouterr()
    # and what says nothing is refused with a code of its own
    assert diff("1", "few") == 5
    assert "too few" in capsys.readouterr().err
    assert diff("1", "none") == 4


def test_waits_are_compared_as_cpu_time_is(
    store: DirectoryEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN two versions that wait longer for a lock, and compute alike
    blocked = SampleClass.BLOCKED
    for version, lock in (("1", 300), ("2", 600)):
        for host in range(12):
            profile = literal_profile(
                Sample("main;step", 900 * MS, count=900),
                Sample("main;lock", lock * MS, klass=blocked, count=lock),
                Sample("main;read", (1_000 - lock) * MS, klass=blocked, count=1_000 - lock),
            )
            _add(store, profile, 0, node=f"n{host}", version=version)
    name = store.name
    store.close()
    sides = ["--base", "version=1", "--new", "version=2", "--fail-on", "+2%"]
    words = ["query", "diff", "--store", name, *sides]
    # THEN only their waits differ
    assert cli.main(words) == 0
    page = tmp_path / "waits.html"
    capsys.readouterr()
    assert cli.main([*words, "--class", "blocked", "-o", str(page)]) == 1
    out, err = capsys.readouterr()
    assert "lock grew by +30.00 points" in err
    assert "shares of a side's blocked time" in " ".join(out.split())
    assert "= 12.000 s of blocked time of new (version 2)" in page.read_text()


def test_waits_by_themselves_are_compared_as_they_are_listed(store: DirectoryEngine) -> None:
    # GIVEN a version that waits in another function, both in the same one of the kernel
    for version, own in (("1", "read_all"), ("2", "lock_all")):
        for host in range(8):
            stack = f"main;{own};[k]do_wait;[k]schedule"
            profile = literal_profile(Sample(stack, 900 * MS, SampleClass.BLOCKED, count=900))
            _add(store, profile, 0, node=f"n{host}", version=version)
    sides = [replace(_ALL, labels={"version": (v,)}, classes=("blocked",)) for v in "12"]
    found = compare(store, *sides, is_self=True, least_share=0.01)
    assert {f.name: round(f.change.difference, 6) for f in found.functions} == {
        "read_all": -1.0,
        "lock_all": 1.0,
    }


def test_stacks_that_were_lost_raise_no_alarm(
    store: DirectoryEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN two versions that do the same, of the first of which a fifth of the stacks was lost
    for version, lost in (("1", 200), ("2", 0), ("none", 1_000)):
        for host in range(8):
            kept = (1_000 - lost) // 2
            samples = [Sample(f"main;{f}", kept * MS, count=kept) for f in ("step", "load") if kept]
            if lost:
                samples.append(Sample("", lost * MS, count=lost, end=StopReason.LOST))
            _add(store, literal_profile(*samples), 0, node=f"n{host}", version=version)
    name = store.name
    store.close()
    words = ["query", "diff", "--store", name, "--new", "version=2"]
    page = tmp_path / "diff.html"
    # THEN nothing has grown, and it is said what is left out
    fails = ["--fail-on", "+30%"]
    assert cli.main([*words, "--base", "version=1", "-o", str(page), *fails]) == 0
    said = capsys.readouterr()
    assert "grew" not in said.err
    assert "stack was lost, 20.0 % of base and 0.0 % of new: low and" in " ".join(said.out.split())
    rows = {row.split()[-1]: row.split()[0] for row in said.out.splitlines() if row}
    assert (rows["main"], rows["step"]) == ("100.00", "50.00")
    assert "20.0 % of base and 0.0 % of new" in page.read_text()
    # and where a growth could not be told from what was lost, that is no success
    fails = ["--fail-on", "+2%"]
    assert cli.main([*words, "--base", "version=1", *fails]) == 5
    assert "too much time whose stack was lost to tell: 20.0 % of base" in capsys.readouterr().err
    # and a side of which nothing but time is known is refused
    assert cli.main([*words, "--base", "version=none", *fails]) == 5
    assert "version none has 0, 1,000 are needed" in capsys.readouterr().err


def test_a_store_that_nobody_named_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AIFLAME_STORE", raising=False)
    monkeypatch.setattr("aiflame.agent.commands.store_options._ROOT_STORE", tmp_path / "root")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for uid, folder in ((0, tmp_path / "root"), (1000, tmp_path / "aiflame" / "store")):
        monkeypatch.setattr("os.geteuid", lambda uid=uid: uid)
        assert cli.main(["query", "top"]) == 2
        err = capsys.readouterr().err
        assert f"no store here: {folder}" in err
        assert f"aiflame store init --store {folder}" in err


def test_a_comparison_of_the_same_hosts_over_time_says_so(store: DirectoryEngine) -> None:
    for version in ("1", "2"):
        for minute in range(12):
            profile = literal_profile(Sample("main;step", 900 * MS, count=900))
            _add(store, profile, minute, node="n", version=version)
    sides = [replace(_ALL, labels={"version": (v,)}, classes=("on_cpu",)) for v in "12"]
    found = compare(store, *sides, is_self=False, least_share=0.01)
    assert not found.is_by_host
    assert "hosts are too few" in found.table(5, ("a", "b"), "CPU time", False).whole
    assert grown(found.functions, 0.0) == ()
    with pytest.raises(TooFewSamples):
        few = replace(sides[1], end_s=_BEGIN_S + 120)
        compare(store, sides[0], few, is_self=False, least_share=0.01)


@pytest.mark.parametrize("are_hosts", [True, False])
def test_eight_hosts_or_windows_are_enough_whatever_they_are_called(
    store: DirectoryEngine, are_hosts: bool
) -> None:
    # GIVEN sides of eight hosts each, or of eight windows of one, of many names
    names = "abcdef"
    for name in names:
        for i in range(8):
            profile = literal_profile(Sample("main;step", 900 * MS, count=900))
            node = f"{name}{i}" if are_hosts else name
            _add(store, profile, 0 if are_hosts else i, node=node, version=name)
    # THEN none of them is refused
    sides = [replace(_ALL, labels={"version": (v,)}, classes=("on_cpu",)) for v in names]
    for base, new in itertools.pairwise(sides):
        found = compare(store, base, new, is_self=False, least_share=0.01)
        assert found.is_by_host is are_hosts
        assert grown(found.functions, 0.0) == ()
    # AND seven are
    few = replace(sides[1], end_s=_BEGIN_S + 7 * 60)
    if are_hosts:
        few = replace(sides[1], labels={"node": tuple(f"b{i}" for i in range(7))})
    with pytest.raises(TooFewSamples, match="has 7, 8 are needed"):
        compare(store, sides[0], few, is_self=False, least_share=0.01)


def test_what_is_asked_for_by_words(
    store: DirectoryEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(store, small_timed_profile(), 0, node="n1")
    name = store.name
    store.close()

    def query(*words: str) -> tuple[int, str, str]:
        code = cli.main(["query", words[0], "--store", name, *words[1:]])
        return (code, *capsys.readouterr())

    page = tmp_path / "page.html"
    code, _, err = query("flame", "-o", str(page), "--by", "node")
    assert (code, page.read_bytes()[:15]) == (0, b"<!doctype html>")
    assert "Wrote" in err
    assert query("flame", "-o", str(page))[0] == 2, "it is not replaced"
    code, out, _ = query("sql", "SELECT {x:String} AS x, 1 AS n", "--parameter", "x=a'b", "--json")
    assert (code, out) == (0, '{"x": "a\'b", "n": 1}\n')
    code, out, _ = query("sql", "SELECT number AS n FROM numbers(30)", "-n", "3")
    assert "... and 27 more" in out
    code, out, _ = query("sql", "SELECT number AS n FROM numbers(30)", "--json")
    assert (code, out.count("\n")) == (0, 30)
    code, out, _ = query("sql", "SELECT number AS n FROM numbers(30)", "--json", "-n", "3")
    assert (code, out.count("\n")) == (0, 3)
    for question in ("top", "kernels", "stalls", "agents"):
        code, out, said = query(question, "--from", "20010101", "--to", "2001-01-02")
        assert (code, out) == (4, ""), question
        assert "2001-01-01 00:00" in said
        code, _, said = query(question, "--to", "0")
        assert code == 4
        assert f"between {moment_words(_BEGIN_S)} and " in said
    # A store of less than an hour tells the time that it holds.
    code, out, _ = query("top", "--class", "all")
    assert f", {moment_words(_BEGIN_S)} to " in " ".join(out.split())
    # What is shorter than a window, here of two seconds, is a whole one.
    words = f", {moment_words(_BEGIN_S)} to {moment_words(_BEGIN_S + 2)};"
    for last in ("500ms", "1s", "1500ms", "9s"):
        code, out, _ = query("top", "--class", "all", "--last", last)
        assert (code, words in " ".join(out.split())) == (0, True), last
    assert query("top", "--from", "2027-01-02", "--to", "2027-01-01")[0] == 2
    assert (
        query("flame", "-f", "svg", "-o", "-", "--from", "1999-01-01", "--to", "1999-01-02")[0] == 4
    )
    assert query("diff", "--base", "version=1", "--new", "version=1")[0] == 2
    assert query("diff", "--base", "versio=1", "--new", "version=2")[0] == 2
    for label in LABELS:
        code, _, said = query("top", f"--{label.replace('_', '-')}", "no such")
        assert (code, f"no {label} is called no such; " in said) == (4, True), said
    assert os.environ.get("AIFLAME_STORE") is None or name != os.environ["AIFLAME_STORE"]


def test_the_same_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a server, with the same engine, and a user with a password
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    with clickhouse(tmp_path / "server") as (_, url):
        assert cli.main(["store", "init", "--store", url]) == 0
        assert "is up to date" in capsys.readouterr().err
        engine = open_store(url, is_read_only=True)
        state = schema.require(engine)
        # WHEN a profile is put there, with many stacks
        profile = large_profile(stacks=12_000, depth=5, samples=12_000)
        batch = Batch(Labels("train"), profile, _BEGIN_S * NS_PER_S, 60 * NS_PER_S)
        for piece in inserts_of([batch], "", lambda _: True):
            engine.insert(piece.table.value, piece.rows, piece.token)
        # THEN it is found again, values stay values, and nothing is changed by a question
        found = profile_of(engine, _ALL, By.PROCESS, 100_000).profile
        assert int(found.samples["ns"].sum()) == int(profile.samples["ns"].sum())
        assert len(found.stacks) == 12_000
        for value in _VALUES:
            rows = engine.query("SELECT {a:String}, {b:Array(String)}", {"a": value, "b": [value]})
            assert rows.rows == [[value, [value]]]
        with pytest.raises(StoreError, match="READONLY"):
            engine.query("DROP TABLE samples")
        assert cli.main(["query", "top", "--store", url]) == 0
        assert "Top functions, on cpu" in capsys.readouterr().out
        assert state.version == schema.VERSION
        # and another password is not taken
        monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
        assert cli.main(["query", "top", "--store", url]) == 1
        assert "Authentication failed" in capsys.readouterr().err
