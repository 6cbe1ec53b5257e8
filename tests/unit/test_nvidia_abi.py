# SPDX-License-Identifier: Apache-2.0
"""What the helper declares of CUPTI is what NVIDIA has published, and its library is met.

Headers and libraries are those of a CUDA toolkit, where there is one, and those that
tests/standin/fetch_cupti.sh unpacks from PyPI's wheels.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from aiflame.gpu import protocol
from aiflame.gpu.protocol import HelperError, HelperTier
from breadth import cases
from nvidia_helper import HELPER, ROOT, STANDIN, Target, build

_RELEASES = ROOT / "build/cupti"
_TOOLKIT = "toolkit"
# As the script has them: the first and the last of a major version, those between that changed.
_VERSIONS = ("12.1.105", "12.4.127", "12.9.79", "13.0.85", "13.1.115", "13.5.25")


def _toolkits() -> list[Path]:
    nvcc = shutil.which("nvcc")
    places = [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    places += sorted(Path("/usr/local").glob("cuda-*"))
    return [place for place in places if (place / "include/cupti.h").exists()][:1]


def _place(version: str) -> Path:
    """Returns where a version is."""
    if version != _TOOLKIT:
        if not (_RELEASES / version).is_dir():
            pytest.skip(f"no release of CUPTI {version}: tests/standin/fetch_cupti.sh")
        return _RELEASES / version
    found = _toolkits()
    if not found:
        pytest.skip("no CUDA runtime with CUPTI")
    return found[0]


def _library(place: Path) -> Path:
    found = [*place.glob("lib*/libcupti.so.1?"), *place.glob("extras/CUPTI/lib*/libcupti.so.1?")]
    if not found:
        pytest.skip("no CUDA runtime with a libcupti")
    return found[0]


@pytest.fixture(params=(_TOOLKIT, *_VERSIONS))
def place(request: pytest.FixtureRequest) -> Path:
    return _place(request.param)


def _compile(source: Path, place: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    folder = ["-idirafter", str(place / "include")]
    command = ["gcc", "-std=gnu11", "-fsyntax-only", *flags, *folder, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_size_offset_and_number_is_nvidias(place: Path) -> None:
    text = (place / "include/cupti_activity.h").read_text()
    newest = max(int(number) for number in re.findall(r"} CUpti_ActivityKernel(\d+);", text))
    done = _compile(STANDIN / "abi_check.c", place, f"-DKERNEL=CUpti_ActivityKernel{newest}")
    assert done.returncode == 0, done.stderr[:2000]


def test_the_check_finds_what_is_wrong(place: Path, tmp_path: Path) -> None:
    # GIVEN a declaration in which a field has another size
    (tmp_path / "tests/standin").mkdir(parents=True)
    (tmp_path / "gpu/nvidia/helper").mkdir(parents=True)
    declared = (HELPER / "cupti.h").read_text()
    wrong = declared.replace(
        "uint64_t cubin_crc;\n\tuint64_t offset;", "uint32_t cubin_crc, offset;"
    )
    assert wrong != declared
    (tmp_path / "gpu/nvidia/helper/cupti.h").write_text(wrong)
    source = Path(shutil.copy(STANDIN / "abi_check.c", tmp_path / "tests/standin"))
    done = _compile(source, place, "-DKERNEL=CUpti_ActivityKernel9")
    assert done.returncode and "cubin_crc" in done.stderr


def test_every_function_is_in_nvidias_library(place: Path) -> None:
    listing = subprocess.run(
        ["readelf", "-W", "--dyn-syms", _library(place)], capture_output=True, text=True, check=True
    ).stdout
    declared = set(re.findall(r"\b([VSO])\((cupti\w+)", (HELPER / "library.h").read_text()))
    assert len(declared) > 25
    missing = {(use, name) for use, name in declared if f" {name}@" not in listing}
    # Those for several subscribers and of executable graphs are of later versions; it goes without.
    later = [name for _, name in missing if name.endswith("_v2") or name == "cuptiGetGraphExecId"]
    assert all(use == "O" for use, _ in missing) and len(later) == len(missing)
    assert not missing or place.name != _VERSIONS[-1]


@cases("version", _VERSIONS)
def test_nvidias_library_without_nvidias_driver_costs_the_program_nothing(
    version: str, tmp_path: Path
) -> None:
    # GIVEN NVIDIA's own CUPTI, and a driver that is not NVIDIA's
    library = _library(_place(version))
    folder = build(tmp_path)
    (folder / "libcupti.so.12").unlink()
    shutil.copy(library, folder)
    with Target(folder) as target:
        target.obey("init", "context 0", f"load {target.helper}")
        # WHEN stalls are asked for
        with target.control() as control:
            control.start(tier=2)
            told = target.read_until(lambda told: told.failed)
            # THEN it says which call the library refused, and why
            why = told.hellos[-1].why
            assert told.tier is HelperTier.LAUNCHES
            assert {error for error, _ in told.failed} == {HelperError.CALL}
            assert re.fullmatch(r"cupti\w+ failed: .*(CUPTI_ERROR_\w+|go with the driver)", why), (
                why
            )
            # and the program goes on
            assert target.obey("module 100", "function 0 k", "launch 0 1 3 0", "sync") == 0
        target.send("exit 3")
        assert target.process.wait(10) == 3


# What both halves of the protocol have


def _sizes(names: list[str], tmp_path: Path) -> dict[str, int]:
    """Returns values of C expressions over protocol.h."""
    source = tmp_path / "values.c"
    lines = "".join(f'\tprintf("%ld\\n", (long)({name}));\n' for name in names)
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "protocol.h"\n'
        f"int main(void)\n{{\n{lines}}}\n"
    )
    program = tmp_path / "values"
    subprocess.run(
        ["gcc", "-I", str(ROOT / "gpu/helper"), "-o", str(program), str(source)], check=True
    )
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return dict(zip(names, (int(line) for line in output.split()), strict=True))


def test_both_halves_have_the_same_layout(tmp_path: Path) -> None:
    structures = {
        "kernel_time": protocol.TIMES,
        "stall": protocol.STALLS,
        "reason": protocol.REASONS,
        "loss_count": protocol.LOSSES,
    }
    expected = {f"sizeof(struct {name})": dtype.itemsize for name, dtype in structures.items()}
    for name, dtype in structures.items():
        assert dtype.fields is not None
        for part, (_, offset, *_) in dtype.fields.items():
            expected[f"offsetof(struct {name}, {part})"] = offset
    numbers = {
        "FACT_": protocol.Fact,
        "PASSING_": protocol.Passing,
        "TIER_": protocol.HelperTier,
        "LOSS_": protocol.HelperLoss,
        "ERROR_": protocol.HelperError,
        "WHY_": protocol.Why,
    }
    for prefix, enumeration in numbers.items():
        expected |= {prefix + member.name: int(member) for member in enumeration}
    expected["PROTOCOL_VERSION"] = protocol.VERSION
    assert _sizes(list(expected), tmp_path) == expected
