# SPDX-License-Identifier: Apache-2.0
"""Times as they are typed: 30, 30s, 250ms, 5m, 1.5h."""

from __future__ import annotations

import argparse
import re

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNIT_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, None: 10**9}

# A century: monotonic clocks and SQLite's integers hold 292 years of nanoseconds.
_MAX_NS = 100 * 365 * 24 * 3600 * 10**9


def duration_ns(text: str) -> int:
    """Return a length of time in ns, greater than zero; for argparse."""
    ns = _parsed(text)
    if ns is None or ns < 1:
        raise argparse.ArgumentTypeError(f"not a duration: {text} (30, 30s, 5m)")
    return ns


def moment_ns(text: str) -> int:
    """Return a time since a start in ns, zero included; for argparse."""
    ns = _parsed(text)
    if ns is None:
        raise argparse.ArgumentTypeError(f"not a time since the start: {text} (10, 10s, 5m)")
    return ns


def _parsed(text: str) -> int | None:
    match = _TIME.fullmatch(text)
    ns = None if match is None else float(match[1]) * _UNIT_NS[match[2]]
    return round(ns) if ns is not None and ns <= _MAX_NS else None
