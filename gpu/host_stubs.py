# SPDX-License-Identifier: Apache-2.0
"""Names of GPU kernels as they follow from symbols of host code.

A runtime launches a kernel through a host function that the compiler made for it, its stub, whose
linkage name holds the kernel's. Names come from targets: they are cut before they are looked at.
"""

from __future__ import annotations

import re

# As much as the demangler takes at most.
_MAX_CHARACTERS = 10_000

# Host functions that stand for kernels are called __device_stub__NAME by clang (CUDA and HIP);
# nvcc's are __device_stub_ and the kernel's mangled name.
_STUB = "__device_stub_"
_STUB_LENGTH = re.compile(r"\d{1,5}(?=__device_stub_)")
_MANGLED = re.compile(r"_Z[NLKS]*\d")
# GCC's and LLVM's copies of a function, and the versions of a symbol.
_COPY = re.compile(r"(?:\.(?:constprop|isra|part|cold|llvm|lto_priv)(?:\.\d+)*|@.*)$")
_OPENING = re.compile(r"_Z(?:N[rVK]*)?")
_PART = re.compile(r"(L?)([1-9]\d{0,3})")
_SYMBOL = re.compile(r"[A-Za-z_$][\w$.]*")


def is_stub(symbol: str) -> bool:
    """Whether a symbol of host code is the function that stands for a kernel there."""
    return _STUB in symbol


def name_from_host_symbol(symbol: str, api: str = "") -> str | None:
    """Returns the kernel that a host function stands for, by its linkage name.

    Args:
        symbol: Of the address that a launch was given; or of the function that called the launch,
            and then it is a kernel's only if `is_stub` says so.
        api: As in gpu/apis. With "cuda" a kernel that is local to its source file gets the name
            that nvcc gives its device code, which is that of a global one.

    Returns:
        None where it is no function's name. Of an `extern "C"` kernel built by nvcc the name comes
        back mangled, since its stub's does not tell that it was not.
    """
    plain = _COPY.sub("", symbol[:_MAX_CHARACTERS])
    if _SYMBOL.fullmatch(plain) is None or "@plt" in symbol:
        return None
    if plain.startswith(_STUB):
        return _after_stub(plain)
    for match in _STUB_LENGTH.finditer(plain):
        # A name before may end in digits as well, so the longest number that fits is the length.
        for start in range(match.start(), match.end()):
            end = match.end() + int(plain[start : match.end()])
            if end <= len(plain):
                kernel = _after_stub(plain[match.end() : end])
                is_mangled = kernel.startswith("_Z")
                return (
                    kernel if is_mangled else f"{plain[:start]}{len(kernel)}{kernel}{plain[end:]}"
                )
    return _without_locality(plain) if api == "cuda" else plain


def _without_locality(mangled: str) -> str:
    """Drops the L by which GCC and clang mark internal linkage.

    It stands before the length of a source name (Itanium C++ ABI, 5.1.2), be it a nested one.
    """
    opening = _OPENING.match(mangled)
    at = opening.end() if opening is not None else len(mangled)
    while at < len(mangled):
        part = _PART.match(mangled, at)
        if part is None:
            return mangled
        if part[1]:
            return mangled[:at] + mangled[at + 1 :]
        at = part.end() + int(part[2])
    return mangled


def _after_stub(name: str) -> str:
    kernel = name[len(_STUB) :]
    return kernel if _MANGLED.match(kernel) else kernel.removeprefix("_")
