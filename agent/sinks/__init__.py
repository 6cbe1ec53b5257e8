# SPDX-License-Identifier: Apache-2.0
"""What becomes of windows: one module for each kind of sink."""
