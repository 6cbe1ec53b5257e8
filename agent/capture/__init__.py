# SPDX-License-Identifier: Apache-2.0
"""The capture file: one SQLite database that holds everything reports need."""
