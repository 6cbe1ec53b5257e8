# SPDX-License-Identifier: Apache-2.0
"""Pages from stores: when time was and whose, as the store says it, and never too large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent import cli
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.profile import NS_PER_S, Fleet, Loss, Profile
from aiflame.agent.reports import FORMATS, ReportOptions, View
from aiflame.agent.reports.base import Leaf
from aiflame.agent.store import detail, profiles, schema
from aiflame.agent.store.engines import DirectoryEngine, open_store
from aiflame.agent.store.inserts import inserts_of
from aiflame.agent.store.profiles import By, profile_of
from aiflame.agent.store.selector import Selector
from device_profiles import small_timed_profile
from profiles import HOSTILE_NAMES, MS, RECORDING, Sample, small_profile
from profiles import profile_of as literal_profile

pytest.importorskip("chdb", reason="chDB is not installed")

_BEGIN_S = RECORDING.started_unix_ns // NS_PER_S
_WINDOW_S = 10
_ALL = Selector(_BEGIN_S - 10, _BEGIN_S + 100_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryEngine]:
    engine = open_store(str(tmp_path / "fleet"), is_read_only=False, is_new=True)
    schema.migrate(engine, 0)
    assert isinstance(engine, DirectoryEngine)
    yield engine
    engine.close()


def _add(engine: DirectoryEngine, profile: Profile, window: int, **labels: str) -> None:
    recording = replace(profile.recording, duration_ns=_WINDOW_S * NS_PER_S)
    whole = replace(profile, recording=recording, spans=profile.spans[:0])
    begin_ns = (_BEGIN_S + window * _WINDOW_S) * NS_PER_S
    own = Labels(**{"service": "train", **labels})
    batch = Batch(own, whole, begin_ns, recording.duration_ns)
    for piece in inserts_of([batch], "", lambda _: True):
        engine.insert(piece.table.value, piece.rows, piece.token)


def _add_fleet(engine: DirectoryEngine) -> None:
    for window in range(6):
        _add(engine, small_profile(), window, node=f"n{window % 2}", version="1")
        _add(engine, small_timed_profile(), window, node="n2", pod="p", service="infer")
    _add(engine, small_profile(), 3, node="n3", version="2", service="web")


def _fleet(profile: Profile) -> Fleet:
    assert profile.fleet is not None
    return profile.fleet


def _folded(profile: Profile, view: View) -> list[str]:
    options = ReportOptions(view=view, leaf=Leaf.STALL)
    return FORMATS["folded"].render(profile, options).decode().splitlines()


def _by_label(profile: Profile, name: str) -> Counter[tuple[int, str]]:
    """Nanoseconds by second of the bucket, and value."""
    (label,) = (label for label in _fleet(profile).labels if label.name == name)
    values = [*label.values, f"others {label.others}"]
    sums: Counter[tuple[int, str]] = Counter()
    for span in profile.spans:
        value = values[label.of_thread[profile.samples["thread"][span["sample"]]]]
        sums[_fleet(profile).begin_s + int(span["first_s"]), value] += int(span["ns"])
    return sums


@pytest.mark.parametrize("by", [By.SERVICE, By.NODE, By.PROCESS])
def test_a_page_has_what_other_formats_have(store: DirectoryEngine, by: By) -> None:
    _add_fleet(store)
    plain = profile_of(store, _ALL, by, 10_000)
    page = profile_of(store, _ALL, by, 10_000, is_page=True)
    for view in View:
        assert sorted(_folded(page.profile, view)) == sorted(_folded(plain.profile, view)), view
    assert (page.left_out, page.left_out_ns) == (0, 0)
    assert int(page.profile.spans["ns"].sum()) == int(page.profile.samples["ns"].sum())
    assert _fleet(plain.profile).labels == ()


@pytest.mark.parametrize("name", ["service", "node", "version", "class"])
def test_sums_by_bucket_and_label_are_the_stores(store: DirectoryEngine, name: str) -> None:
    _add_fleet(store)
    profile = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=True).profile
    assert _fleet(profile).bucket_s == _WINDOW_S
    rows = store.query(
        f"SELECT toUInt32(t), {name}, sum(value) FROM samples GROUP BY t, {name}"  # noqa: S608
    ).rows
    words = {"on_cpu": "on-CPU", "waiting_to_run": "waiting to run"}
    told = {(t, words.get(value, value)): ns for t, value, ns in rows if ns}
    found = {(t, value): ns for (t, value), ns in _by_label(profile, name).items() if ns}
    assert found == told
    assert found


def test_what_devices_did_has_its_labels_and_time(store: DirectoryEngine) -> None:
    _add_fleet(store)
    profile = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=True).profile
    fleet = _fleet(profile)
    services, classes = (
        next(label for label in fleet.labels if label.name == name) for name in ("service", "class")
    )
    owners = fleet.thread_of_kernel
    assert {services.values[i] for i in services.of_thread[owners]} == {"infer"}
    assert {*classes.of_thread[owners].tolist()} == {-1}
    # AND a kernel that ran in six windows is one of each
    assert {*(profile.gpu.samples["interval"] // _WINDOW_S).tolist()} == {*range(6)}


def test_a_difference_merges_versions_and_tells_both_shares(
    store: DirectoryEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN two versions with other lines, in other folders; the second loads more
    for host in range(12):
        for version, load, line in (("1", 200, 5), ("2", 400, 9)):
            folder = f"/opt/app-{version}"
            profile = literal_profile(
                Sample(
                    f"main;[p]run@{folder}/a.py:{line}", (1_000 - load) * MS, count=1_000 - load
                ),
                Sample(f"main;[p]load@{folder}/b.py:{line}", load * MS, count=load),
            )
            for window in range(int(version)):
                _add(store, profile, window, node=f"n{host}", version=version)
    name = store.name
    store.close()

    def diff(*words: str) -> tuple[int, str, str]:
        sides = ["--service", "train", "--base", "version=1", "--new", "version=2"]
        code = cli.main(["query", "diff", "--store", name, *sides, *words])
        return (code, *capsys.readouterr())

    # THEN folded text has one line for both, base scaled to the whole of new
    code, out, _ = diff("-f", "folded", "-o", "-")
    assert (code, out.splitlines()) == (
        0,
        [
            f"train;main;load (b.py)_[p] {4_800 * MS} {9_600 * MS}",
            f"train;main;run (a.py)_[p] {19_200 * MS} {14_400 * MS}",
        ],
    )
    # AND a page is written beside the table, also where growth fails
    page = tmp_path / "diff.html"
    code, out, err = diff("-o", str(page), "--fail-on", "+2%")
    assert (code, "load grew by +20.00 points" in err, "+20.00" in out) == (1, True, True)
    text = page.read_text()
    assert "<title>aiflame: train, version 2 against version 1</title>" in text
    assert "of CPU time of new (version 2), of base (version 1) 12.000 s" in text
    # AND what cannot be written is refused before anything is asked
    assert diff("-o", str(page))[0] == 2, "it is not replaced"
    assert diff("-o", str(tmp_path / "diff.pb.gz"))[0] == 2, "pprof compares by itself"
    assert diff("-f", "svg")[0] == 2, "of no file"


def _ns_by_root(profile: Profile) -> Counter[str]:
    """Time by the outermost function of stacks."""
    found: Counter[str] = Counter()
    first = profile.stacks.frames[profile.stacks.offsets[:-1]]
    for stack, ns in profile.samples[["stack", "ns"]].tolist():
        function = profile.functions[profile.frames["function"][first[stack]]]
        found[function.name] += ns
    return found


def test_a_difference_says_what_is_left_out(store: DirectoryEngine) -> None:
    _add(store, small_profile(), 0, version="1")
    _add(store, small_profile(), 0, version="2", node="n")
    sides = [replace(_ALL, labels={"version": (v,)}, classes=("on_cpu",)) for v in "12"]
    whole = profiles.difference_of(store, *sides, 100)
    some = profiles.difference_of(store, *sides, 1)
    stacks = len(whole.profile.samples) // 2
    assert (whole.left_out, some.left_out) == (0, stacks - 1)
    # What is left out is a part of its side: what stays has the share that it had.
    ns = _ns_by_root(some.profile)
    assert sum(ns.values()) == sum(_ns_by_root(whole.profile).values())
    assert ns[profiles.LIGHTER_STACKS] == some.left_out_ns > 0
    assert any(name == "left out" for name, _ in some.profile.recording.facts)
    # Losses of the hosts of both sides, each once.
    assert {(loss.name, loss.count) for loss in whole.profile.losses} == {("stacks_full", 6)}


def test_labels_of_one_value_are_none(store: DirectoryEngine) -> None:
    _add(store, literal_profile(Sample("main;a", 9 * MS)), 0, pod="x")
    _add(store, literal_profile(Sample("main;a", 9 * MS)), 1, pod="x")
    assert _fleet(profile_of(store, _ALL, By.POD, 10, is_page=True).profile).labels == ()


def test_values_stay_values(store: DirectoryEngine) -> None:
    names = [name for name in (*HOSTILE_NAMES, "\\", "{x:String}", "") if "\ud800" not in name]
    for i, name in enumerate(names):
        _add(store, literal_profile(Sample("main;a", (i + 1) * MS)), 0, pod=name)
    rows = store.query("SELECT pod, sum(value) FROM samples GROUP BY pod").rows
    profile = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=True).profile
    found = {value: ns for (_, value), ns in _by_label(profile, "pod").items()}
    assert found == {str(value): int(ns) for value, ns in rows}
    # AND the heaviest is first
    (pods,) = _fleet(profile).labels
    assert pods.values[0] == max(found, key=lambda value: found[value])


def _add_pods(engine: DirectoryEngine, pods: int) -> None:
    """Gives each pod what the first has, the more the higher its number."""
    _add(engine, small_profile(), 0, pod="first")
    columns = "t, span_s, class, unit, cluster, node, service, version, namespace"
    engine.execute(
        f"INSERT INTO samples ({columns}, pod, workload, container, container_id, pid, comm,"  # noqa: S608
        f" labels, stack_id, value, events) SELECT {columns},"
        " concat('pod-', toString(number)) AS pod, workload, container, container_id, pid, comm,"
        " labels, stack_id, value + 100000 * number, events FROM samples"
        f" CROSS JOIN numbers({pods - 1}) AS n"
    )


def test_a_fleet_of_many_pods_makes_a_small_page(store: DirectoryEngine, tmp_path: Path) -> None:
    # GIVEN ten thousand pods
    _add_pods(store, 10_000)
    ((whole,),) = store.query("SELECT sum(value) FROM samples").rows
    # WHEN a page is made
    found = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=True)
    page = FORMATS["html"].render(found.profile, ReportOptions())
    # THEN the heaviest have a name, the others are one, and nothing is missing
    (pods,) = (label for label in _fleet(found.profile).labels if label.name == "pod")
    assert pods.values == tuple(f"pod-{n}" for n in range(9_998, 9_898, -1))
    assert pods.others == 9_900
    assert int(found.profile.spans["ns"].sum()) == whole
    assert len(page) < 2_000_000


def test_a_page_that_would_be_too_large_is_coarser(
    store: DirectoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for window in range(6):
        for pod in range(8):
            _add(store, small_profile(), window, pod=f"p{pod}", service=f"s{pod % 2}")
    ((whole,),) = store.query("SELECT sum(value) FROM samples").rows
    finest = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=True).profile
    monkeypatch.setattr(detail, "MOST_ROWS", len(finest.spans) // 2)
    found = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=True)
    (pods,) = (label for label in _fleet(found.profile).labels if label.name == "pod")
    assert (len(pods.values) + pods.others, pods.others > 0) == (8, True)
    assert len(found.profile.spans) <= len(finest.spans) // 2
    # Services, which are few, still have their names.
    assert {*_services(found.profile)} == {"s0", "s1"}
    assert int(found.profile.spans["ns"].sum()) == whole
    # AND where nothing is coarse enough, the lightest is left out, and that is said
    monkeypatch.setattr(detail, "MOST_ROWS", 5)
    monkeypatch.setattr(profiles, "MOST_ROWS", 5)
    cut = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=True)
    assert len(cut.profile.spans) == 5
    assert int(cut.profile.spans["ns"].sum()) + cut.left_out_ns == whole
    assert any(name == "left out" for name, _ in cut.profile.recording.facts)


def test_words_around_a_flame_graph_are_of_a_fleet(store: DirectoryEngine) -> None:
    # GIVEN hosts that lost something, and left something out since they were told to
    losses = (Loss("ring_full", 3, ""), Loss("excluded", 17, ""))
    _add(store, replace(small_profile(), losses=losses), 0)
    for is_page, name in ((True, "html"), (False, "svg")):
        profile = profile_of(store, _ALL, By.SERVICE, 10_000, is_page=is_page).profile
        text = FORMATS[name].render(profile, ReportOptions()).decode()
        # THEN the whole is of a time of day, and of no number of threads; nobody tells a cost
        whole = text[text.index("100 % = ") :].partition("<")[0]
        assert " UTC" in whole or "2026-" in whole
        assert "thread" not in whole
        assert "The recorder itself" not in text
        assert "own cost" not in text
        # and what was asked for is no loss
        assert "Lost ring_full: 3" in text
        assert "Lost excluded" not in text
        assert "Left out as asked for: excluded 17" in text


def _services(profile: Profile) -> tuple[str, ...]:
    return next(label.values for label in _fleet(profile).labels if label.name == "service")


def test_lighter_stacks_are_left_out_of_a_page_as_of_all(store: DirectoryEngine) -> None:
    _add_fleet(store)
    plain = profile_of(store, _ALL, By.SERVICE, 4)
    page = profile_of(store, _ALL, By.SERVICE, 4, is_page=True)
    assert (page.left_out, page.left_out_ns) == (plain.left_out, plain.left_out_ns)
    assert page.left_out > 0
    assert sorted(_folded(page.profile, View.WALL)) == sorted(_folded(plain.profile, View.WALL))


def test_the_command_makes_such_a_page(store: DirectoryEngine, tmp_path: Path) -> None:
    _add_fleet(store)
    path = tmp_path / "fleet.html"
    assert cli.main(["query", "flame", "--store", store.name, "-o", str(path)]) == 0
    text = path.read_text()
    assert '"fleet":{"begin_s":' in text
    assert '"width_s":10,"buckets":6' in text


@pytest.mark.parametrize("days", [1, 30])
def test_strips_have_at_most_300_bars(store: DirectoryEngine, days: int) -> None:
    _add(store, literal_profile(Sample("main;a", 9 * MS)), 0)
    _add(store, literal_profile(Sample("main;a", 9 * MS)), days * 8_640 - 1)
    whole = Selector(_BEGIN_S, _BEGIN_S + days * 86_400 + 1)
    fleet = _fleet(profile_of(store, whole, By.SERVICE, 10, is_page=True).profile)
    assert 150 <= days * 86_400 / fleet.bucket_s <= 300
    assert fleet.bucket_s % _WINDOW_S == 0
