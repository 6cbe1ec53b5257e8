# SPDX-License-Identifier: Apache-2.0
"""Programs with device code, as nvcc builds them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiflame.agent.inspector import tools
from aiflame.gpu.nvidia import disassembly

_NVDISASM = next(filter(tools.is_sound, disassembly.programs()), None)
needs_nvdisasm = pytest.mark.skipif(
    _NVDISASM is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)"
)
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc to build CUDA programs with"
)

SCALE, FILL, SUM = "scale", "_Z4fillIfEvPT_S0_", "sum"

# Lines of `scale` are 3 and 4.
_KERNELS = """extern "C" __global__ void scale(float *p, float f)
{
    if (threadIdx.x < 100)
        p[threadIdx.x] = __sinf(p[threadIdx.x]) * f;
}
template <typename T> __global__ void fill(T *p, T v) { p[threadIdx.x] = v; }
template __global__ void fill<float>(float *, float);
"""
_OTHERS = """extern "C" __global__ void sum(float *p)
{
    for (int i = 1; i < 32; i++)
        p[0] += p[i];
}
int main() { return 0; }
"""

# How each entry is compressed.
PLAIN = ("--compress-mode=none",)
LZ4 = ("--compress-mode=speed", "-Xfatbin", "-compress-all")
ZSTD = ("--compress-mode=size", "-Xfatbin", "-compress-all")


def build(
    folder: Path,
    *flags: str,
    architectures: Sequence[int] = (80, 90),
    kernels: str = _KERNELS,
) -> Path:
    """Builds a program of two source files, one of which has `scale` and `fill`, one `sum`.

    It has cubins for the architectures, and PTX for the last of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.cu").write_text(kernels)
    (folder / "others.cu").write_text(_OTHERS)
    codes = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in architectures]
    codes.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    command = ["nvcc", "-lineinfo", *codes, *flags, "-o", "program", "kernels.cu", "others.cu"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "program"


def kernels_saying(constant: int) -> str:
    """Other source for `scale` and `fill`, which tells from others by a constant."""
    return _KERNELS.replace("* f;", f"* f + {constant};")
