# SPDX-License-Identifier: Apache-2.0
"""The one reader of ELF files: bytes of a target's file in, headers and numpy arrays out.

`image` reads the headers, `symbols` the symbol tables, `functions` what they say of code, `dynamic`
what the dynamic linker is told. Each reads a `TargetFile` with pread, in pieces, within that file's
budget of bytes and CPU time, and maps nothing: a file that shrinks cannot kill its reader with
SIGBUS. What it raises about a file is `BadTargetFile`, of which `BadElf` is one.
"""
