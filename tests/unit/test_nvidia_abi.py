# SPDX-License-Identifier: Apache-2.0
"""What the helper declares of CUPTI is what NVIDIA has published.

Headers are those of a CUDA toolkit, and of wheels of PyPI, unpacked below the folder that
AIFLAME_CUDA_WHEELS names: `pip download --no-deps` of nvidia-cuda-cupti-cu12, nvidia-cuda-cupti and
nvidia-cuda-runtime of the same versions. Those of the toolkit have what is common to all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from aiflame.gpu import protocol
from nvidia_helper import HELPER, ROOT, STANDIN

_TOOLKIT = Path("/usr/local/cuda/include")


def _toolkit() -> list[Path]:
    nvcc = shutil.which("nvcc")
    places = [_TOOLKIT, *([Path(nvcc).resolve().parents[1] / "include"] if nvcc else [])]
    places += sorted(Path("/usr/local").glob("cuda-*/include"))
    return [place for place in places if (place / "cupti.h").exists()][:1]


def _include_folders() -> list[list[Path]]:
    """Returns the folders of each version."""
    toolkit = _toolkit()
    found = [toolkit] if toolkit else []
    wheels = os.environ.get("AIFLAME_CUDA_WHEELS")
    if wheels and toolkit:
        headers = sorted(Path(wheels).rglob("cupti_pcsampling.h"))
        found += [[header.parent, *_runtimes(Path(wheels), header), *toolkit] for header in headers]
    return found


def _runtimes(wheels: Path, cupti: Path) -> list[Path]:
    """Returns where cuda.h is, of the same major version."""
    version = re.search(r"cupti(?:_cu12)?-(\d+)", str(cupti))
    return [
        header.parent
        for header in sorted(wheels.rglob("cuda.h"))
        if version and f"-{version[1]}." in str(header)
    ]


@pytest.fixture(params=range(3))
def include(request: pytest.FixtureRequest) -> list[Path]:
    versions = _include_folders()
    if request.param >= len(versions):
        pytest.skip("no CUDA runtime headers of that many versions")
    return versions[request.param]


def _compile(source: Path, include: list[Path], *flags: str) -> subprocess.CompletedProcess[str]:
    folders = [part for folder in include for part in ("-idirafter", str(folder))]
    command = ["gcc", "-std=gnu11", "-fsyntax-only", *flags, *folders, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_size_offset_and_number_is_nvidias(include: list[Path]) -> None:
    text = "".join((include[0] / name).read_text() for name in ("cupti_activity.h",))
    newest = max(int(number) for number in re.findall(r"} CUpti_ActivityKernel(\d+);", text))
    done = _compile(STANDIN / "abi_check.c", include, f"-DKERNEL=CUpti_ActivityKernel{newest}")
    assert done.returncode == 0, done.stderr[:2000]


def test_the_check_finds_what_is_wrong(include: list[Path], tmp_path: Path) -> None:
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
    done = _compile(source, include, "-DKERNEL=CUpti_ActivityKernel9")
    assert done.returncode and "cubin_crc" in done.stderr


def test_every_function_is_in_nvidias_library() -> None:
    libraries = [
        library
        for place in _toolkit()
        for library in (place.parent / "lib64").glob("libcupti.so.*")
    ]
    if not libraries:
        pytest.skip("no CUDA runtime with a libcupti")
    listing = subprocess.run(
        ["readelf", "-W", "--dyn-syms", libraries[0]], capture_output=True, text=True, check=True
    ).stdout
    declared = set(re.findall(r"\b[VSO]\((cupti\w+)", (HELPER / "library.h").read_text()))
    assert len(declared) > 25
    missing = {name for name in declared if f" {name}@" not in listing}
    # Of later versions.
    assert all(name.endswith("_v2") for name in missing)


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
