# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: one TOML file, flags and variables, checked as a whole.

A key `frequency_hz` is also the flag `--frequency-hz` and the variable `AIFLAME_FREQUENCY_HZ`;
`directory` in the table `[sinks.captures]` is `--sinks-captures-directory` and
`AIFLAME_SINKS_CAPTURES_DIRECTORY`. Flags go over variables, and these over the file. A sink is on
once something is said of it.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import platform
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from aiflame.agent.devices.choice import AUTO, CHOICES
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.cost import Budget
from aiflame.agent.fleet.selection import Selection
from aiflame.agent.fleet.sinks import SINKS, sink_module
from aiflame.agent.limits import MAX_FREQUENCY_HZ
from aiflame.agent.settings import (
    Given,
    Kind,
    Refusals,
    Secret,
    Setting,
    made,
    plain,
    setting,
    settings_of,
    toml_lines,
    unknown_key,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VARIABLE_PREFIX = "AIFLAME_"
# What `aiflame query` and `aiflame store` read, whose shell may be the agent's, too.
_STORE_VARIABLES = frozenset({"AIFLAME_STORE", "AIFLAME_STORE_USER", "AIFLAME_STORE_PASSWORD"})
# How like another name one has to be: all have the prefix in common, and the names of services that
# Kubernetes makes (AIFLAME_SERVICE_HOST, AIFLAME_PORT_80_TCP) are no misspelt settings.
_NEAR = 0.85
_SINK_TABLE = "sinks"
# Where Kubernetes mounts what a pod's service account has.
_SECRETS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A configuration has some KB.
_MAX_FILE_BYTES = 1 << 20
# The process that names is told of it in one message, of 64 KB.
_MAX_TOLD_BYTES = 60_000

# A table, or a key and its sign; what may hide either in TOML v1.0.0 is a text of several lines.
_BARE_KEYS = r"[A-Za-z0-9_-]+(?:[ \t]*\.[ \t]*[A-Za-z0-9_-]+)*"
_TABLE_OR_KEY = re.compile(rf"[ \t]*(?:\[[ \t]*({_BARE_KEYS})[ \t]*\]|({_BARE_KEYS})[ \t]*=)")
_QUOTES = re.compile(r"\"{3}|'{3}")

# RFC 1035, 2.3.4, without lengths and the root's dot; resolvers take "_", too.
_MAX_HOST_NAME = 253
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")

# What holds a secret, of the agent and of sinks; Secret has its own.
_SECRET_FILES = ("token_file", "password_file", "key_file", "health_key_file")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What is not of one sink."""

    # Of other agents of fleets, it is the most common one; it beats with nothing that is periodic.
    frequency_hz: int = setting(
        Kind.COUNT, "samples a second of each CPU", 19, least=1, most=MAX_FREQUENCY_HZ
    )
    off_cpu: bool = setting(Kind.FLAG, "also record where threads wait", True)
    gpu: str = setting(Kind.TEXT, "devices, as `record --gpu` has them", AUTO, choices=CHOICES)
    inject: bool = setting(
        Kind.FLAG, "load helpers into processes that use the family that `gpu` names", True
    )
    gpu_duty_percent: float = setting(
        Kind.SHARE, "share of the time in which helpers sample stalls", 100.0, least=0.1, most=100
    )
    gpu_helper_directory: Path | None = setting(
        Kind.PATH,
        "where helpers are put for processes to load by themselves, as their environment says;"
        " nowhere by default",
        None,
    )
    directory: Path = setting(
        Kind.PATH, "where what was recorded is kept", Path("/var/lib/aiflame/agent")
    )
    # Longer ones spread over more samples what names of functions cost: 60 s take a seventh of the
    # bytes that 5 s do.
    stretch: float = setting(
        Kind.SECONDS, "length of what is sent at once", 60.0, least=5, most=600
    )
    keep: float = setting(
        Kind.SECONDS, "how much of the newest stays on disk", 600.0, least=0, most=86400
    )
    keep_size: int = setting(
        Kind.BYTES, "the most that it may take of the disk", 512 * 10**6, least=10**6
    )
    capture_length: float = setting(
        Kind.SECONDS,
        "the longest that `aiflame agent capture` may ask for; 0 for none at all",
        600.0,
        least=0,
        most=86400,
    )
    capture_size: int = setting(
        Kind.BYTES, "the largest capture that it makes", 10**9, least=10 * 10**6
    )
    spool_size: int = setting(
        Kind.BYTES, "the most that may wait for a sink that is away", 256 * 10**6, least=10**6
    )
    unwind_memory: int = setting(
        Kind.BYTES, "kernel memory for unwind tables", 256 * 10**6, least=0, most=1 << 40
    )
    # What it has on a quiet host; it grows with processes, and with code that is new.
    memory: int = setting(
        Kind.BYTES,
        "what all its processes may have for long: with more, less is kept",
        150 * 10**6,
        least=50 * 10**6,
    )
    # Besides what it shares with what it was forked from. A table of libtorch_cpu, 430 MB of file,
    # takes between 340 and 380 MB for two seconds, one of an interpreter 5 to 15.
    helper_memory: int = setting(
        Kind.BYTES,
        "what one that reads a file may have: files that need more are refused",
        512 * 10**6,
        least=128 * 10**6,
    )
    # The aim of the whole agent: what exact totals cost is not part of it.
    cost_host_percent: float = setting(
        Kind.SHARE, "what recording may cost, of all CPUs", 1.0, least=0.05, most=100
    )
    cost_cpu_percent: float = setting(
        Kind.SHARE, "the same, of one CPU, where that is more", 3.0, least=0.1, most=100
    )
    health: str = setting(
        Kind.TEXT, "address of /healthz, /readyz and /metrics; empty for none", "127.0.0.1:7575"
    )
    health_token: Secret | None = setting(
        Kind.SECRET, "what who asks there has to send as a bearer token", None
    )
    health_cert_file: Path | None = setting(
        Kind.PATH, "its certificate, which it needs with a token to be open to others", None
    )
    health_key_file: Path | None = setting(Kind.PATH, "the key of that", None)
    node: str = setting(Kind.TEXT, "this host's name in labels (default: its host name)", "")
    include: tuple[str, ...] = setting(
        Kind.RULES,
        "record only what one of these rules names: namespace=prod,container=web;unit=nginx*",
        (),
    )
    exclude: tuple[str, ...] = setting(Kind.RULES, "leave out what one of these rules names", ())
    pod_labels: tuple[str, ...] = setting(
        Kind.TEXTS, "labels and annotations of pods and containers to send, with wildcards", ()
    )
    service_annotation: str = setting(
        Kind.TEXT, "annotation of a pod that names its service", "aiflame/service"
    )
    kubelet: str = setting(
        Kind.TEXT, "address of this node's kubelet, which is asked for pods; none by default", ""
    )
    kubelet_port: int = setting(Kind.COUNT, "its port", 10250, least=1, most=65535)
    kubelet_token_file: Path = setting(
        Kind.PATH, "token of a service account, read anew for each request", _SECRETS / "token"
    )
    kubelet_ca_file: Path = setting(Kind.PATH, "whom to trust as the kubelet", _SECRETS / "ca.crt")
    kubelet_skip_verify: bool = setting(
        Kind.FLAG, "send the token to whoever answers there, whatever its certificate", False
    )

    @property
    def selection(self) -> Selection:
        """What is recorded.

        Raises:
            UsageError: A rule is none.
        """
        return Selection.parse(self.include, self.exclude)

    @property
    def health_address(self) -> tuple[str, int]:
        """Host and port of `health`.

        Raises:
            UsageError: It is none, or open to others without TLS and a token.
        """
        host, colon, port = self.health.rpartition(":")
        host = host.strip("[]")
        try:
            address = ipaddress.ip_address(host)
            number = int(port)
        except ValueError:
            colon = ""
        if not colon or not 0 <= number < 1 << 16:
            raise UsageError(f"health: not an address: {self.health}", "as in 127.0.0.1:7575")
        is_guarded = self.health_token and self.health_cert_file and self.health_key_file
        if not address.is_loopback and not is_guarded:
            raise UsageError(
                f"health: {self.health} is open to others",
                "set health_token_file, health_cert_file and health_key_file, or take 127.0.0.1",
            )
        return host, number

    def refuse_odd_kubelet(self) -> None:
        """Refuses what can be no host in `kubelet`.

        Raises:
            UsageError: It is none.
        """
        host = self.kubelet
        try:
            ipaddress.ip_address(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
        except ValueError:
            if host and not (len(host) <= _MAX_HOST_NAME and _HOST_NAME.fullmatch(host)):
                raise UsageError(
                    f"kubelet: not a host's name or address: {host[:_MAX_HOST_NAME]}",
                    "as in 10.0.0.1 or node-1.example; the port is `kubelet_port`",
                ) from None

    @property
    def budget(self) -> Budget:
        """What recording may cost."""
        return Budget(self.cost_host_percent / 100, self.cost_cpu_percent / 100)

    @property
    def node_name(self) -> str:
        """This host's name."""
        return self.node or platform.node() or "unknown"

    @property
    def period_ns(self) -> int:
        """Weight of one on-CPU sample."""
        return 1_000_000_000 // self.frequency_hz


# Cgroups that are left out in the kernel, 12 bytes each there; others where labels are made.
MOST_LEFT_OUT = 2048

# What is read once: programs are in the kernel, and files are where they are.
NEEDS_RESTART = (
    *("frequency_hz", "off_cpu", "gpu", "inject", "gpu_duty_percent", "directory"),
    "gpu_helper_directory",
    *("unwind_memory", "helper_memory", "cost_host_percent", "cost_cpu_percent"),
    *("health", "health_token", "health_cert_file", "health_key_file"),
)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """All of it.

    Attributes:
        agent: What is not of one sink.
        sinks: Settings of those that are on, by name.
        warnings: What is odd about it, a line each.
    """

    agent: AgentSettings
    sinks: Mapping[str, Any]
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON can hold it, with secrets: for `of_plain`."""
        sinks = {name: plain(settings) for name, settings in self.sinks.items()}
        return {**plain(self.agent), _SINK_TABLE: sinks}

    @classmethod
    def of_plain(cls, words: Mapping[str, Any]) -> AgentConfig:
        """Returns what `plain` was made of.

        Files that it names may be away just now: nothing but `load` reads them.

        Raises:
            UsageError: It is none that is allowed.
        """
        refusals = Refusals()
        return _checked(_flat(words, "the agent", refusals, {}), (), refusals, reads_secrets=False)

    def toml(self) -> str:
        """Returns it as a file would say it, with secrets masked."""
        lines = [*toml_lines(self.agent)]
        for name, settings in self.sinks.items():
            lines += ["", f"[{_SINK_TABLE}.{name}]", *toml_lines(settings)]
        return "\n".join(lines) + "\n"


def all_settings() -> Iterator[tuple[str, Setting]]:
    """Yields the keys that there are, those of sinks with their table: "sinks.captures.max_age"."""
    yield from settings_of(AgentSettings).items()
    for name in SINKS:
        for key, one in settings_of(sink_module(name).Settings).items():
            yield f"{_SINK_TABLE}.{name}.{key}", one


def flag_of(key: str) -> str:
    """Returns the flag for a key."""
    return "--" + key.replace(".", "-").replace("_", "-")


def variable_of(key: str) -> str:
    """Returns the variable of the environment for a key."""
    return _VARIABLE_PREFIX + key.replace(".", "_").upper()


def load(
    path: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> AgentConfig:
    """Reads the configuration.

    Args:
        path: Of the file, None for none.
        flags: What the command line says, by key.
        environment: Variables by name.

    Raises:
        UsageError: It cannot be read, or is none that is allowed: all that is wrong is told.
    """
    refusals = Refusals()
    given = _of_file(path, refusals) if path is not None else {}
    keys = dict(all_settings())
    for key in keys:
        variable = variable_of(key)
        if variable in environment:
            _lay_over(given, key, Given(environment[variable], variable))
    for key, value in flags.items():
        _lay_over(given, key, Given(value, flag_of(key)))
    known = {variable_of(key) for key in keys}
    # Kubernetes makes variables of the names of services: AIFLAME_SERVICE_HOST is one of these.
    odd = sorted(
        name
        for name in environment
        if name.startswith(_VARIABLE_PREFIX) and name not in known | _STORE_VARIABLES
    )
    warnings = [f"{name} is no setting, and is ignored{_meant(name, known)}" for name in odd]
    config = _checked(given, tuple(warnings), refusals)
    _refuse_exposed(config, given, path)
    size = len(json.dumps(config.plain()))
    if size > _MAX_TOLD_BYTES:
        raise UsageError(
            f"the configuration is too large: {size:,} bytes of {_MAX_TOLD_BYTES:,}",
            "say with fewer rules, or labels, what is recorded: '*' stands for what may differ",
        )
    return config


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, _NEAR)
    return f": did you mean {near[0]}?" if near else ""


def _refuse_exposed(config: AgentConfig, given: Mapping[str, Given], file: Path | None) -> None:
    """Refuses secrets that any user of this host can read.

    Those of a group are its own choice: Kubernetes gives files to one by fsGroup. Tokens of service
    accounts (`kubelet_token_file`) have the mode that the kubelet gives them.
    """
    refusals = Refusals()
    for prefix, settings in (
        ("", config.agent),
        *((f"{_SINK_TABLE}.{name}.", settings) for name, settings in config.sinks.items()),
    ):
        for each in fields(settings):
            value = getattr(settings, each.name)
            if isinstance(value, Secret):
                key = each.name if value.path is None else f"{each.name}_file"
                is_in_file = prefix + key in given and given[prefix + key].source == str(file)
                path = value.path or (file if is_in_file else None)
            else:
                key, path = each.name, value if each.name in _SECRET_FILES else None
            if path is not None and _is_for_all(path):
                refusals.add(
                    UsageError(
                        f"{prefix}{key}: all users of this host can read {path}",
                        f"chmod 600 {path}; of a volume in Kubernetes, set defaultMode: 0400",
                    )
                )
    refusals.tell()


def _is_for_all(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False  # whoever reads it says so


def _lay_over(given: dict[str, Given], key: str, one: Given) -> None:
    """Puts a value over what is there, and over what says the same in another way."""
    given.pop(key.removesuffix("_file") if key.endswith("_file") else f"{key}_file", None)
    given[key] = one


def _of_file(path: Path, refusals: Refusals) -> dict[str, Given]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_FILE_BYTES:,} bytes")
        words = tomllib.loads(data.decode())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also of 5,000 digits, or brackets
        raise UsageError(f"{path}: not TOML: {error}") from error
    return _flat(words, str(path), refusals, _lines_of_keys(data.decode()))


def _lines_of_keys(text: str) -> dict[str, int]:
    """Returns in which line of a TOML file a key or table is, as far as that is plain to see.

    The parser does not tell. Tables and keys are looked for that begin a line.
    """
    found: dict[str, int] = {}
    table = quotes = ""  # which are open, of a text of several lines
    for number, line in enumerate(text.split("\n"), 1):
        match = None if quotes else _TABLE_OR_KEY.match(line)
        if match is not None:
            words = [word.strip() for word in (match[1] or match[2]).split(".")]
            if match[1]:
                table = ".".join(words)
            found.setdefault(
                ".".join(words) if match[1] or not table else ".".join((table, *words)), number
            )
        for mark in _QUOTES.findall(line):
            quotes = mark if not quotes else "" if mark == quotes else quotes
    return found


def _flat(
    words: Mapping[str, Any], source: str, refusals: Refusals, lines: Mapping[str, int]
) -> dict[str, Given]:
    """Returns values by their keys with the tables that they are in."""
    given: dict[str, Given] = {}

    def at(key: str, value: Any = None) -> Given:
        return Given(value, source, lines.get(key, 0))

    for key, value in words.items():
        if key != _SINK_TABLE:
            given[key] = at(key, value)
            continue
        if not isinstance(value, dict):
            place = at(key).place
            refusals.add(UsageError(f"{place}: {key}: not a table of sinks: [{key}.captures]"))
            continue
        for name, settings in value.items():
            sink = f"{_SINK_TABLE}.{name}"
            if not isinstance(settings, dict):
                refusals.add(UsageError(f"{at(sink).place}: {sink}: not a table: [{sink}]"))
                continue
            if name not in SINKS:
                known = [f"{_SINK_TABLE}.{each}" for each in SINKS]
                refusals.add(unknown_key(sink, at(sink).place, known))
                continue
            given[f"{sink}."] = at(sink)  # on, also without a key
            for each, one in settings.items():
                given[f"{sink}.{each}"] = at(f"{sink}.{each}", one)
    return given


@contextmanager
def _placed(given: Mapping[str, Given], key: str) -> Iterator[None]:
    """Says of what is refused where the key is given that it is of."""
    try:
        yield
    except UsageError as error:
        if key not in given:
            raise
        words = str(error) if str(error).startswith(f"{key}: ") else f"{key}: {error}"
        raise UsageError(f"{given[key].place}: {words}", error.hint) from error


def _checked(
    given: Mapping[str, Given],
    warnings: tuple[str, ...],
    refusals: Refusals,
    *,
    reads_secrets: bool = True,
) -> AgentConfig:
    of_agent = {key: one for key, one in given.items() if not key.startswith(f"{_SINK_TABLE}.")}
    agent = AgentSettings()
    with refusals.taken():
        agent = made(AgentSettings, of_agent, reads_secrets=reads_secrets)
    with refusals.taken(), _placed(given, "include"):  # a bad rule is refused here
        Selection.parse(agent.include, ())
    with refusals.taken(), _placed(given, "exclude"):
        Selection.parse((), agent.exclude)
    with refusals.taken(), _placed(given, "health"):
        _ = agent.health and agent.health_address
    with refusals.taken(), _placed(given, "kubelet"):
        agent.refuse_odd_kubelet()
    sinks = {}
    for name in SINKS:
        prefix = f"{_SINK_TABLE}.{name}."
        of_sink = {k.removeprefix(prefix): one for k, one in given.items() if k.startswith(prefix)}
        if of_sink:
            of_sink.pop("", None)
            with refusals.taken():
                of = sink_module(name).Settings
                sinks[name] = made(of, of_sink, prefix, reads_secrets=reads_secrets)
    refusals.tell()
    return AgentConfig(agent, sinks, warnings)
