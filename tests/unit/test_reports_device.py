# SPDX-License-Identifier: Apache-2.0
"""Device samples in every format: the combined stacks, what their weights and colours are."""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from aiflame.agent.commands import report as verb
from aiflame.agent.errors import UsageError
from aiflame.agent.model.gpu import KERNEL_TIME_DTYPE, NONE, Device, Kernel, Tier
from aiflame.agent.model.profile import Loss, Profile, StopReason
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.base import ColorBy, Leaf
from aiflame.agent.reports.csv_tables import csv_files, safe
from aiflame.agent.reports.device_facts import absence
from aiflame.agent.reports.device_rows import device_rows, device_samples
from aiflame.agent.reports.kernel_names import demangled, kernel_names, shortened
from aiflame.agent.reports.kernel_stats import kernel_stats
from aiflame.agent.reports.stall_colors import INKS, LEAST_STRENGTH, mixed
from aiflame.agent.reports.stats import tables
from aiflame.gpu.stalls import StallCategory
from device_profiles import (
    Launch,
    Place,
    Ran,
    device_profile_of,
    hostile_device_profile,
    small_device_profile,
)
from goldens import assert_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from pprof_decoder import decode
from profiles import empty_profile, small_profile

_GPU = ReportOptions(view=View.GPU)


def _folded(profile: Profile, **options: object) -> list[str]:
    chosen = replace(_GPU, **options)  # type: ignore[arg-type]
    return FORMATS["folded"].render(profile, chosen).decode().splitlines()


_ONE = device_profile_of(
    [Launch("main;[p]f@/a/b.py:3;launch", "vadd", 2)],
    [Ran("vadd", 0x1C0, 7, "barrier")],
    {"vadd": (Place(0x1C0, "BAR", "/x/k.cl", 12),)},
)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "main;f (b.py:3)_[p];launch;-;vadd_[G];k.cl:12_[G];BAR_[g];barrier_[g];0x1c0_[g] 7"),
        ({"plain": True}, "main;f (b.py:3);launch;-;vadd;k.cl:12;BAR;barrier;0x1c0 7"),
        ({"leaf": Leaf.STALL, "plain": True}, "main;f (b.py:3);launch;-;vadd;k.cl:12;barrier 7"),
        (
            {"leaf": Leaf.INSTRUCTION, "plain": True, "frames": Frames.PYTHON},
            "f (b.py:3);-;vadd;k.cl:12;BAR;barrier 7",
        ),
        (
            {"leaf": Leaf.STALL, "plain": True, "frames": Frames.NATIVE},
            "main;launch;-;vadd;k.cl:12;barrier 7",
        ),
    ],
)
def test_a_combined_stack(options: dict[str, object], line: str) -> None:
    assert _folded(_ONE, **options) == [f"server (100);{line}"]


def test_folded_device_samples_are_as_reviewed() -> None:
    assert_golden("device.folded", FORMATS["folded"].render(small_device_profile(), _GPU))


def test_what_nobody_launched_stays_in_the_flame_graph() -> None:
    profile = device_profile_of(runs=[Ran("ghost", 0, 5, "selected", process=1)])
    assert _folded(profile, plain=True) == [
        "client (200);[unknown launch];-;ghost;selected;0x0 5",
    ]


def test_a_cut_launching_stack_says_so() -> None:
    launch = Launch("launch", "k", 1, end=StopReason.NO_TABLE)
    (line,) = _folded(device_profile_of([launch], [Ran("k", 0, 5)]), plain=True)
    assert line == "server (100);[truncated: no table];launch;-;k;selected;0x0 5"


def test_every_sample_is_in_every_format() -> None:
    profile = small_device_profile()
    whole = int(profile.gpu.samples["count"].sum())
    assert sum(int(line.rpartition(" ")[2]) for line in _folded(profile)) == whole
    pprof = decode(FORMATS["pprof"].render(profile, _GPU))
    assert sum(sample.values["device_samples/count"] for sample in pprof.samples) == whole
    scope = json.loads(FORMATS["speedscope"].render(profile, _GPU))
    assert sum(sum(p["weights"]) for p in scope["profiles"]) == whole
    rows = list(csv.DictReader(io.StringIO(csv_files(profile, _GPU)["stalls.csv"].decode())))
    assert sum(int(row["samples"]) for row in rows) == whole
    assert f"{whole:,} samples, 100.00 %" in FORMATS["svg"].render(profile, _GPU).decode()


def test_time_views_know_nothing_of_devices() -> None:
    profile = small_device_profile()
    bare = replace(profile, gpu=type(profile.gpu)())
    for form in ("svg", "folded", "pprof"):
        options = ReportOptions(view=View.WALL)
        assert FORMATS[form].render(profile, options) == FORMATS[form].render(bare, options)


def _svg_frames(profile: Profile, options: ReportOptions) -> dict[str, str]:
    """Fill by the first words of a tooltip."""
    root = ET.fromstring(FORMATS["svg"].render(profile, options))  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    frames = next(g for g in root.iter(f"{space}g") if g.get("id") == "frames")
    found = {}
    for group in frames:
        rect, title = group.find(f"{space}rect"), group.find(f"{space}title")
        assert rect is not None and title is not None
        found[title.text or ""] = rect.get("fill") or ""
    return found


def test_stall_colours_follow_the_largest_category_and_its_share() -> None:
    profile = device_profile_of(
        [Launch("main", "k", 1)], [Ran("k", 0, 75, "barrier"), Ran("k", 8, 25, "selected")]
    )
    fills = _svg_frames(profile, _GPU)
    sync = StallCategory.SYNC.color
    assert (
        fills["k (100 samples, 100.00 %, 75.00 % sync; launch stack exact)"] == mixed(sync, 0.75)[0]
    )
    assert fills["barrier (75 samples, 75.00 %, 100.00 % sync)"] == sync.lower()
    assert fills["- (100 samples, 100.00 %, 75.00 % sync)"] == "#c8c8c8"
    # AND by frame, a stall is green and a kernel aqua, whatever it waited for
    fills = _svg_frames(profile, replace(_GPU, color_by=ColorBy.FRAME))
    assert fills["barrier (75 samples, 75.00 %, 100.00 % sync)"] != sync.lower()


def test_a_kernels_frame_says_how_sure_its_stack_is() -> None:
    titles = [title for title in _svg_frames(small_device_profile(), _GPU) if "; launch" in title]
    assert [title.partition(" (")[0] + ":" + title.rpartition(" ")[2] for title in titles] == [
        *("fill:exact)", "ghost:unattributed)", "matmul:shared)", "matmul:shared)"),
        "scale_b<float, 4>:exact)",
    ]


def test_text_can_be_read_on_every_stall_colour() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for category in StallCategory:
        for share in np.linspace(0, 1, 21).tolist():
            fill, ink = mixed(category.color, share)
            light, dark = sorted((luminance(fill), luminance(ink)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5
            assert ink in INKS
    assert 0 < LEAST_STRENGTH < 1


def test_inverted_begins_with_the_reason() -> None:
    made = device_rows(_ONE, replace(_GPU, inverted=True), device_samples(_ONE)).rows
    names = [made.labels.names[i] for i in next(made.paths(np.arange(1)))]
    assert names[-6:] == ["-", "vadd", "k.cl:12", "0x1c0", "BAR", "barrier"]
    titles = [*_svg_frames(_ONE, replace(_GPU, inverted=True))]
    assert [title.partition(" (7")[0] for title in titles[:5]] == [
        *("all", "barrier", "BAR", "0x1c0", "k.cl:12"),
    ]


def test_notes_say_how_sure_the_stacks_are() -> None:
    text = FORMATS["svg"].render(small_device_profile(), _GPU).decode()
    assert "Attribution: 15.00 % exact, 80.00 % shared, 5.00 % unattributed, 7 lost." in text
    assert "100 % = 1,000 device samples of 4 kernels, recorded in 2.000 s" in text
    assert "memory 45.00 %" in text


def test_absence_is_said_in_one_line() -> None:
    seen = "No device API calls were seen in the recorded processes."
    assert absence(small_profile()) == seen
    text = FORMATS["svg"].render(small_profile(), _GPU).decode()
    assert seen in text
    limit = Device("nvidia", "H200", Tier.LAUNCHES, "no counters", 0)
    only_launches = device_profile_of([Launch("main", "k", 1)], devices=(limit,))
    assert absence(only_launches) == (
        "Device API calls were seen, but no device samples were taken: H200: no counters"
    )
    assert absence(small_device_profile()) == ""


@pytest.mark.parametrize("form", ["svg", "folded", "html", "pprof", "speedscope"])
@pytest.mark.parametrize("leaf", list(Leaf))
def test_hostile_and_empty_profiles_are_drawn(form: str, leaf: Leaf) -> None:
    for profile in (hostile_device_profile(), empty_profile()):
        data = FORMATS[form].render(profile, replace(_GPU, leaf=leaf))
        assert data or form == "folded"
        # Names are in folded text and in JSON as they are; markup has none.
        assert form in ("folded", "speedscope") or b"<script>alert(1)" not in data
        # A name of a megabyte is cut.
        assert len(data) < 1_000_000
    lines = _folded(hostile_device_profile(), leaf=leaf, plain=True)
    assert len(lines) == len(hostile_device_profile().gpu.samples)
    assert all(line.startswith("</script> (300);") for line in lines)


def test_pprof_has_the_stall_in_labels() -> None:
    pprof = decode(FORMATS["pprof"].render(_ONE, _GPU))
    (sample,) = pprof.samples
    assert pprof.sample_types == ["device_samples/count"]
    assert (pprof.default_type, pprof.period) == ("device_samples", ("device_samples/count", 1))
    assert sample.values == {"device_samples/count": 7}
    assert sample.lines == ["vadd /x/k.cl:12", "launch", "f /a/b.py:3", "main"]
    assert (sample.addresses[0], sample.mappings[0]) == (0x1C0, "[device]")
    assert sample.labels == {
        "stall_reason": "barrier",
        "stall_category": "sync",
        "instruction": "BAR",
        "kernel": "vadd",
        "device": "Test 100",
        "attribution": "exact",
        "process": "server",
        "pid": 100,
    }


def test_pprof_tells_shared_and_unattributed_apart() -> None:
    pprof = decode(FORMATS["pprof"].render(small_device_profile(), _GPU))
    sums: dict[str, int] = {}
    for sample in pprof.samples:
        key = str(sample.labels["attribution"])
        sums[key] = sums.get(key, 0) + sample.values["device_samples/count"]
        assert ("[unknown launch]" in sample.lines) == (key == "unattributed")
    assert sums == {"exact": 150, "shared": 800, "unattributed": 50}


def test_speedscope_keeps_time_and_samples_apart() -> None:
    profile = small_device_profile()
    both = json.loads(FORMATS["speedscope"].render(profile, ReportOptions()))
    assert [(p["name"], p["unit"]) for p in both["profiles"]] == [
        ("client (200)", "nanoseconds"),
        ("server (100)", "nanoseconds"),
        ("server (100), device samples", "none"),
        ("client (200), device samples", "none"),
    ]
    alone = json.loads(FORMATS["speedscope"].render(profile, _GPU))
    assert [p["unit"] for p in alone["profiles"]] == ["none", "none"]
    frames = alone["shared"]["frames"]
    leaves = {path[-1] for p in alone["profiles"] for path in p["samples"]}
    assert {frames[leaf]["file"] for leaf in leaves} == {
        *("memory", "issuing", "pipe busy", "sync", "fetch/control", "other"),
    }


def test_csv_files_hold_kernels_and_stalls() -> None:
    files = csv_files(small_device_profile(), ReportOptions())
    kernels = list(csv.DictReader(io.StringIO(files["kernels.csv"].decode())))
    assert [row["kernel"] for row in kernels] == [
        *("matmul", "void scale_b<float, 4>(float*, int)", "fill", "ghost"),
    ]
    matmul = kernels[0]
    assert (matmul["calls"], matmul["work_items"], matmul["launch_stacks"]) == ("40", "40000", "2")
    assert (matmul["share_pct"], matmul["certainty"]) == ("80.0", "shared")
    assert matmul["top_stack"].endswith("step (train.py:12);launch;clEnqueueNDRangeKernel")
    assert {matmul["total_time_us"], matmul["sampled_time_us"], kernels[3]["top_stack"]} == {""}
    stalls = list(csv.DictReader(io.StringIO(files["stalls.csv"].decode())))
    assert [*stalls[0].values()] == [
        *("matmul", "server", "100", "0x10", "LDG.E R2, [R4.64]", "/src/kernels.cl", "12"),
        *("long_scoreboard", "memory", "400", "40.0"),
    ]


def test_csv_has_times_where_a_sample_is_time() -> None:
    device = Device("opencl", "pocl", Tier.STALLS, "", 10_000_000)
    profile = device_profile_of([Launch("main", "k", 1)], [Ran("k", 0, 5)], devices=(device,))
    (row,) = csv.DictReader(
        io.StringIO(csv_files(profile, ReportOptions())["kernels.csv"].decode())
    )
    assert row["sampled_time_us"] == "50000.0"


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "'x"])
def test_no_cell_is_a_formula(name: str) -> None:
    assert safe(name) == f"'{name}"
    profile = device_profile_of([Launch("main", name, 1)], [Ran(name, 0, 5, name)])
    for data in csv_files(profile, ReportOptions()).values():
        cells = [cell for row in csv.reader(io.StringIO(data.decode())) for cell in row]
        assert f"'{name}" in cells
        assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


def test_kernels_are_one_by_process_and_name() -> None:
    profile = small_device_profile()
    found = kernel_stats(device_samples(profile))
    assert [(s.name.short, s.calls, s.stacks, s.total, s.certainty) for s in found.values()] == [
        ("matmul", 40, 2, 800, "shared"),
        ("scale_b<float, 4>", 40, 1, 100, "exact"),
        ("fill", 8, 1, 50, "exact"),
        ("ghost", 0, 0, 50, "unattributed"),
    ]


_FUNCTOR = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEE"
    "St5arrayIPcLm3EEEEviT0_T1_"
)


def test_kernel_names_are_demangled_and_shortened_without_taking_two_for_one() -> None:
    kernels = [
        Kernel(0, "cuda", name, "")
        for name in ("vadd", "_Z4saxpfPfS_", "_Z4saxpfPfS_i", _FUNCTOR, "_Znonsense")
    ]
    names = kernel_names([*kernels, Kernel(0, "cuda", "", "no such handle")])
    # Two overloads would both be "saxp".
    assert [name.short for name in names] == [
        "vadd",
        "saxp(float, float*, float*)",
        "saxp(float, float*, float*, int)",
        "at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<...>, array<...>>",
        "_Znonsense",
        "[unknown kernel: no such handle]",
    ]
    assert names[3].whole.startswith("void at::native::vectorized_elementwise_kernel<4, at::")


@pytest.mark.parametrize(
    ("whole", "short"),
    [
        # cuBLAS, CUTLASS 2 and 3
        (
            "sm90_xmma_gemm_f16f16_tn_n_kernel__5x_cublas",
            "sm90_xmma_gemm_f16f16_tn_n_kernel__5x_cublas",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn>"
            "(cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn::Params)",
            "cutlass cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn",
        ),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, 1>,"
            " cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90Tma<4, x>, y>,"
            " cutlass::epilogue::collective::Epilogue<a, b>, void, void, void, void, void> >(P)",
            "cutlass GemmUniversal<tuple<...>, CollectiveMma<...>, Epilogue<...>, void, ...>",
        ),
        # PyTorch, FlashAttention, cuDNN, Triton
        (
            "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 8,"
            " false, false>(float*, float const*, int, int, int, bool const*, int, bool)",
            "at::native::(anonymous namespace)::softmax_warp_forward<float, float, ...>",
        ),
        (
            "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, false, cutlass::half_t, B<1> >,"
            " false, false, false, false, true, true, false, false>(Flash_fwd_params)",
            "flash_fwd_kernel<Flash_fwd_kernel_traits<...>, false, false, false, false, ...>",
        ),
        (
            "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(cudnnTensorStruct)",
            "cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>",
        ),
        ("triton_poi_fused_add_mul_silu_37", "triton_poi_fused_add_mul_silu_37"),
    ],
)
def test_names_of_libraries_read_well(whole: str, short: str) -> None:
    assert shortened(whole) == short


_TUPLES = ",".join(f"cute::tuple<cute::C<{i}>,cute::C<{i + 40}>>" for i in range(40))


@pytest.mark.parametrize(
    ("whole", "short"),
    [
        (  # CUTLASS 3: a hundred brackets that are no longer than what would stand for their text
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<"
            "cute::tuple<int,int,int,int>,cutlass::gemm::collective::CollectiveMma<"
            f"cutlass::gemm::MainloopSm90Tma<4,cute::tuple<{_TUPLES}>>>>>(cutlass::Params)",
            "cutlass GemmUniversal<tuple<...>,CollectiveMma<...>>",
        ),
        (
            "k<" + ",".join(["a<b<c>>"] * 500) + ">",
            "k<" + "a<...>," * 10 + " ...>",
        ),
        ("k<" + "a<b<c<d>>>," * 9 + "e>", "k<" + "a<...>," * 9 + "e>"),
        ("k" * 79 + "<1>", "k" * 79 + "<1>"),
        ("k" * 79 + "<1234>", "k" * 79 + "<...>"),
    ],
)
def test_shortening_makes_no_name_longer(whole: str, short: str) -> None:
    assert shortened(whole) == short


@settings(max_examples=500, deadline=None)
@given(st.text("ab<<<>>>(),: -", max_size=400))
def test_no_short_name_is_longer_than_the_whole_one(name: str) -> None:
    assert len(shortened(name)) <= len(name)


def test_shortening_a_page_of_brackets_takes_a_moment() -> None:
    names = [f"k{i}<" + ",".join(["f<" * 70 + "z" + ">" * 70] * 18) + ">" for i in range(20)] + [
        f"k{i}" + "<a" * 1300 + ">" * 1300 for i in range(20)
    ]
    begun_s = time.thread_time()
    assert all(len(shortened(name)) <= 80 for name in names)
    # 2 ms each; 80 before each level was cut at once
    assert time.thread_time() - begun_s < 1


def test_a_name_that_asks_for_too_much_costs_only_itself() -> None:
    # GIVEN a name of which each part is twice the one before it
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    bomb = "_Z1f1AIiiE" + "".join(f"S_IS{digit}_S{digit}_E" for digit in digits)
    # WHEN it is read beside others THEN these have their names
    found = demangled(["_Z4saxpf", bomb, "_Z4vaddi", "x" * 100_000, "_Z4line\n_Z4vaddi"])
    assert (found["_Z4saxpf"], found["_Z4vaddi"]) == ("saxp(float)", "vadd(int)")
    assert found[bomb] == bomb
    assert found["x" * 100_000] == "x" * 100_000
    assert found["_Z4line\n_Z4vaddi"] == "_Z4line\n_Z4vaddi"


@pytest.mark.parametrize("name", ["", "<" * 4_000, "f<" * 2_000, "f(" * 2_000, ">>>", "a->b", "()"])
def test_shortening_ends_with_something(name: str) -> None:
    assert shortened(name) == "" if not name else shortened(name)


def test_stats_have_the_tables_of_devices() -> None:
    profile = small_device_profile()
    titles = [table.title for table in tables(profile, View.GPU, 10)]
    assert titles == [
        *("Top kernels", "Top stall reasons", "Top launch stacks", "Calls of device APIs"),
        *("Memory copies", "Device memory", "GPU waits by CPU stack"),
    ]
    wall = {table.title: table for table in tables(profile, View.WALL, 2)}
    assert wall["Top kernels"].rows[0] == (
        *("800", "80.0 %", "40", "2", "shared", "matmul", "server (100)"),
    )
    assert wall["Top kernels"].left_out == 2
    assert wall["Calls of device APIs"].whole == "88 kernel launches, 44.0 a second"
    assert wall["Memory copies"].rows == (("5", "5.00", "1.000", "to device"),)
    assert wall["GPU waits by CPU stack"].rows == (
        *(("300.00", "100.0 %", "9", "main", "clFinish < main"),),
    )
    assert wall["Blocked time by cause"].rows[0][3] == "GPU wait"


def test_stats_show_kernel_times_under_the_stacks_of_launches_that_devices_named() -> None:
    profile = small_device_profile()
    calls = profile.gpu.calls
    times = np.zeros(3, KERNEL_TIME_DTYPE)
    times["stack"] = [calls["stack"][0], calls["stack"][0], NONE]
    times["kernel"] = [calls["kernel"][0], calls["kernel"][0], len(profile.gpu.kernels)]
    times["built"] = NONE
    times["count"], times["duration_ns"] = 1, [1_500_000, 500_000, 7_000_000]
    kernels = (*profile.gpu.kernels, Kernel(0, "opencl", "never_launched", ""))
    gpu = replace(profile.gpu, times=times, kernels=kernels)
    found = tables(replace(profile, gpu=gpu), View.GPU, 10)
    (table,) = (table for table in found if table.title == "Top launch stacks")
    assert table.columns[2] == ">ms on device"
    ms = {row[-1]: row[2] for row in table.rows}
    (first,) = (row[-1] for row in table.rows if row[2] == "2.00")
    assert "step (train.py:12)" in first
    assert ms["[unknown launch]"] == "7.00"
    assert sorted(ms.values())[:-2] == ["0.00"] * (len(ms) - 2)


def test_stats_of_a_program_without_devices_say_so_only_when_asked() -> None:
    assert "Top kernels" not in [t.title for t in tables(small_profile(), View.WALL, 10)]
    (table,) = tables(small_profile(), View.GPU, 10)
    assert "No device API calls were seen" in table.whole


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.aiflame").write_bytes(b"a capture")
    monkeypatch.setattr(verb, "read_recording", lambda path: small_device_profile())
    return tmp_path


def test_csv_is_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("run.aiflame", "-f", "csv") == 0
    assert sorted(p.name for p in (folder / "run-csv").iterdir()) == ["kernels.csv", "stalls.csv"]
    with pytest.raises(UsageError, match="file exists"):
        _run("run.aiflame", "-f", "csv")
    assert _run("run.aiflame", "-f", "csv", "--force") == 0
    assert capsys.readouterr().err.count("Wrote run-csv/") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "csv", "-o", "-"], "csv is several files"),
        (["-f", "csv", "-o", "run.aiflame"], "not a folder: run.aiflame"),
        (["-f", "csv", "-o", "a/b"], "no such folder: a"),
        (["-f", "csv", "--title", "x"], "--title has no effect with -f csv"),
        (["-f", "svg", "--view", "gpu", "--per-thread"], "--per-thread has no effect with --view"),
        (["-f", "svg", "--leaf", "stall"], "--leaf has no effect with --view wall"),
        (["-f", "svg", "--color-by", "stall"], "--color-by has no effect with --view wall"),
        (["-f", "pprof", "--view", "gpu", "--leaf", "stall"], "--leaf has no effect with -f pprof"),
        (["-f", "pstats", "--view", "gpu"], "pstats has no device samples"),
        (["-f", "pstats", "--view", "gputime"], "pstats has no GPU time"),
        (["-f", "svg", "--view", "gputime", "--per-thread"], "--per-thread has no effect with"),
        (["-f", "svg", "--view", "gputime", "--leaf", "stall"], "--leaf has no effect with --view"),
    ],
)
def test_what_makes_no_sense_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        _run("run.aiflame", *arguments)
    assert message in str(error.value)
    assert error.value.hint


def test_losses_of_other_things_are_not_lost_samples() -> None:
    profile = replace(_ONE, losses=(Loss("stacks_full", 3, "x"), Loss("kernel_not_opened", 2, "y")))
    assert "0.00 % unattributed, 2 lost." in FORMATS["svg"].render(profile, _GPU).decode()


def test_samples_of_several_seconds_are_spread_over_them() -> None:
    # GIVEN 400 samples that a window of four seconds has, from 2.5 on, and 7 of one second
    profile = device_profile_of([Launch("main", "gemm", 1)], [Ran("gemm", 0, 400, interval=2)])
    more = device_profile_of([Launch("main", "gemm", 1)], [Ran("gemm", 0, 7, interval=9)])
    samples = profile.gpu.samples.copy()
    samples["begin_ns"], samples["end_ns"] = 2_500_000_000, 6_500_000_000
    gpu = replace(profile.gpu, samples=np.concatenate([samples, more.gpu.samples]))
    # WHEN it is asked when they were
    spans = device_samples(replace(profile, gpu=gpu)).spans
    # THEN each second has its part, and none is lost.
    by_second = dict.fromkeys(range(10), 0)
    for first_s, seconds, count in spans[["first_s", "seconds", "count"]].tolist():
        for second in range(first_s, first_s + seconds):
            by_second[second] += count
    assert by_second == {**dict.fromkeys(range(10), 0), 2: 50, 3: 100, 4: 100, 5: 100, 6: 50, 9: 7}
