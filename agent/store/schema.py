# SPDX-License-Identifier: Apache-2.0
"""The tables of a store, and how older ones become those of today.

Statements use what ClickHouse has had since version 23. A migration is never changed once it was
released: what is new goes into one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aiflame.agent.errors import AiflameError
from aiflame.agent.store.engine import Engine


class Rows(Enum):
    """Tables that rows are inserted into."""

    STACKS = "stacks"
    SAMPLES = "samples"
    GPU = "gpu"
    AGENTS = "agents"


# Longer than samples by three weeks: a stack is sent once in the week in which it was first seen.
_STACKS_EXTRA_DAYS = 26

# What is summed by hour takes a hundredth of the room, and answers how it was a season ago.
_HOURLY_TIMES = 6

# Of tables of the first version: see `_second`.
_KNOWN_TOKENS = 2_000

# As many inserts into a table are told from their repetitions. An agent sends again what it had no
# answer to, which may be hours later; a thousand hosts that send each minute make so many in eight
# hours. Of each an engine keeps 240 bytes of memory and 75 of disk, which it reads when it starts:
# 120 MB and half a second a table (measured with chDB 4.4.0).
_KNOWN_INSERTS = 500_000

_NAME = "LowCardinality(String)"
_WHO = ", ".join(
    f"{column} {_NAME}"
    for column in (
        *("cluster", "node", "service", "version", "namespace", "pod", "workload", "container"),
        "container_id",
    )
)


def _samples(settings: str, keep: str, keep_days: int) -> tuple[str, ...]:
    return (
        # Frames are leaf first; all arrays of a row have the same length.
        f"CREATE TABLE stacks (week Date, stack_id UInt64, frames Array({_NAME}),"
        f" kinds Array({_NAME}), modules Array({_NAME}), files Array({_NAME}), lines Array(UInt32),"
        f" ending {_NAME}, gil {_NAME}, last_seen DateTime)"
        " ENGINE = ReplacingMergeTree(last_seen) PARTITION BY week ORDER BY stack_id"
        f" {keep.format('week', keep_days + _STACKS_EXTRA_DAYS)} {settings}",
        "CREATE TABLE samples (t DateTime CODEC(DoubleDelta, ZSTD(1)), span_s UInt16,"
        f" class {_NAME}, unit {_NAME}, {_WHO}, pid UInt32, comm {_NAME},"
        f" labels Map({_NAME}, String), stack_id UInt64 CODEC(ZSTD(1)),"
        " value UInt64 CODEC(T64, ZSTD(1)), events UInt64 CODEC(T64, ZSTD(1)),"
        " INDEX i_pod pod TYPE bloom_filter(0.01) GRANULARITY 4)"
        " ENGINE = MergeTree PARTITION BY toDate(t)"
        " ORDER BY (class, service, version, toStartOfHour(t), stack_id, node, t)"
        f" {keep.format('t', keep_days)} {settings}",
    )


def _first(keep_days: int) -> tuple[str, ...]:
    keep = "TTL {} + INTERVAL {} DAY" if keep_days else ""
    hourly = f"TTL hour + INTERVAL {keep_days * _HOURLY_TIMES} DAY" if keep_days else ""
    settings = f"SETTINGS non_replicated_deduplication_window = {_KNOWN_TOKENS}"
    settings += ", ttl_only_drop_parts = 1"
    return (
        *_samples(settings, keep, keep_days),
        f"CREATE TABLE stacks_1h (hour DateTime, class {_NAME}, cluster {_NAME}, service {_NAME},"
        f" version {_NAME}, stack_id UInt64, value UInt64, events UInt64)"
        " ENGINE = SummingMergeTree((value, events)) PARTITION BY toYYYYMM(hour)"
        f" ORDER BY (class, service, version, hour, cluster, stack_id) {hourly} {settings}",
        "CREATE MATERIALIZED VIEW stacks_1h_mv TO stacks_1h AS SELECT toStartOfHour(t) AS hour,"
        " class, cluster, service, version, stack_id, sum(value) AS value, sum(events) AS events"
        " FROM samples GROUP BY hour, class, cluster, service, version, stack_id",
        # Rows with reason '' hold launches and busy_ns, the others samples.
        f"CREATE TABLE gpu (t DateTime, span_s UInt16, {_WHO}, pid UInt32, comm {_NAME},"
        f" family {_NAME}, model {_NAME}, kernel {_NAME}, reason {_NAME}, category {_NAME},"
        " launch_stack UInt64 CODEC(ZSTD(1)), samples UInt64 CODEC(T64, ZSTD(1)),"
        " stalled UInt64 CODEC(T64, ZSTD(1)), period_ns UInt64, launches UInt64, runs UInt64,"
        " busy_ns UInt64)"
        " ENGINE = MergeTree PARTITION BY toDate(t)"
        " ORDER BY (model, kernel, reason, toStartOfHour(t), node, launch_stack)"
        f" {keep.format('t', keep_days)} {settings}",
        f"CREATE TABLE agents (t DateTime, span_s UInt16, cluster {_NAME}, node {_NAME},"
        f" agent_version {_NAME}, loss {_NAME}, lost UInt64, samples UInt64, self_cpu_ns UInt64,"
        " rss_bytes UInt64)"
        " ENGINE = MergeTree PARTITION BY toYYYYMM(t) ORDER BY (node, t)"
        f" {keep.format('t', keep_days)} {settings}",
    )


def _second(keep_days: int) -> tuple[str, ...]:
    keep = f"TTL added + INTERVAL {keep_days} DAY" if keep_days else ""
    named_days = keep_days * _HOURLY_TIMES + _STACKS_EXTRA_DAYS
    named = (f"ALTER TABLE stacks MODIFY TTL week + INTERVAL {named_days} DAY",)
    return (
        # Sums by hour tell of functions for as long as these have names.
        *(named if keep_days else ()),
        # What was added by hand may be added again whenever somebody likes, as long as it is kept.
        "CREATE TABLE inserts (token String, added DateTime DEFAULT now())"
        f" ENGINE = MergeTree ORDER BY token {keep}",
        # A stack that is there twice is no harm.
        *(
            f"ALTER TABLE {table} MODIFY SETTING"
            f" non_replicated_deduplication_window = {_KNOWN_INSERTS}"
            for table in ("samples", "stacks_1h", "gpu", "agents")
        ),
    )


def _third(keep_days: int) -> tuple[str, ...]:
    # Which device of those in one host, counted anew for each stretch of time.
    return ("ALTER TABLE gpu ADD COLUMN IF NOT EXISTS device UInt16 DEFAULT 0",)


# By the version that they lead to.
_MIGRATIONS = (_first, _second, _third)
VERSION = len(_MIGRATIONS)


@dataclass(frozen=True, slots=True)
class State:
    """What a store says of itself.

    Attributes:
        version: Of its tables; 0: there are none.
        keep_days: How long samples are kept; 0: for ever.
    """

    version: int
    keep_days: int


def state_of(engine: Engine) -> State:
    """Returns what a store says of itself."""
    found = engine.query("EXISTS TABLE schema_versions")
    if not found.rows or not found.rows[0][0]:
        return State(0, 0)
    rows = engine.query("SELECT version, keep_days FROM schema_versions ORDER BY version").rows
    return State(int(rows[-1][0]), int(rows[-1][1])) if rows else State(0, 0)


def migrate(engine: Engine, keep_days: int) -> tuple[int, int]:
    """Makes the tables of a store, or brings them up to date.

    Args:
        engine: The store.
        keep_days: After how many days samples may go; 0: never. Only of tables that it makes.

    Returns:
        The version that the store had, 0 for none, and the one that it has.

    Raises:
        AiflameError: The store was made by a later version of aiflame.
    """
    engine.create_database()
    engine.execute(
        "CREATE TABLE IF NOT EXISTS schema_versions (version UInt32, keep_days UInt32,"
        " applied DateTime DEFAULT now()) ENGINE = MergeTree ORDER BY version"
    )
    before = state_of(engine)
    if before.version > VERSION:
        raise _too_new(before.version)
    kept = before.keep_days if before.version else keep_days
    for version in range(before.version + 1, VERSION + 1):
        for statement in _MIGRATIONS[version - 1](kept):
            # One that stopped half way is taken up again where it was.
            engine.execute(
                statement.replace("CREATE TABLE ", "CREATE TABLE IF NOT EXISTS ", 1).replace(
                    "CREATE MATERIALIZED VIEW ", "CREATE MATERIALIZED VIEW IF NOT EXISTS ", 1
                )
            )
        engine.execute(
            f"INSERT INTO schema_versions (version, keep_days) VALUES ({int(version)}, {int(kept)})"
        )
    return before.version, VERSION


def require(engine: Engine) -> State:
    """Returns what a store says of itself, if it can be used.

    Raises:
        AiflameError: It has no tables, or those of another version.
    """
    state = state_of(engine)
    if state.version > VERSION:
        raise _too_new(state.version)
    if state.version < VERSION:
        what = "has no tables yet" if not state.version else "is of an older version"
        raise AiflameError(
            f"the store {engine.name} {what}", f"aiflame store init --store {engine.name}"
        )
    return state


def _too_new(version: int) -> AiflameError:
    return AiflameError(
        f"the store is of version {version}, made by a later aiflame; this one knows {VERSION}",
        "update aiflame",
    )
