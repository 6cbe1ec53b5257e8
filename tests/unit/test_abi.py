# SPDX-License-Identifier: Apache-2.0
"""Contract: what the kernel half and the host half call by the same name is the same thing.

The compiler says what bpf/aiflame.h means; nothing here parses C but the list of its names.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.model import profile as model
from aiflame.agent.python import layouts
from aiflame.agent.unwind.table import PAGE_SHIFT
from aiflame.agent.unwind.x86_64 import RULE, RbpKind, RuleKind
from aiflame.gpu.apis.base import Grid, HandleFrom

_BPF = Path(__file__).parents[2] / "bpf"
_HEADER = (_BPF / "aiflame.h").read_text()

_DTYPES = {
    "mapping_slot": abi.MAPPING_SLOT_DTYPE,
    "unwind_rule": RULE,
    "process_state": abi.PROCESS_STATE_DTYPE,
    "crossing": abi.CROSSING_DTYPE,
    "thread_state": abi.THREAD_STATE_DTYPE,
    "stack_record": abi.STACK_DTYPE,
    "sum_key": abi.SUM_KEY_DTYPE,
    "sum_value": abi.SUM_VALUE_DTYPE,
    "process_event": abi.PROCESS_EVENT_DTYPE,
    "thread_event": abi.THREAD_EVENT_DTYPE,
    "wait_event": abi.WAIT_EVENT_DTYPE,
    "thread_registers": abi.THREAD_REGISTERS_DTYPE,
    "python_process": abi.PYTHON_PROCESS_DTYPE,
    "python_frame": abi.PYTHON_FRAME_DTYPE,
    "python_chain": abi.PYTHON_CHAIN_DTYPE,
    "api_argument": abi.API_ARGUMENT_DTYPE,
    "api_call": abi.API_CALL_DTYPE,
    "api_probe": abi.API_PROBE_DTYPE,
    "call_key": abi.CALL_KEY_DTYPE,
    "call_value": abi.CALL_VALUE_DTYPE,
    "call_event": abi.CALL_EVENT_DTYPE,
    "kernel_named_event": abi.KERNEL_NAMED_DTYPE,
}
# Structs that the host half only hands through as so many bytes.
_KERNEL_ONLY = {"wait_budget", "kernel_name_key"}

_CONSTANTS = {
    "MAX_FRAMES": abi.MAX_FRAMES,
    "FRAME_SLOTS": abi.FRAME_SLOTS,
    "TABLES_MAX": abi.TABLES_MAX,
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
    "COUNTER_MAX": abi.COUNTERS_MAX,
    "SETTING_MAX": len(abi.Setting),
    "HOST_MAX": len(abi.HostConstant),
    **{f"HOST_{member.name}": member.value for member in abi.HostConstant},
    **{f"FILTER_{member.name}": member.value for member in abi.Filter},
    **{f"CLASS_{member.name}": member.value for member in model.SampleClass},
    **{f"END_{member.name}": member.value for member in model.StackEnd},
    **{f"EVENT_{member.name}": member.value for member in abi.EventType},
    **{f"PROCESS_{member.name}": member.value for member in abi.ProcessFlag},
    **{f"SETTING_{member.name}": member.value for member in abi.Setting},
    **{f"COUNTER_{member.name}": member.value for member in abi.Counter},
    **{kind.counter: slot for kind, slot in abi.LOSS_SLOTS.items()},
}


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def _enumerators() -> set[str]:
    bodies = re.findall(r"\benum \w+ \{(.*?)\};", _without_comments(_HEADER), re.DOTALL)
    return set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", " ".join(bodies)))


def _defines() -> set[str]:
    return set(re.findall(r"^#define (\w+) ", _HEADER, re.MULTILINE))


def _structs() -> set[str]:
    return set(re.findall(r"^struct (\w+) \{", _HEADER, re.MULTILINE))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Every size, offset and value, as the compiler has them."""
    questions = [(name, name) for name in _CONSTANTS]
    for struct, dtype in _DTYPES.items():
        questions.append((struct, f"sizeof(struct {struct})"))
        for field in dtype.names or ():
            member = f"((struct {struct} *)0)->{field}"
            questions.append((f"{struct}.{field}", f"__builtin_offsetof(struct {struct}, {field})"))
            questions.append((f"sizeof {struct}.{field}", f"sizeof({member})"))
    lines = [f'\tprintf("%s=%llu\\n", "{name}", (u64)({text}));' for name, text in questions]
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "layout.c"
    source.write_text(
        "#include <linux/types.h>\n"
        '#include "aiflame.h"\n'
        "int printf(const char *, ...);\n"
        "int main(void)\n{\n" + "\n".join(lines) + "\n\treturn 0;\n}\n"
    )
    stubs = _BPF / "kernel" / "include"
    command = ["gcc", "-Wall", "-Wextra", "-Wpadded", "-Werror", f"-I{_BPF}", f"-I{stubs}"]
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


def test_events_begin_with_their_type() -> None:
    for dtype in (abi.PROCESS_EVENT_DTYPE, abi.THREAD_EVENT_DTYPE, abi.WAIT_EVENT_DTYPE):
        assert (dtype.names or ("",))[0] == "type"
        assert dtype["type"] == np.dtype("<u4")
