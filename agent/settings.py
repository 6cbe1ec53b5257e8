# SPDX-License-Identifier: Apache-2.0
"""Settings as data: who needs some declares a frozen dataclass, and values are checked here.

A field is a key of the configuration file, a flag and a variable of the environment at once. What
may be given for it `setting` says; else its type does, and the words are those of the docstring.
Each value knows where it came from, so that an error says what to change.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import json
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiflame.agent.errors import UsageError
from aiflame.agent.loopback import is_loopback

T = TypeVar("T")

# Tokens and passwords are some hundred bytes; a wrong file may be anything.
_MAX_SECRET_BYTES = 1 << 16
# Of a key that names the file in which a secret is.
_FILE_SUFFIX = "_file"
_MASK = "***"
# Of a wrong value, in an error: a line or two.
_MAX_SHOWN = 200
# The kernel has sizes of files and of disks as signed numbers of 64 bits.
_MAX_SIZE_BYTES = (1 << 63) - 1

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_SECONDS: dict[str | None, float] = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, None: 1}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?B?)")
_BYTES: dict[str | None, float] = {
    "": 1,
    "B": 1,
    "k": 10**3,
    "kB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
}
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# What TOML writes without quotes.
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Kind(enum.Enum):
    """What a value is, and how the text of a flag or variable says it."""

    TEXT = "a text"
    FLAG = "true or false"
    COUNT = "a whole number"
    SHARE = "a number"
    SECONDS = "a time: 30s, 10m, 24h"
    BYTES = "a size: 500kB, 64MB, 2GB"
    PATH = "an absolute path"
    URL = "a URL: http://HOST:PORT/PATH or https://..."
    TEXTS = "a list of texts"
    RULES = "rules: NAME=TEXT, conditions of one joined by commas, rules by semicolons"
    TABLE = "a table of texts: NAME=TEXT,NAME=TEXT"
    SECRET = "a secret text"  # noqa: S105 - it says what it is


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given, and where: "FILE", "--flag", "AIFLAME_NAME".

    Attributes:
        line: Of the file, from 1 on; 0 where it is not known.
    """

    value: Any
    source: str
    line: int = 0

    @property
    def place(self) -> str:
        """Where to change it, for messages."""
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Secret:
    """A token or password, or the file in which it is; never shown.

    Attributes:
        text: "" where it is in a file.
        path: Read each time, since tokens of services rotate.
    """

    text: str = ""
    path: Path | None = None

    def read(self) -> str:
        """Returns it.

        Raises:
            UsageError: Its file cannot be read, or holds none.
        """
        if self.path is None:
            return self.text
        try:
            with self.path.open("rb") as file:
                data = file.read(_MAX_SECRET_BYTES)
            text = data.decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(f"cannot read the secret in {self.path}: {reason}") from error
        if not text:
            raise UsageError(f"cannot read the secret in {self.path}: it is empty")
        return text

    def __repr__(self) -> str:
        return f"Secret({_MASK if self.path is None else str(self.path)})"


@dataclass(frozen=True, slots=True)
class Setting:
    """What may be given for a key.

    Attributes:
        kind: Of its values.
        words: What it is, for the help.
        least, most: Bounds of a number, both allowed.
        choices: Allowed texts, none for any.
    """

    kind: Kind
    words: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = self.kind.value
        if self.least is not None and self.most is not None:
            return f"{words}, from {self._shown(self.least)} to {self._shown(self.most)}"
        return words if self.least is None else f"{words}, at least {self._shown(self.least)}"

    def _shown(self, number: float) -> str:
        unit = {Kind.SECONDS: "s", Kind.BYTES: "B"}.get(self.kind, "")
        return f"{number:,g}{unit}" if number < 10**6 else f"{number:,.0f}{unit}"


def setting(
    kind: Kind,
    words: str,
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Declares a field of a frozen dataclass as a setting; without a default it has to be given.

    Values have these types: SECONDS float, BYTES int, TEXTS and RULES a tuple of str, TABLE a tuple
    of pairs of str, SECRET `Secret | None`, PATH and URL as their names say or None where the
    default is.
    """
    metadata = {"setting": Setting(kind, words, least, most, tuple(choices))}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(cls: type[Any]) -> dict[str, Setting]:
    """Returns the settings that a class declares, by key: those of files with secrets as well."""
    found: dict[str, Setting] = {}
    for name, one in _declared(cls).items():
        found[name] = one
        if one.kind is Kind.SECRET:
            words = f"the file that holds: {one.words}"
            found[name + _FILE_SUFFIX] = Setting(Kind.PATH, words)
    return found


# Of fields that only have a type.
_KIND_OF_TYPE: dict[Any, Kind] = {
    str: Kind.TEXT,
    bool: Kind.FLAG,
    int: Kind.COUNT,
    float: Kind.SHARE,
    Path: Kind.PATH,
    tuple[str, ...]: Kind.TEXTS,
    tuple[tuple[str, str], ...]: Kind.TABLE,
    Secret: Kind.SECRET,
}
_KIND_OF_NAME = {"url": Kind.URL}


def _declared(cls: type[Any]) -> dict[str, Setting]:
    """Returns what may be given for each field."""
    found = {}
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "setting" in field.metadata:
            found[field.name] = field.metadata["setting"]
            continue
        type_ = types[field.name]
        of_any = [each for each in typing.get_args(type_) if each is not type(None)]
        is_optional = type(None) in typing.get_args(type_)
        kind = _KIND_OF_NAME.get(field.name, _KIND_OF_TYPE[of_any[0] if is_optional else type_])
        found[field.name] = Setting(kind, _words_of(cls, field.name))
    return found


def _words_of(cls: type[Any], name: str) -> str:
    """Returns what the docstrings of a class say of an attribute, up to its first full stop."""
    for each in cls.__mro__:
        text = inspect.cleandoc(each.__doc__ or "")
        match = re.search(rf"^ +{name}: (.*(?:\n {{8,}}.*)*)", text, re.M)
        if match is not None:
            return " ".join(match[1].split()).partition(". ")[0].rstrip(".")
    return name


class Refusals:
    """What is refused of a configuration: all of it is told, not only what comes first."""

    def __init__(self) -> None:
        self._errors: list[UsageError] = []

    def add(self, error: UsageError) -> None:
        """Takes one, or those that another one of these has raised."""
        self._errors += error.errors if isinstance(error, _Several) else [error]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes what is raised inside."""
        try:
            yield
        except UsageError as error:
            self.add(error)

    def tell(self) -> None:
        """Raises UsageError where there is any."""
        if len(self._errors) > 1:
            raise _Several(self._errors)
        if self._errors:
            raise self._errors[0]


class _Several(UsageError):
    """Several errors, a line each."""

    def __init__(self, errors: Sequence[UsageError]) -> None:
        lines = (f"  {error}" + (f" ({error.hint})" if error.hint else "") for error in errors)
        super().__init__("\n".join((f"{len(errors)} settings are refused:", *lines)))
        self.errors = [*errors]


def made(
    cls: type[T], given: Mapping[str, Given], prefix: str = "", *, reads_secrets: bool = True
) -> T:
    """Makes settings of what was given.

    Args:
        cls: As `settings_of` takes it.
        given: By key.
        prefix: Of the keys in messages: "sinks.pyroscope.".
        reads_secrets: A file with a secret that cannot be read is refused now, not when it is used.

    Raises:
        UsageError: A key is unknown or missing, or a value is none that is allowed. The message
            names the key, where it came from, and what is allowed; of all that is wrong.
    """
    declared = settings_of(cls)
    refusals = Refusals()
    for key, value in given.items():
        if key not in declared:
            known = [prefix + each for each in declared]
            refusals.add(unknown_key(prefix + key, value.place, known))
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        key, one = field.name, declared[field.name]
        file_key = key + _FILE_SUFFIX
        with refusals.taken():
            if one.kind is Kind.SECRET and file_key in given:
                secret = _secret_in_file(declared[file_key], given, key, prefix)
                if reads_secrets:
                    _read_once(secret, given[file_key].place, prefix + file_key)
                values[key] = secret
            elif key in given:
                values[key] = _value(one, given[key], prefix + key)
            elif field.default is dataclasses.MISSING:
                raise UsageError(
                    f"{prefix}{key} is missing: {one.words}", f"give {prefix}{key}: {one.allowed}"
                )
    refusals.tell()
    found = cls(**values)
    _refuse_open_secrets(cls, found, given, prefix)
    return found


def _secret_in_file(one: Setting, given: Mapping[str, Given], key: str, prefix: str) -> Secret:
    file_key = key + _FILE_SUFFIX
    source = given[file_key].place
    if key in given:
        raise UsageError(f"{source}: {prefix}{file_key}: {prefix}{key} is given as well")
    return Secret(path=_value(one, given[file_key], prefix + file_key))


def _read_once(secret: Secret, source: str, key: str) -> None:
    try:
        secret.read()
    except UsageError as error:
        raise UsageError(f"{source}: {key}: {error}") from error


def unknown_key(key: str, source: str, known: Sequence[str]) -> UsageError:
    """Returns what to say of a key that there is not."""
    near = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(sorted(known))}"
    return UsageError(f"{source}: {key}: no such setting", hint)


def _value(one: Setting, given: Given, key: str) -> Any:
    try:
        value = _parsed(one, given.value)
        number = value if isinstance(value, (int, float)) else None
        is_low = number is not None and one.least is not None and number < one.least
        is_high = number is not None and one.most is not None and number > one.most
        if is_low or is_high or (one.choices and value not in one.choices):
            raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError):
        shown = _MASK if one.kind is Kind.SECRET else _shown(given.value)
        raise UsageError(f"{given.place}: {key}: not {one.allowed}: {shown}") from None
    return value


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_MAX_SHOWN]
    except (ValueError, RecursionError):  # thousands of digits, or of tables in one another
        return "what is too large to be shown"


def _parsed(one: Setting, value: Any) -> Any:
    kind = one.kind
    if kind is Kind.FLAG:
        return value if isinstance(value, bool) else _FLAGS[_text(value).lower()]
    if isinstance(value, bool):  # which Python takes for a number
        raise ValueError
    if kind is Kind.COUNT:
        if isinstance(value, float):
            raise ValueError
        return int(value)
    if kind is Kind.SHARE:
        return _finite(float(value))
    if kind is Kind.SECONDS:
        return _finite(_scaled(_TIME, _SECONDS, value))
    if kind is Kind.BYTES:
        size_bytes = round(_scaled(_SIZE, _BYTES, value))
        if size_bytes > _MAX_SIZE_BYTES:
            raise ValueError
        return size_bytes
    if kind is Kind.TEXTS:
        words = value.split(",") if isinstance(value, str) else _listed(value)
        return tuple(_text(word) for word in words if word != "")
    if kind is Kind.RULES:
        words = [value] if isinstance(value, str) else _listed(value)
        rules = (rule.strip() for word in words for rule in _text(word).split(";"))
        return tuple(rule for rule in rules if rule)
    if kind is Kind.TABLE:
        return _table(value)
    text = _text(value)
    if kind is Kind.PATH:
        if not text.startswith("/"):
            raise ValueError
        return Path(text)
    if kind is Kind.URL:
        parts = urlsplit(text)
        # What is in a URL is logged: secrets have settings of their own.
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError
        _ = parts.port  # ValueError of one that is none
        return text
    if kind is Kind.SECRET:
        return Secret(text)
    return text


def _scaled(pattern: re.Pattern[str], units: Mapping[str | None, float], value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    match = pattern.fullmatch(_text(value).strip())
    if match is None:
        raise ValueError
    return float(match[1]) * units[match[2]]


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():  # no header of two lines
        raise ValueError
    return value


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError
    return value


def _table(value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair]
        if not all(name and sign for name, sign, _ in pairs):
            raise ValueError
        return tuple((_text(name.strip()), _text(text.strip())) for name, _, text in pairs)
    if not isinstance(value, dict):
        raise ValueError
    return tuple((_text(name), _text(text)) for name, text in value.items())


def _refuse_open_secrets(
    cls: type[Any], found: object, given: Mapping[str, Given], prefix: str
) -> None:
    """Refuses to send a secret over a connection that others can read."""
    fields = _declared(cls).items()
    secret = next(
        (k for k, one in fields if one.kind is Kind.SECRET and getattr(found, k) is not None), None
    )
    for key, one in fields:
        url = getattr(found, key)
        if secret is None or one.kind is not Kind.URL or url is None or not _is_open(url):
            continue
        source = given[key].place if key in given else "the default"
        raise UsageError(
            f"{source}: {prefix}{key}: {prefix}{secret} would go over plain HTTP to {url}",
            "use https://, or a URL of this host",
        )


def _is_open(url: str) -> bool:
    """Whether others on the way can read what is sent."""
    parts = urlsplit(url)
    return parts.scheme != "https" and not is_loopback(parts.hostname or "")


def plain(settings: Any) -> dict[str, Any]:
    """Returns settings as JSON and TOML can hold them, with their secrets: `made` takes them."""
    found: dict[str, Any] = {}
    declared = _declared(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None or value == ():
            continue
        if isinstance(value, Secret):
            if value.path is None:
                found[field.name] = value.text
            else:
                found[field.name + _FILE_SUFFIX] = str(value.path)
        elif declared[field.name].kind is Kind.TABLE:
            found[field.name] = dict(value)
        elif isinstance(value, tuple):
            found[field.name] = list(value)
        else:
            found[field.name] = str(value) if isinstance(value, Path) else value
    return found


def toml_lines(settings: Any) -> Iterator[str]:
    """Yields the lines of a TOML table that say the same, with secrets masked."""
    kinds = settings_of(type(settings))
    for key, value in plain(settings).items():
        yield f"{key} = {_toml(_MASK if kinds[key].kind is Kind.SECRET else value)}"


def _toml(value: Any) -> str:
    """Returns a value in TOML v1.0.0; its basic strings have the escapes of JSON."""
    if isinstance(value, dict):
        pairs = (f"{_toml_key(key)} = {_toml(text)}" for key, text in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)
