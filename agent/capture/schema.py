# SPDX-License-Identifier: Apache-2.0
"""The capture's schema and its version; the tables are described in schema.sql."""

from __future__ import annotations

from importlib import resources

# "AFLM": PRAGMA application_id, so that file(1) and a reader can tell a capture from any SQLite
# file.
APPLICATION_ID = 0x41464C4D

# Raised when a reader of the old schema would misread the new one.
SCHEMA_VERSION = 11

# Older ones that are read as well, since all they lack has a value that says so.
READABLE_VERSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, SCHEMA_VERSION)

# Columns that version 1 does not have.
SINCE_VERSION_2 = frozenset({("stacks", "gil")})

# Tables of the device half, which older versions do not have.
SINCE_VERSION_3 = frozenset(
    {
        *("devices", "api_functions", "kernels", "kernel_codes", "instructions"),
        *("stall_reasons", "api_calls", "api_events", "device_samples"),
    }
)

# The table of kernel times, likewise.
SINCE_VERSION_4 = frozenset({"kernel_times"})

# Tables and columns that tell of launches and samples when they were.
SINCE_VERSION_5 = frozenset({"launches"})
COLUMNS_SINCE_VERSION_5 = frozenset({("device_samples", "begin_ns"), ("device_samples", "end_ns")})

# Columns that tell of stacks which devices have named by the numbers of launches.
COLUMNS_SINCE_VERSION_6 = frozenset({("device_samples", "stack_id"), ("kernel_times", "stack_id")})

# What devices tell of versions and of how they were sampled.
COLUMNS_SINCE_VERSION_7 = frozenset({("devices", "details")})

# The table of what devices tell by the second, the code that instructions can be listed from, and
# who has built the graphs that ran.
SINCE_VERSION_8 = frozenset({"device_readings", "code_objects"})
COLUMNS_SINCE_VERSION_8 = frozenset(
    {("kernel_codes", "object_id"), ("kernel_times", "built_stack_id")}
)

# The tables of intervals that are no second each, and of whose a process was.
SINCE_VERSION_9 = frozenset({"intervals", "process_labels"})

# What the kernel accounts of threads and processes itself.
SINCE_VERSION_10 = frozenset({"thread_accounts", "delays"})

# Which accounts are of threads that have ended, and from when to when intervals were.
COLUMNS_SINCE_VERSION_11 = frozenset(
    {("thread_accounts", "has_ended"), ("intervals", "begin_ns"), ("intervals", "end_ns")}
)

# Prefix of the meta keys that are shown as they are under every report.
FACT_PREFIX = "fact:"
# There until symbols are resolved.
SYMBOLS_FACT = f"{FACT_PREFIX}symbols"


def schema_sql() -> str:
    """Returns the statements that make an empty capture."""
    return resources.files("aiflame.agent.capture").joinpath("schema.sql").read_text()
