# SPDX-License-Identifier: Apache-2.0
"""Plain data that rooms hand to each other: the profile, its device half, and the window."""
