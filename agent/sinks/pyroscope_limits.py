# SPDX-License-Identifier: Apache-2.0
"""What Pyroscope takes if nothing else is configured there, by either of its two interfaces."""

from __future__ import annotations

# Of samples in a profile: `max_profile_stacktrace_samples`.
MAX_SAMPLES = 16_000
# At once: `ingestion_burst_size_mb` is 2 MB, of which the rest is for labels, and less than a
# profile may have by itself (4 MiB).
MAX_BYTES = 1_900_000
# `reject_older_than` is an hour; a minute of it is for clocks that differ, and for the way.
MAX_AGE_S = 3_540.0
# Profiles of one series are told apart by their milliseconds (grafana/pyroscope#2483).
APART_NS = 1_000_000
