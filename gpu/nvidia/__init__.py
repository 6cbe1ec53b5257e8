# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's devices: what a machine has of them, and what aiflame's helper in targets tells."""

# As typed after --gpu.
NAME = "nvidia"
