# SPDX-License-Identifier: Apache-2.0
"""Labels as series of a back-end have them: which ones, by which names, within its limits.

Threads and processes are never labels: each would be a series of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiflame.agent.errors import UsageError
from aiflame.agent.model.batch import Labels
from aiflame.agent.sinks.pushed import shown_text

# By their names in series, as users of Pyroscope and Parca know them: fields of `Labels`.
LABELS = {
    "node": "node",
    "namespace": "namespace",
    "pod": "pod",
    "container": "container",
    "workload": "workload",
    "workload_kind": "workload_kind",
    "version": "version",
    "unit": "unit",
    "pod_uid": "pod_uid",
    "container_id": "container_id",
    "engine": "engine",
}

# They stay the same while a pod lives, and are few for each. The node is there for another reason
# as well: a Pyroscope takes two profiles of the same labels and millisecond for one
# (grafana/pyroscope#2483).
DEFAULT_LABELS = ("node", "namespace", "pod", "container", "unit")

SERVICE = "service_name"

# Pyroscope's limits for series (max_label_names_per_series, max_label_name_length,
# max_label_value_length).
MAX_LABELS = 30
MAX_NAME_BYTES = 1_024
MAX_VALUE_BYTES = 2_048

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")


def checked_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of labels that a configuration asks for.

    Raises:
        UsageError: One is unknown.
    """
    for name in names:
        if name not in LABELS:
            raise UsageError(f"no label {name!r}", f"there are: {', '.join(LABELS)}")
    return tuple(dict.fromkeys(names))


def series_labels(labels: Labels, names: Sequence[str], reserved: int) -> list[tuple[str, str]]:
    """Return the labels of a series, sorted by name, each name once.

    What is not known has no label. Of two labels of one name the first stays, and of more than a
    back-end takes the first ones: those of `names`, then `labels.extra`.

    Args:
        labels: Of the batch.
        names: Which of `LABELS`.
        reserved: How many the caller adds.
    """
    found = {SERVICE: _value(labels.service) or "unknown_service"}
    wanted = [(name, getattr(labels, LABELS[name])) for name in names]
    for name, value in (*wanted, *labels.extra):
        shown = _value(value)
        key = _name(name)
        if shown and key and len(found) < MAX_LABELS - reserved:
            found.setdefault(key, shown)
    return sorted(found.items())


def _value(text: str) -> str:
    return shown_text(text, MAX_VALUE_BYTES)


def _name(text: str) -> str:
    # Prometheus's rule, which is narrower than Pyroscope's: Parca has it too. Names that begin
    # with two underscores are the back-ends' own.
    name = _NOT_IN_NAMES.sub("_", text)[:MAX_NAME_BYTES].lstrip("_")
    return f"label_{name}"[:MAX_NAME_BYTES] if name[:1].isdigit() else name
