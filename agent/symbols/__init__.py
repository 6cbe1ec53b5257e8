# SPDX-License-Identifier: Apache-2.0
"""Addresses to names: ELF and DWARF of user space, kallsyms, and the maps that JITs write.

Whatever a target supplies is hostile here. The parsers that run in the recorder (`elf`,
`kallsyms`, `perfmap`) read bounded amounts with plain reads; everything heavier runs in a child
process that `service` starts, where a crash, a loop or a greedy file costs one binary its names.
"""
