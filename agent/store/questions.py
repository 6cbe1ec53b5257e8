# SPDX-License-Identifier: Apache-2.0
"""Questions to a store whose answers are tables."""

from __future__ import annotations

from typing import Any

from aiflame.agent.model.gpu import Kernel
from aiflame.agent.model.profile import NS_PER_S, SampleClass
from aiflame.agent.reports.device_rows import UNKNOWN_LAUNCH
from aiflame.agent.reports.kernel_names import kernel_names
from aiflame.agent.reports.table import Table, ms, percent
from aiflame.agent.reports.words import duration, showable
from aiflame.agent.store.engine import Engine
from aiflame.agent.store.rows import NO_STACK
from aiflame.agent.store.selector import (
    AGENT_LABELS,
    UNKNOWN_STACK,
    Selector,
    held_range,
    moment_cell,
    owner_column,
)
from aiflame.agent.store.shown_frames import PARAMETERS, SHOWN, STACKS, WAITED_IN

_S_PER_HOUR = 3_600

# What the sums by hour know; see schema.py.
_HOURLY_LABELS = {"cluster", "service", "version"}

# Reasons of each kernel, and losses of each host, that a line has room for.
_NAMED = 3

CLASSES = tuple(klass.name.lower() for klass in SampleClass)

# What of a frame tells functions apart in a table of them.
_FUNCTION = "(p.1, p.2, if(p.2 = 'python', p.4, ''))"


def top(engine: Engine, selector: Selector, limit: int, *, is_raw: bool = False) -> Table:
    """Returns which functions have most of the time, by themselves and with what they call.

    Args:
        engine: The store.
        selector: Which part.
        limit: At most so many rows.
        is_raw: Time off the CPU is, as that on it, of the innermost function whatever it is.
    """
    table, where, values = _source(engine, selector)
    summed = (
        "SELECT stack_id, class != 'on_cpu' AS waits, sum(value) AS v"
        f" FROM {table} WHERE {where} GROUP BY stack_id, waits"
    )
    ((whole,),) = engine.query(f"SELECT sum(v) FROM ({summed}) AS s", values).rows
    has_waits = not is_raw and selector.classes != ("on_cpu",)
    rows = engine.query(
        f"WITH s AS ({summed})"
        # A name is one function in whichever binary, since versions lie in other places, but
        # another one in each file of Python.
        " SELECT fn.1 AS name, minIf(place, place != '') AS first,"
        " uniqExactIf(place, place != '') AS places,"
        " sumIf(v, leaf) AS self, sum(v) AS total, count() OVER () AS functions"
        f" FROM (SELECT v, arrayJoin(arrayDistinct(arrayMap(p -> {_FUNCTION}, shown))) AS fn,"
        f" fn = arrayMap(p -> {_FUNCTION}, [shown[innermost]])[1] AS leaf,"
        f" arrayFirst(p -> {_FUNCTION} = fn, shown) AS found,"
        " if(found.3 != '', found.3, found.4) AS place FROM"
        # Before a row becomes one for each function: it is looked for once in a stack.
        f" (SELECT v, {SHOWN} AS shown,"
        f" {f'if(waits, {WAITED_IN}, 1)' if has_waits else '1'} AS innermost FROM s LEFT JOIN"
        f" ({STACKS}) AS d USING stack_id) AS j) AS f"
        " GROUP BY fn ORDER BY self DESC, total DESC, name LIMIT {limit:UInt64}",
        {**values, **PARAMETERS, "limit": limit},
    ).rows
    whole = int(whole)
    classes = " and ".join(c.replace("_", " ") for c in selector.classes) or "all classes"
    return Table(
        f"Top functions, {classes}",
        f"100 % = {duration(whole)}, {selector.words}; self: it was innermost"
        + (", waits without the kernel, libc and Python's own (--raw: with)" if has_waits else "")
        + "; total: it was anywhere in the stack",
        (">self ms", ">self", ">total ms", ">total", "function", "/where"),
        tuple(
            (
                *(ms(int(own)), percent(int(own), whole)),
                *(ms(int(total)), percent(int(total), whole)),
                *(showable(name), _places(str(place), int(places))),
            )
            for name, place, places, own, total, _ in rows
        ),
        _more(rows),
    )


def _source(engine: Engine, selector: Selector) -> tuple[str, str, dict[str, Any]]:
    """Returns the table that answers soonest, the condition, and its values."""
    where, values = selector.where()
    is_hourly = not (selector.begin_s % _S_PER_HOUR or selector.end_s % _S_PER_HOUR)
    if (
        is_hourly
        and not selector.labels.keys() - _HOURLY_LABELS
        and not _has_other_hours_in_samples(engine, selector)
    ):
        return "(SELECT *, hour AS t FROM stacks_1h) AS h", where, values
    return "samples", where, values


def _has_other_hours_in_samples(engine: Engine, selector: Selector) -> bool:
    """Tells whether sums are of hours that begin within those of UTC, and samples tell it better.

    An engine's hours are those of its time zone, and some zones are half an hour off. Samples are
    kept for a sixth of the time of sums: of what is older these are all there is.
    """
    begin_s = max(0, selector.begin_s - _S_PER_HOUR)
    where, values = Selector(begin_s, selector.end_s).where()
    hours = "(SELECT hour AS t FROM stacks_1h) AS h"
    ((others, first_hour_s),) = engine.query(
        f"SELECT countIf(toUInt32(t) % {_S_PER_HOUR} != 0), toUInt32(min(t))"
        f" FROM {hours} WHERE {where}",
        values,
    ).rows
    if not int(others):
        return False
    ((first_s,),) = engine.query(f"SELECT toUInt32(min(t)) FROM samples WHERE {where}", values).rows
    return 0 < int(first_s) < int(first_hour_s) + _S_PER_HOUR


def kernels(engine: Engine, selector: Selector, limit: int) -> Table:
    """Returns the kernels with most samples, else most time, and what they waited for."""
    where, values = _of_devices(selector)
    rows = engine.query(
        "SELECT kernel, arraySort(groupUniqArrayArray(models)) AS devices,"
        " uniqExactMerge(nodes) AS hosts, sum(n) AS total,"
        " sum(st) AS stalled, sum(l) AS launched, sum(b) AS busy,"
        f" arraySlice(arrayReverseSort(groupArrayIf((st, reason), st > 0)), 1, {_NAMED}) AS why,"
        " count() OVER () AS all"
        " FROM (SELECT kernel, reason, groupUniqArrayIf(model, model != '') AS models,"
        " uniqExactState(node) AS nodes, sum(samples) AS n,"
        " sum(stalled) AS st, sum(launches) AS l, sum(busy_ns) AS b"
        f" FROM gpu WHERE {where} GROUP BY kernel, reason) AS g"
        " GROUP BY kernel ORDER BY total DESC, busy DESC, launched DESC, kernel"
        " LIMIT {limit:UInt64}",
        {**values, "limit": limit},
    ).rows
    return Table(
        "Top GPU kernels",
        f"{selector.words}; stalled: of the kernel's samples; reasons: of its stalled samples",
        (">samples", ">stalled", ">launches", ">GPU ms", ">hosts", "kernel", "device", "reasons"),
        tuple(
            (
                *(f"{int(n):,}", percent(int(stalled), int(n)) if int(n) else "-"),
                *(f"{int(launched):,}", _measured_ms(int(busy)), f"{int(hosts):,}"),
                *(_short(kernel), _devices(devices)),
                ", ".join(
                    f"{showable(reason)} {percent(int(part), int(stalled))}" for part, reason in why
                ),
            )
            for kernel, devices, hosts, n, stalled, launched, busy, why, _ in rows
        ),
        _more(rows),
    )


def busy_by(engine: Engine, selector: Selector, label: str, limit: int) -> Table:
    """Returns how much of the time kernels ran, by one of selector.LABELS."""
    where, values = _of_devices(selector)
    first_s, last_s = held_range(engine)
    whole_ns = (min(selector.end_s, last_s) - max(selector.begin_s, first_s)) * NS_PER_S
    # Devices have the same numbers within a stretch of time alone.
    rows = engine.query(
        "SELECT who, count() AS hosts, sum(ns) AS busy, sum(ran) AS devices,"
        " sum(calls) AS launched, sum(taken) AS n, sum(st) AS stall, count() OVER () AS all FROM"
        " (SELECT who, cluster, node, max(ran) AS ran, sum(ns) AS ns, sum(calls) AS calls,"
        " sum(taken) AS taken, sum(st) AS st FROM"
        f" (SELECT {owner_column(label)} AS who, cluster, node, t,"
        " uniqExactIf((family, model, device), busy_ns > 0) AS ran, sum(busy_ns) AS ns,"
        " sum(launches) AS calls, sum(samples) AS taken, sum(stalled) AS st"
        f" FROM gpu WHERE {where} GROUP BY who, cluster, node, t) AS at_once"
        " GROUP BY who, cluster, node) AS of_hosts"
        " GROUP BY who ORDER BY busy DESC, n DESC, who LIMIT {limit:UInt64}",
        {**values, "limit": limit},
    ).rows
    return Table(
        f"GPU time by {label}",
        f"{selector.words}; busy: of that time, as far as the store has it, times devices; devices:"
        " the most that it ran kernels on at once, of each host; kernels that ran at once on one"
        " device count for each; stalled: of its samples",
        (">busy", ">devices", ">GPU ms", ">launches", ">samples", ">stalled", ">hosts", label),
        tuple(
            (
                percent(int(busy), whole_ns * int(devices)) if int(busy) else "-",
                *(f"{int(devices):,}" if int(busy) else "-", _measured_ms(int(busy))),
                *(f"{int(launched):,}", f"{int(n):,}"),
                percent(int(stalled), int(n)) if int(n) else "-",
                *(f"{int(hosts):,}", showable(who) if who else "[none]"),
            )
            for who, hosts, busy, devices, launched, n, stalled, _ in rows
        ),
        _more(rows),
    )


def stalls(engine: Engine, selector: Selector, limit: int) -> Table:
    """Returns what instructions waited for, by device model and kernel."""
    where, values = _of_devices(selector)
    rows = engine.query(
        "SELECT model, kernel, reason, any(category) AS kind, sum(samples) AS n,"
        " sum(samples * period_ns) AS ns, sum(n) OVER (PARTITION BY model, kernel) AS whole,"
        " count() OVER () AS all"
        f" FROM gpu WHERE {where} AND samples > 0 GROUP BY model, kernel, reason"
        " ORDER BY n DESC, model, kernel, reason LIMIT {limit:UInt64}",
        {**values, "limit": limit},
    ).rows
    return Table(
        "Stall reasons by device and GPU kernel",
        f"{selector.words}; share: of the kernel's samples on that device; ms: what the samples"
        " stand for, 0 where the device tells no period",
        (">samples", ">share", ">ms", "device", "kernel", "reason", "category"),
        tuple(
            (
                *(f"{int(n):,}", percent(int(n), int(whole)), ms(int(ns))),
                *(showable(model) if model else "", _short(kernel), showable(reason)),
                str(kind).replace("_", " "),
            )
            for model, kernel, reason, kind, n, ns, whole, _ in rows
        ),
        _more(rows),
    )


def stalls_by_line(
    engine: Engine, selector: Selector, limit: int, *, is_raw: bool = False
) -> Table:
    """Returns which Python lines launched what stalled most.

    Args:
        engine: The store.
        selector: Which part.
        limit: At most so many rows.
        is_raw: The innermost ones, of whatever file they are.
    """
    where, values = _of_devices(selector)
    innermost = "indexOf(kinds, 'python')"
    own = (
        "arrayFirstIndex((kind, file) -> kind = 'python' AND NOT match(file, {standard:String})"
        " AND NOT match(file, {packages:String}) AND NOT match(file, {entry:String}), kinds, files)"
    )
    rows = engine.query(
        "WITH s AS (SELECT launch_stack AS stack_id, kernel, sum(stalled) AS st,"
        " sum(samples) AS n,"
        f" sum(stalled * period_ns) AS ns FROM gpu WHERE {where} AND samples > 0"
        " GROUP BY stack_id, kernel)"
        " SELECT line, sum(st) AS stalled, sum(n) AS total, sum(ns) AS time,"
        " sum(stalled) OVER () AS whole, argMax(kernel, (st, n, kernel)) AS most,"
        " uniqExact(kernel) AS kernels, count() OVER () AS all FROM"
        f" (SELECT st, n, ns, kernel, multiIf(stack_id = {NO_STACK}, '{UNKNOWN_LAUNCH}',"
        f" NOT has_frames, '{UNKNOWN_STACK}', at = 0, '[no Python]',"
        " concat(frames[at], ' (', files[at], ':',"
        " toString(lines[at]), ')')) AS line FROM"
        " (SELECT stack_id, has_frames, st, n, ns, kernel, frames, files, lines,"
        f" {innermost if is_raw else f'if({own} > 0, {own}, {innermost})'} AS at FROM s LEFT JOIN"
        " (SELECT stack_id, true AS has_frames, any(frames) AS frames, any(kinds) AS kinds,"
        " any(files) AS files, any(lines) AS lines FROM stacks"
        " WHERE stack_id IN (SELECT stack_id FROM s)"
        " GROUP BY stack_id) AS d USING stack_id) AS j) AS f"
        " GROUP BY line ORDER BY stalled DESC, total DESC, line LIMIT {limit:UInt64}",
        {**values, **PARAMETERS, "limit": limit},
    ).rows
    return Table(
        "Python lines by what they launched",
        f"{selector.words}; share: of all stalled samples; ms: what these stand for, 0 where the"
        " device tells no period; the innermost Python frame of the launch"
        + ("" if is_raw else " that is of no installed package, if there is one (--raw: of all)"),
        (">stalled", ">share", ">samples", ">ms", "Python line", "kernel with most"),
        tuple(
            (
                *(f"{int(stalled):,}", percent(int(stalled), int(whole)), f"{int(n):,}"),
                *(ms(int(ns)), showable(line)),
                _short(most) + (f" and {int(count) - 1:,} more" if int(count) > 1 else ""),
            )
            for line, stalled, n, ns, whole, most, count, _ in rows
        ),
        _more(rows),
    )


def agents(engine: Engine, selector: Selector, limit: int) -> Table:
    """Returns which hosts there are, what recording them costs, and what they lost."""
    hosts = Selector(selector.begin_s, selector.end_s, selector.labels)
    where, values = hosts.where(allowed=AGENT_LABELS)
    rows = engine.query(
        "SELECT node, argMax(ver, newest) AS version, max(newest) AS last, sum(taken) AS n,"
        " sum(cpu_ns) AS cpu, sumIf(seconds_of, loss = '') AS seconds, max(mem) AS rss,"
        " arraySlice(arrayReverseSort(groupArrayIf((gone, loss), loss != '')), 1,"
        f" {_NAMED}) AS most, count() OVER () AS all FROM"
        " (SELECT node, loss, argMax(agent_version, t) AS ver,"
        " toUInt32(max(t + span_s)) AS newest,"
        " sum(lost) AS gone, sum(samples) AS taken, sum(self_cpu_ns) AS cpu_ns,"
        " sum(span_s) AS seconds_of, max(rss_bytes) AS mem"
        f" FROM agents WHERE {where} GROUP BY node, loss) AS a"
        " GROUP BY node ORDER BY last, node LIMIT {limit:UInt64}",
        {**values, "limit": limit},
    ).rows
    return Table(
        "Hosts",
        f"{selector.words}, longest silent first; times are UTC; recorded: seconds of these that"
        " have come, gaps left out; CPU: of one processor, by the agent's processes and programs;"
        " MB: the most that these processes had",
        ("last heard of", ">recorded", ">samples", ">CPU", ">MB", "host", "version", "lost"),
        tuple(
            (
                *(moment_cell(int(last)), f"{int(seconds):,} s", f"{int(n):,}"),
                *(percent(int(cpu), int(seconds) * 10**9), f"{int(rss) / 1e6:,.0f}"),
                *(showable(node) if node else "[no name]", showable(version)),
                ", ".join(f"{showable(name)} {int(count):,}" for count, name in gone),
            )
            for node, version, last, n, cpu, seconds, rss, gone, _ in rows
        ),
        _more(rows),
    )


def _of_devices(selector: Selector) -> tuple[str, dict[str, Any]]:
    return Selector(selector.begin_s, selector.end_s, selector.labels).where()


def _measured_ms(busy_ns: int) -> str:
    """Returns a time of kernels; none has taken none, but not all devices tell it."""
    return ms(busy_ns) if busy_ns else "-"


def _short(kernel: str) -> str:
    """Returns a GPU kernel's name as its programmer wrote it."""
    (name,) = kernel_names([Kernel(0, "", kernel, "")])
    return showable(name.short)


def _devices(models: list[str]) -> str:
    """Returns the models of devices that a GPU kernel ran on, as many as a line has room for."""
    more = [f"{len(models) - _NAMED:,} more"] if len(models) > _NAMED else []
    return ", ".join([*map(showable, models[:_NAMED]), *more])


def _places(first: str, count: int) -> str:
    """Returns where a function is, of so many binaries or files."""
    more = f" and {count - 1:,} more" if count > 1 else ""
    return f"{showable(first)}{more}" if first or more else ""


def _more(rows: list[list[Any]]) -> int:
    """Returns how many rows there are besides: the last column is how many in all."""
    return int(rows[0][-1]) - len(rows) if rows else 0
