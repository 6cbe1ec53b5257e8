# SPDX-License-Identifier: Apache-2.0
"""Contract: what the kernel half and the host half call by the same name is the same thing.

The compiler says what bpf/aiflame.h means; nothing here parses C but the list of its names.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.capture import code_objects
from aiflame.agent.devices import timed
from aiflame.agent.kernel import abi, bytecode, loader
from aiflame.agent.kernel.program_list import MAPS
from aiflame.agent.kernel.syscalls import MapFacts
from aiflame.agent.losses import LossKind
from aiflame.agent.model import profile as model
from aiflame.agent.model import window
from aiflame.agent.model.gpu import Operation
from aiflame.agent.processes import unwind_tables
from aiflame.agent.python import debugoffsets, layouts, memory
from aiflame.agent.python import walk as python_walk
from aiflame.agent.recording import late_walks
from aiflame.agent.sinks import launch_ids
from aiflame.agent.unwind.table import PAGE_BYTES, PAGE_SHIFT
from aiflame.agent.unwind.x86_64 import RULE, RbpKind, RuleKind
from aiflame.gpu.apis.base import Grid, HandleFrom, WaitsFor
from aiflame.gpu.nvidia import sampler

_BPF = Path(__file__).parents[2] / "bpf"
_HEADER = (_BPF / "aiflame.h").read_text()

_DTYPES = {
    "mapping_slot": abi.MAPPING_SLOT_DTYPE,
    "unwind_rule": RULE,
    "process_state": abi.PROCESS_STATE_DTYPE,
    "crossing": abi.CROSSING_DTYPE,
    "thread_state": abi.THREAD_STATE_DTYPE,
    "stack_record": abi.STACK_DTYPE,
    "stack_copy": abi.STACK_COPY_DTYPE,
    "event_budget": abi.EVENT_BUDGET_DTYPE,
    "chance_total": abi.CHANCE_TOTAL_DTYPE,
    "short_lived_key": abi.SHORT_LIVED_KEY_DTYPE,
    "short_lived_total": abi.SHORT_LIVED_TOTAL_DTYPE,
    "swept_stack": abi.SWEPT_STACK_DTYPE,
    "swept_thread": abi.SWEPT_THREAD_DTYPE,
    "sum_key": abi.SUM_KEY_DTYPE,
    "sum_value": abi.SUM_VALUE_DTYPE,
    "process_event": abi.PROCESS_EVENT_DTYPE,
    "exec_event": abi.EXEC_EVENT_DTYPE,
    "thread_event": abi.THREAD_EVENT_DTYPE,
    "wait_event": abi.WAIT_EVENT_DTYPE,
    "thread_registers": abi.THREAD_REGISTERS_DTYPE,
    "python_process": abi.PYTHON_PROCESS_DTYPE,
    "python_chain": abi.PYTHON_CHAIN_DTYPE,
    "api_argument": abi.API_ARGUMENT_DTYPE,
    "api_call": abi.API_CALL_DTYPE,
    "api_probe": abi.API_PROBE_DTYPE,
    "call_key": abi.CALL_KEY_DTYPE,
    "call_value": abi.CALL_VALUE_DTYPE,
    "queue_key": abi.QUEUE_KEY_DTYPE,
    "queue_state": abi.QUEUE_STATE_DTYPE,
    "sample_event": abi.SAMPLE_EVENT_DTYPE,
    "bell_event": abi.BELL_EVENT_DTYPE,
    "call_event": abi.CALL_EVENT_DTYPE,
    "kernel_named_event": abi.KERNEL_NAMED_DTYPE,
}
# Structs that the host half only hands through as so many bytes.
_KERNEL_ONLY = {"kernel_name_key"}

_CONSTANTS = {
    "MAX_FRAMES": abi.MAX_FRAMES,
    "FRAME_SLOTS": abi.FRAME_SLOTS,
    "MAX_KERNEL_FRAMES": abi.MAX_KERNEL_FRAMES,
    "PYTHON_ENDS_RUN": abi.PYTHON_ENDS_RUN,
    "TABLES_MAX": abi.TABLES_MAX,
    "TABLE_IS_MISSING": abi.TABLE_IS_MISSING,
    "TABLE_IS_NONE": abi.TABLE_IS_NONE,
    "STACK_COPY_PAGES": abi.STACK_COPY_PAGES,
    "STACK_PAGE_BYTES": abi.STACK_PAGE_BYTES,
    "TABLE_PAGE_SHIFT": PAGE_SHIFT,
    **{f"RULE_{member.name}": member.value for member in RuleKind},
    **{f"RBP_{member.name}": member.value for member in RbpKind},
    **{f"PYTHON_GIL_{member.name}": member.value for member in abi.PythonGil},
    **{f"PYTHON_{member.name}": member.value for member in abi.PythonEnd},
    "PYTHON_EVAL_RANGES": abi.PYTHON_EVAL_RANGES,
    "PYTHON_POSITION_UNITS": layouts.Position.LASTI_UNITS.value,
    "PYTHON_POSITION_POINTER": layouts.Position.POINTER.value,
    "PYTHON_RUN_EVERY_FRAME": layouts.RunEnd.EVERY_FRAME.value,
    "PYTHON_RUN_ENTRY_BYTE": layouts.RunEnd.ENTRY_BYTE.value,
    "PYTHON_RUN_SHIM": layouts.RunEnd.SHIM.value,
    "PYTHON_SHIM_OWNER": layouts.SHIM_OWNER,
    "PYTHON_ACTIVE_FLAG": layouts.ACTIVE_FLAG,
    "PYTHON_GIL_RUNTIME": layouts.GilHolder.RUNTIME.value,
    "PYTHON_GIL_INTERPRETER": layouts.GilHolder.INTERPRETER.value,
    "THREAD_SEEDED": abi.THREAD_SEEDED,
    "API_CALLS_MAX": abi.API_CALLS_MAX,
    "API_PROBES_MAX": abi.API_PROBES_MAX,
    "APIS_MAX": abi.APIS_MAX,
    "CALL_SIZE_MAX": abi.CALL_SIZE_MAX,
    "KERNEL_NAME_BYTES": abi.KERNEL_NAME_BYTES,
    "CALL_KERNEL_IS_NAMED": abi.CALL_KERNEL_IS_NAMED,
    **{f"GRID_{member.name}": member.value for member in Grid},
    **{f"HANDLE_{member.name}": member.value for member in HandleFrom},
    **{f"WAITS_FOR_{member.name}": member.value for member in WaitsFor},
    "OPERATION_LAUNCH": Operation.LAUNCH.value,
    "ALL_QUEUES": abi.ALL_QUEUES,
    "DEFAULT_QUEUE": abi.DEFAULT_QUEUE,
    "ARGUMENTS_BYTES": abi.ARGUMENTS_BYTES,
    "NOT_RUN_STACK": abi.NOT_RUN_STACK,
    "TOTAL_NOT_RUN": abi.TOTAL_NOT_RUN,
    "NOT_SAMPLED_STACK": abi.NOT_SAMPLED_STACK,
    "WEIGHT_EXACT": abi.WEIGHT_EXACT,
    "WEIGHT_NOT_CHOSEN": abi.WEIGHT_NOT_CHOSEN,
    "WEIGHT_MAX": abi.WEIGHT_MAX,
    "LONG_WAIT_NS": abi.LONG_WAIT_NS,
    "OPEN_WAIT_NS": abi.OPEN_WAIT_NS,
    "SWEPT_FRAMES": abi.SWEPT_FRAMES,
    "COUNTER_MAX": abi.COUNTERS_MAX,
    "SETTING_MAX": len(abi.Setting),
    "HOST_MAX": len(abi.HostConstant),
    **{f"HOST_{member.name}": member.value for member in abi.HostConstant},
    **{f"FILTER_{member.name}": member.value for member in abi.Filter},
    **{f"CLASS_{member.name}": member.value for member in model.SampleClass},
    **{f"STOP_{member.name}": member.value for member in model.StopReason},
    **{f"EVENT_{member.name}": member.value for member in abi.EventType},
    **{f"PROCESS_{member.name}": member.value for member in abi.ProcessFlag},
    **{f"SETTING_{member.name}": member.value for member in abi.Setting},
    **{f"COUNTER_{member.name}": member.value for member in abi.Counter},
    **{f"LOST_{kind.name}": slot for kind, slot in abi.LOSS_SLOTS.items()},
}

# Constants of other headers that stand in the host half as well: the value there, by name.
_TWICE = {
    "host.h": {"HOST_MARK": bytecode._HOST_MARK << 32},
    "python.h": {
        "PYTHON_STEPS_MAX": python_walk._MAX_STEPS,
        "LOWEST_ADDRESS": memory._LOWEST_ADDRESS,
        "MAX_ADDRESS": memory.MAX_ADDRESS,
        "NO_POSITION": python_walk.NO_POSITION,
        "MAX_CODE_BYTES": python_walk._MAX_CODE_BYTES,
        "FIRST_COPY": python_walk._FIRST_COPY,
        "COPY_BYTES": python_walk._COPY_BYTES,
        "LARGE_FRAME_BYTES": debugoffsets._MAX_FRAME_BYTES,
    },
}


# Those that only the kernel half has: nothing of the host half depends on them.
_KERNEL_HALF_ONLY = {
    *("REGISTER_ARGUMENTS", "REGISTER_SLOTS", "STEPS_PER_CALL", "SIZED_BY_HOST", "NAME_ID_WORDS"),
    *("PYTHON_STEPS_PER_CALL", "SMALL_FRAME_BYTES", "CFRAME_MAX_BYTES", "EVAL_ENTRY_BYTES"),
    *("STALE_FRAMES_MAX", "SETTLE_NS", "ASK_AGAIN_NS", "PF_KTHREAD", "PF_EXITING"),
    "NR_VFORK",
    *(
        "OF_ONE_IMAGE",
        "FAIR_POLICIES",
        "F_MMAPABLE",
        "F_INNER_MAP",
        "WINDOW_WORDS",
        "WINDOW_BELOW_BYTES",
    ),
    *("KNOWN_ADDRESSES", "STEP_ON", "STEP_END", "STEP_CHECK", "HASH_MULTIPLIER", "NS_PER_S"),
    *("LONGEST_TICK_NS", "BPF_LICENSE", "LAUNCH_EVENTS_MAX", "RULE_TABLE_IS_MISSING"),
    *("RULE_GENERATED", "BELLS_MAX", "GAPS_SHIFT", "STEP_AGAIN"),
    *("LEAF_FRAME_UNKNOWN", "LEAF_FRAME_TRIED", "LEAF_FRAME_NONE"),
}
# What the test of searches is about.
_STEPS = {"MAPPING_STEPS", "ROW_STEPS"}

# Figures in the words of losses: of the kernel half by name, or of the host half.
_FIGURES: dict[LossKind, int | tuple[str, str]] = {
    LossKind.USER_FRAMES_CUT: abi.MAX_FRAMES,
    LossKind.PYTHON_TOO_DEEP: abi.MAX_FRAMES,
    LossKind.STACKS_NOT_COPIED: late_walks.COPIES_PER_S,
    LossKind.STACK_COPIES_FULL: late_walks._MAX_KEPT_BYTES // 1_000_000,
    LossKind.WAITS_NOT_LISTED: ("offcpu.bpf.c", "WAIT_EVENTS_PER_S"),
    LossKind.CALLS_NOT_LISTED: abi.CALL_EVENTS_PER_S,
    LossKind.CALLERS_FULL: loader._CALLERS_MAX,
    LossKind.LAUNCHES_NOT_TIMED: loader.ProgramOptions(abi.Filter.ALL, 0).calls_max // 2,
    LossKind.SAMPLES_NOT_TIMED: timed._SAMPLES_PER_S,
    LossKind.PROCESSES_NOT_TIMED: loader._TIMED_PROCESSES_MAX,
    LossKind.KERNEL_TIMES_ADDED_UP: sampler._MAX_TIMES // sampler._FEWEST_SHARES,
    LossKind.GRAPH_BUILDERS_FULL: launch_ids._MOST_BUILDERS,
    LossKind.DEVICE_CODE_NOT_STORED: code_objects.MAX_STORED_BYTES // 1_000_000,
}
# "of four others"
_NAMINGS = {"callers.h": {"NAMINGS_MAX": 4}}


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def _enumerators() -> set[str]:
    text = _without_comments(_HEADER).replace("KERNEL_HALF_LOSSES", abi.losses_header())
    bodies = re.findall(r"\benum \w+ \{(.*?)\};", text, re.DOTALL)
    return set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", " ".join(bodies))) - {"KERNEL_HALF_LOSSES"}


def _defines() -> set[str]:
    return set(re.findall(r"^#define (\w+) ", _HEADER, re.MULTILINE))


def _structs() -> set[str]:
    return set(re.findall(r"^struct (\w+) \{", _HEADER, re.MULTILINE))


def _definition(file: str, name: str) -> str:
    """Returns what a header defines a name as, without its maps and functions."""
    found = re.search(rf"^#define {name} (.*)$", (_BPF / file).read_text(), re.MULTILINE)
    assert found is not None, f"{file} has no {name} any more"
    return found[1]


# How BCC's macros for maps say key, value and number of entries.
_MAP_PATTERNS = (
    (r'BPF_F?_?TABLE\("(?:lru_)?hash", ([\w ]+), ([\w ]+), (\w+), (\w+)', (1, 2, 3, 4)),
    (r"BPF_(?:PERCPU_)?ARRAY\((\w+), ([\w ]+), (\w+)\)", (None, 2, 1, 3)),
    (r'BPF_TABLE\("hash_of_maps\$\w+", (\w+), int, (\w+), (\w+)', (1, None, 2, 3)),
    (r'BPF_ARRAY_OF_MAPS\((\w+), "\w+", (\w+)\)', (None, None, 1, 2)),
    (r"BPF_PROG_ARRAY\((\w+), (\w+)\)", (None, None, 1, 2)),
)


def _maps() -> dict[str, tuple[str, str, str]]:
    """Returns key, value and entries of each map whose types are those of aiflame.h."""
    text = "\n".join(path.read_text() for path in sorted(_BPF.glob("*.[ch]")))
    found = {}
    for pattern, (key, value, name, entries) in _MAP_PATTERNS:
        for match in re.finditer(pattern, text):
            types = tuple("u32" if group is None else match[group] for group in (key, value))
            if all(t in ("u32", "u64") or t.removeprefix("struct ") in _DTYPES for t in types):
                found[match[name]] = (*types, match[entries])
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Every size, offset and value, as the compiler has them."""
    questions = [(name, name) for name in _CONSTANTS]
    questions += [(name, _definition(file, name)) for file in _TWICE for name in _TWICE[file]]
    questions += [(f[1], _definition(*f)) for f in _FIGURES.values() if isinstance(f, tuple)]
    questions += [(name, _definition(file, name)) for file in _NAMINGS for name in _NAMINGS[file]]
    for name, (key, value, entries) in _maps().items():
        questions += [
            (f"key of {name}", f"sizeof({key})"),
            (f"value of {name}", f"sizeof({value})"),
        ]
        questions.append((f"entries of {name}", entries))
    for struct, dtype in _DTYPES.items():
        questions.append((struct, f"sizeof(struct {struct})"))
        for field in dtype.names or ():
            member = f"((struct {struct} *)0)->{field}"
            questions.append((f"{struct}.{field}", f"__builtin_offsetof(struct {struct}, {field})"))
            questions.append((f"sizeof {struct}.{field}", f"sizeof({member})"))
    lines = [f'\tprintf("%s=%llu\\n", "{name}", (u64)({text}));' for name, text in questions]
    folder = tmp_path_factory.mktemp("abi")
    (folder / "losses.h").write_text(abi.losses_header())
    source = folder / "layout.c"
    source.write_text(
        "#include <linux/types.h>\n"
        '#include "aiflame.h"\n'
        f"#define SIZED_BY_HOST {_definition('host.h', 'SIZED_BY_HOST')}\n"
        "int printf(const char *, ...);\n"
        "int main(void)\n{\n" + "\n".join(lines) + "\n\treturn 0;\n}\n"
    )
    stubs = _BPF / "kernel" / "include"
    command = [
        "gcc",
        "-Wall",
        "-Wextra",
        "-Wpadded",
        "-Werror",
        f"-I{_BPF}",
        f"-I{stubs}",
        f"-I{folder}",
    ]
    subprocess.run([*command, "-o", str(folder / "layout"), str(source)], check=True)
    printed = subprocess.run([folder / "layout"], check=True, capture_output=True, text=True).stdout
    return {
        name: int(value) for name, _, value in (s.partition("=") for s in printed.split("\n")[:-1])
    }


def test_nothing_of_the_header_is_left_out() -> None:
    assert _structs() == set(_DTYPES) | _KERNEL_ONLY
    assert _enumerators() | _defines() == set(_CONSTANTS)


@pytest.mark.parametrize("struct", _DTYPES)
def test_structs_have_the_same_layout(struct: str, compiled: dict[str, int]) -> None:
    dtype = _DTYPES[struct]
    assert dtype.itemsize == compiled[struct]
    fields = dtype.fields or {}
    assert {name: (field[1], field[0].itemsize) for name, field in fields.items()} == {
        name: (compiled[f"{struct}.{name}"], compiled[f"sizeof {struct}.{name}"]) for name in fields
    }


def test_constants_have_the_same_values(compiled: dict[str, int]) -> None:
    assert {name: compiled[name] for name in _CONSTANTS} == _CONSTANTS


def test_constants_of_other_headers_have_the_same_values(compiled: dict[str, int]) -> None:
    expected = {name: value % 2**64 for names in _TWICE.values() for name, value in names.items()}
    assert {name: compiled[name] for name in expected} == expected


def test_every_constant_of_the_kernel_half_is_checked_or_is_its_own() -> None:
    texts = {path.name: path.read_text() for path in _BPF.glob("*.[ch]")}
    found = {
        name
        for file, text in texts.items()
        if file != "aiflame.h"
        for name in re.findall(r"^#define (\w+) ", text, re.MULTILINE)
    }
    twice = {name for names in _TWICE.values() for name in names}
    figures = {figure[1] for figure in _FIGURES.values() if isinstance(figure, tuple)}
    known = (twice, figures, _STEPS, _NAMINGS["callers.h"].keys(), _KERNEL_HALF_ONLY)
    assert sum(map(len, known)) == len(found)
    assert set().union(*known) == found
    # Neither are they enums or structures that the host half has as well.
    assert not any(
        re.search(r"^enum \w+ \{", t, re.M) for f, t in texts.items() if f != "aiflame.h"
    )


def test_figures_in_the_words_of_losses_are_those_of_the_code(compiled: dict[str, int]) -> None:
    for kind, figure in _FIGURES.items():
        value = compiled[figure[1]] if isinstance(figure, tuple) else figure
        assert re.search(rf"\b{value:,}\b", kind.meaning), kind
    assert compiled["NAMINGS_MAX"] == 4
    assert "of four others" in LossKind.KERNEL_NAMES_LOST.meaning


def test_maps_have_the_same_shape(
    compiled: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Map:
        def __init__(
            self, name: str, key: np.dtype[Any], value: np.dtype[Any], entries: int
        ) -> None:
            found[name] = (key.itemsize, value.itemsize, entries)

        def update(self, key: bytes, value: bytes) -> None:
            pass

    found: dict[str, tuple[int, int, int]] = {}
    monkeypatch.setattr(loader, "Map", Map)
    monkeypatch.setattr(loader, "map_facts", lambda fd: MapFacts(0, 0, 0, 0, 0, 0))
    names = {name: name for name in MAPS}
    constants: defaultdict[abi.HostConstant, int] = defaultdict(int)
    host = SimpleNamespace(map_fds=names, host=SimpleNamespace(constants=constants))
    anything: Any = host
    options = loader.ProgramOptions(abi.Filter.CGROUP, period_ns=1)
    loader.Programs(anything, defaultdict(int), options, anything)
    assert len(found) > 15
    for name, (key_bytes, value_bytes, entries) in found.items():
        assert (compiled[f"key of {name}"], compiled[f"value of {name}"]) == (
            key_bytes,
            value_bytes,
        ), name
        if _maps()[name][2] != "SIZED_BY_HOST":
            assert compiled[f"entries of {name}"] == entries, name


def test_windows_know_what_the_kernel_half_tells_of_the_gil() -> None:
    assert window._GIL_VALUES == len(abi.PythonGil) == max(abi.PythonGil) + 1


def test_searches_of_the_kernel_half_take_steps_enough() -> None:
    steps = {name: int(_definition("unwind.h", name)) for name in ("MAPPING_STEPS", "ROW_STEPS")}
    # As many halvings as leave none of so many, and one that finds that there is none.
    assert 1 << (steps["MAPPING_STEPS"] - 1) > unwind_tables._MAX_MAPPINGS
    assert 1 << (steps["ROW_STEPS"] - 1) >= PAGE_BYTES


def test_events_begin_with_their_type() -> None:
    for dtype in (abi.PROCESS_EVENT_DTYPE, abi.THREAD_EVENT_DTYPE, abi.WAIT_EVENT_DTYPE):
        assert (dtype.names or ("",))[0] == "type"
        assert dtype["type"] == np.dtype("<u4")
