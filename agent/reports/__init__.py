# SPDX-License-Identifier: Apache-2.0
"""Reports: one profile in, the bytes of one file out.

Formats are looked up by name in `FORMATS`. A format's module is imported when it is first asked
for, so that a verb which needs none of them does not pay for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from aiflame.agent.reports.base import Frames, Report, ReportOptions, View

__all__ = ["FORMATS", "Frames", "Report", "ReportOptions", "View"]

# Name of the format, as typed after -f: its class, and the module of this package with it.
_CLASSES = {
    "html": ("html", "HtmlReport"),
    "svg": ("svg", "SvgReport"),
    "folded": ("folded", "FoldedReport"),
    "speedscope": ("speedscope", "SpeedscopeReport"),
    "pprof": ("pprof", "PprofReport"),
    "pstats": ("pstats", "PstatsReport"),
}


class _Formats(Mapping[str, Report]):
    """The formats by name, each imported on first use."""

    def __getitem__(self, name: str) -> Report:
        module, class_name = _CLASSES[name]
        report: Report = getattr(import_module(f"{__name__}.{module}"), class_name)()
        return report

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


FORMATS: Mapping[str, Report] = _Formats()
