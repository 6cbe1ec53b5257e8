# SPDX-License-Identifier: Apache-2.0
"""Names, times and shares as they are shown.

What records needs these as well, and no report: this imports none of what makes one.
"""

from __future__ import annotations

import re

# The longest C++ names in libtorch are near 4,000 characters; a hostile one may be megabytes.
MAX_NAME_CHARS = 4_096

# Control characters and noncharacters (XML 1.0 section 2.2 forbids most of them), lone
# surrogates, and the bidirectional overrides, with which a name could rewrite its neighbours.
_UNSHOWABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)

_UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "us"))


def showable(name: str) -> str:
    """Return `name` as it may be shown: one line, valid Unicode, of bounded length.

    What can't be shown becomes U+FFFD, and a cut says how long the name was; an empty name becomes
    `[unnamed]`.
    """
    if 0 < len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable():
        return name  # as nearly all are, at a third of the time
    if len(name) > MAX_NAME_CHARS:
        name = f"{name[:MAX_NAME_CHARS]}... ({len(name)} characters)"
    return _UNSHOWABLE.sub("\ufffd", name) or "[unnamed]"


def duration(ns: int) -> str:
    """Return a time with three decimals in the largest unit it reaches: "1.234 s"."""
    for size, unit in _UNITS:
        if ns >= size:
            return f"{ns / size:,.3f} {unit}"
    return f"{ns} ns"


def percent(part: int, whole: int) -> str:
    """Return a share with two decimals, "0.00 %" of nothing."""
    return f"{100 * part / whole if whole else 0:.2f} %"


def process_label(name: str, pid: int) -> str:
    """Return a process as the outermost frame; 0 is the pid of what stands for many."""
    return f"{showable(name)} ({pid})" if pid else showable(name)
