# SPDX-License-Identifier: Apache-2.0
"""Everything that speaks to the kernel's BPF: bytecode, loader, maps, ring, attaching, the ABI."""
