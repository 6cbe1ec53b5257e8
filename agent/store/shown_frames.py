# SPDX-License-Identifier: Apache-2.0
"""Which frames of a stack tables of functions are of, in SQL; and which stacks have none at all."""

from __future__ import annotations

from aiflame.agent.model.profile import GilState
from aiflame.agent.reports import own_code
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from aiflame.agent.store.engine import Parameter
from aiflame.agent.store.rows import stack_id_of
from aiflame.agent.store.selector import UNKNOWN_STACK

# Ids of stacks of which only the time is known.
LOST_STACKS = tuple(stack_id_of(reason, gil) for reason in TRUNCATED_REASONS for gil in GilState)

# The frames that a reader looks for, leaf first, as (name, kind, module, file); of a stack without
# any what the flame graph has in their place.
SHOWN = (
    f"multiIf(NOT has_frames, [('{UNKNOWN_STACK}', 'marker', '', '')],"
    " empty(frames), [(transform(ending, {cut:Array(String)}, {markers:Array(String)},"
    " '[no stack]'), 'marker', '', '')],"
    " arrayFilter(p -> p.2 != 'interpreter', arrayZip(frames, kinds, modules, files)))"
)

# What SHOWN needs, of the stacks whose ids are in `s`.
STACKS = (
    "SELECT stack_id, true AS has_frames, any(frames) AS frames, any(kinds) AS kinds,"
    " any(modules) AS modules, any(files) AS files, any(toString(ending)) AS ending"
    " FROM stacks WHERE stack_id IN (SELECT stack_id FROM s) GROUP BY stack_id"
)

# Of a file of a Python function: whether it is of Python's own library.
_IS_STANDARD = "(match({0}, {{standard:String}}) AND NOT match({0}, {{packages:String}}))"

# Which of `shown` a wait is charged to: the innermost that is neither the kernel's, libc's nor the
# interpreter's, else the innermost of Python, else that is not the kernel's, else that is not the
# scheduler's.
WAITED_IN = (
    "arrayFirst(at -> at > 0, ["
    "arrayFirstIndex(p -> multiIf(p.2 = 'kernel', 0, p.2 = 'native',"
    " NOT match(p.3, {waiting:String}), p.2 = 'python', NOT "
    + _IS_STANDARD.format("p.4")
    + ", 1), shown), arrayFirstIndex(p -> p.2 = 'python', shown),"
    " arrayFirstIndex(p -> p.2 != 'kernel', shown),"
    " arrayFirstIndex(p -> NOT match(p.1, {scheduler:String}), shown), 1])"
)

# Parameters of the expressions above, and patterns of others.
PARAMETERS: dict[str, Parameter] = {
    "cut": [reason.name.lower() for reason in TRUNCATED_REASONS],
    "markers": [reason.marker for reason in TRUNCATED_REASONS],
    "waiting": own_code.WAITING_MODULE,
    "standard": own_code.STANDARD_LIBRARY,
    "packages": own_code.PACKAGES,
    "scheduler": own_code.SCHEDULER,
    "entry": own_code.ENTRY_POINT,
}
