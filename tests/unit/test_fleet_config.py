# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: where values come from, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.cli import main
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet.config import AgentConfig, load
from aiflame.agent.settings import (
    Given,
    Kind,
    Secret,
    made,
    plain,
    setting,
    settings_of,
    toml_lines,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class _Backend:
    url: str = setting(Kind.URL, "where to")
    token: Secret | None = setting(Kind.SECRET, "who we are", None)
    headers: tuple[tuple[str, str], ...] = setting(Kind.TABLE, "headers", ())
    timeout: float = setting(Kind.SECONDS, "how long", 10.0, least=1, most=60)


def _loaded(tmp_path: Path, text: str, flags: Any = None, environment: Any = None) -> AgentConfig:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return load(path, flags or {}, environment or {})


def _backend(**given: Any) -> _Backend:
    return made(_Backend, {key: Given(value, "a.toml") for key, value in given.items()}, "sinks.b.")


def test_flags_go_over_variables_and_these_over_the_file(tmp_path: Path) -> None:
    # GIVEN a file that says three things, a variable that says two, and a flag
    text = 'frequency_hz = 49\nstretch = "30s"\nkeep_size = "64MB"\n'
    environment = {"AIFLAME_STRETCH": "2m", "AIFLAME_FREQUENCY_HZ": "29"}
    # WHEN they are read
    config = _loaded(tmp_path, text, {"frequency_hz": "99"}, environment)
    # THEN each has its place, and the rest is as it is by default.
    assert config.agent.frequency_hz == 99
    assert config.agent.stretch == 120.0
    assert config.agent.keep_size == 64_000_000
    assert config.agent.keep == 600.0
    assert config.sinks == {}


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ("namespace=a,pod=b", ("namespace=a,pod=b",)),
        ("namespace=a,pod=b; unit=c*;", ("namespace=a,pod=b", "unit=c*")),
    ],
)
def test_a_rule_means_the_same_wherever_it_is_given(
    tmp_path: Path, given: str, rules: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _loaded(tmp_path, f'exclude = "{given}"').agent.exclude == rules
    assert _loaded(tmp_path, f'exclude = ["{given}"]').agent.exclude == rules
    assert _loaded(tmp_path, "", environment={"AIFLAME_EXCLUDE": given}).agent.exclude == rules
    # AND a flag that is given twice is a rule more, as an item of a list is
    more = (*rules, "unit=d")
    assert _loaded(tmp_path, f'exclude = ["{given}", "unit=d"]').agent.exclude == more
    assert main(["agent", "--check-config", "--exclude", given, "--exclude", "unit=d"]) == 0
    assert f"exclude = {json.dumps([*more])}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        'health_token_file = "{}"',
        'health_key_file = "{}"',
        '[sinks.otlp]\nurl = "https://h"\ntoken_file = "{}"',
        '[sinks.clickhouse]\nurl = "https://h"\nuser = "u"\npassword_file = "{}"',
        '[sinks.otlp]\nurl = "https://h"\ncert_file = "/cert.pem"\nkey_file = "{}"',
    ],
)
def test_a_secret_that_all_can_read_is_refused(tmp_path: Path, words: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    with pytest.raises(UsageError, match=r"_file: all users of this host can read") as refusal:
        _loaded(tmp_path, words.format(secret))
    assert "s3cret" not in str(refusal.value) and "chmod 600" in str(refusal.value.hint)
    # AND one that is its group's, as volumes of Kubernetes may be, or our own, is taken
    for mode in 0o640, 0o400:
        secret.chmod(mode)
        assert _loaded(tmp_path, words.format(secret)) is not None


def test_a_file_with_a_secret_in_it_is_not_for_all(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('health_token = "s3cret"')
    path.chmod(0o644)
    with pytest.raises(UsageError, match="health_token: all users of this host can read"):
        load(path, {}, {})
    # AND without one it may be, as a ConfigMap is
    path.write_text("stretch = 10")
    assert load(path, {}, {}).agent.stretch == 10
    path.write_text('health_token = "s3cret"')
    path.chmod(0o600)
    assert load(path, {}, {}).agent.health_token is not None


def test_all_that_is_wrong_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(
        "frequncy_hz = 19\nkeep_size = true\nexclude = 'nonsense'\n[sinks.otlb]\nurl = 'x'\n"
        "[sinks.otlp]\nurl = 'ftp://h'\n[sinks.captures]\ndirectroy = '/x'\n"
    )
    assert main(["agent", "--config", str(path), "--stretch", "1s", "--check-config"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("aiflame: 7 settings are refused:\n")
    for words in (
        f"{path}:1: frequncy_hz: no such setting (did you mean frequency_hz?)",
        f"{path}:2: keep_size: not a size",
        "--stretch: stretch: not a time",
        f"{path}:4: sinks.otlb: no such setting (did you mean sinks.otlp?)",
        f"{path}:7: sinks.otlp.url: not a URL",
        f"{path}:9: sinks.captures.directroy: no such setting (did you mean sinks.captures.",
        "sinks.captures.directory is missing",
    ):
        assert f"\n  {words}" in said, words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n# keep = 1\n  keep = 'x'\n", ":3: keep: "),
        ("keep = 1\n[sinks . otlp]\nurl = 'ftp://h'\n", ":3: sinks.otlp.url: "),
        ("sinks.otlp.url = 'http://h'\nsinks.otlp.odd = 1\n", ":2: sinks.otlp.odd: "),
        ("[sinks]\n\notlp.url = 'ftp://h'\n", ":3: sinks.otlp.url: "),
        ('node = """a\nkeep = 5\n"""\nkeep = \'x\'\n', ":4: keep: "),
        ("include = [\n  'unit=a',\n  'odd=b',\n]\n", ":1: include: a rule about 'odd'"),
        ("keep = 1\nexclude = 'odd'\n", ":2: exclude: "),
        ("keep = 1\nhealth = 'odd'\n", ":2: health: not an address"),
        ("keep = 1\nkubelet = 'a b'\n", ":2: kubelet: not a host's name"),
        # Where it is not plain to see, no line is told, and no wrong one.
        ("keep = 1\nsinks = { otlp = { url = 'ftp://h' } }\n", ": sinks.otlp.url: "),
        ("keep = 1\n\"\\u006dode\" = 'x'\n", ": mode: no such setting"),
    ],
)
def test_an_error_tells_the_line_of_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(path, {}, {})
    assert f"{path}{said}" in str(caught.value)


def test_the_lines_of_a_file_of_many_brackets_are_found_at_once(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    text = "node = '" + "a." * 200_000 + "'\n" + "#[a" + " . a" * 100_000 + "\n"
    path.write_text(f"{text}keep = 'x'\n")
    begun_s = time.process_time()
    with pytest.raises(UsageError, match=":3: keep: "):
        load(path, {}, {})
    assert time.process_time() - begun_s < 2


def test_a_secret_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ["--health-token", "s3cret"], ["--health-token=s3cret"]:
        assert main(["agent", "--check-config", *given]) == 2
        said = capsys.readouterr().err
        assert "--health-token-file" in said and "s3cret" not in said


def test_a_sink_is_on_once_something_is_said_of_it(tmp_path: Path) -> None:
    text = f'[sinks.captures]\ndirectory = "{tmp_path}"\n'
    by_file = _loaded(tmp_path, text)
    by_variable = load(None, {}, {"AIFLAME_SINKS_CAPTURES_DIRECTORY": str(tmp_path)})
    by_flag = load(None, {"sinks.captures.directory": str(tmp_path)}, {})
    assert by_file.sinks["captures"].directory == tmp_path
    assert by_file == by_variable == by_flag


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("frequenzy_hz = 9", ["agent.toml", "frequenzy_hz", "no such setting"]),
        ("frequency_hz = 0", ["agent.toml", "frequency_hz", "from 1 to 100,000", "0"]),
        ("frequency_hz = true", ["frequency_hz", "a whole number"]),
        ("frequency_hz = 19.5", ["frequency_hz", "a whole number"]),
        ('off_cpu = "perhaps"', ["off_cpu", "true or false"]),
        ('gpu = "voodoo"', ["gpu", "one of auto, none"]),
        ('stretch = "soon"', ["stretch", "a time", "from 5s to 600s"]),
        ("stretch = nan", ["stretch"]),
        ('keep_size = "many"', ["keep_size", "a size"]),
        ('directory = "here"', ["directory", "an absolute path"]),
        ("[sinks]\ncaptures = 1", ["sinks.captures", "not a table"]),
        ("sinks = 1", ["sinks", "not a table"]),
        ("[sinks.floppy]\na = 1", ["sinks.floppy", "no such setting"]),
        ("[sinks.captures]\nsize = 1", ["sinks.captures.size", "no such setting"]),
        ("[sinks.captures]", ["sinks.captures.directory", "is missing"]),
        ('node = "a\\nb"', ["node", "a text"]),
        ("frequency_hz =", ["agent.toml", "not TOML"]),
    ],
)
def test_what_is_wrong_is_named_with_its_source(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        _loaded(tmp_path, text)
    said = f"{caught.value}"
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    "host", ["a..b", "x" * 64, ".", "bad host", "https://10.0.0.1:10250", "10.0.0.1:10250", "a,b"]
)
def test_an_address_of_a_kubelet_is_a_host(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="kubelet: not a host's name or address: "):
        _loaded(tmp_path, f'kubelet = "{host}"')


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "fd00::1", "[fd00::1]", "node-1", "ip-10-0-0-1.ec2.internal", "a_b.c."]
)
def test_hosts_of_all_forms_are_taken_for_a_kubelet(tmp_path: Path, host: str) -> None:
    assert _loaded(tmp_path, f'kubelet = "{host}"').agent.kubelet == host


def test_the_variable_or_flag_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^AIFLAME_FREQUENCY_HZ: frequency_hz: not a whole"):
        load(None, {}, {"AIFLAME_FREQUENCY_HZ": "fast"})
    with pytest.raises(UsageError, match=r"^--sinks-captures-max-age: sinks\.captures\.max_age"):
        load(None, {"sinks.captures.max_age": "old", "sinks.captures.directory": "/x"}, {})


def test_names_that_kubernetes_makes_are_no_error() -> None:
    # GIVEN such a name, and one that `aiflame query` reads
    environment = {"AIFLAME_SERVICE_HOST": "10.0.0.1", "AIFLAME_STORE": "fleet", "HOME": "/root"}
    config = load(None, {}, environment)
    assert config.warnings == ("AIFLAME_SERVICE_HOST is no setting, and is ignored",)
    # AND one that is misspelt is told what it may be
    (warning,) = load(None, {}, {"AIFLAME_FREQUNCY_HZ": "9"}).warnings
    assert warning.endswith("ignored: did you mean AIFLAME_FREQUENCY_HZ?")


def test_the_check_prints_what_it_read_and_ends_with_0_or_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'stretch = 30\n[sinks.captures]\ndirectory = "{tmp_path}"\n')
    arguments = ["agent", "--config", str(path), "--check-config", "--frequency-hz", "49"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    # THEN what is printed is a file that says the same.
    assert _loaded(tmp_path, shown) == load(path, {"frequency_hz": "49"}, {})
    path.write_text("stretch = 1")
    assert main(arguments) == 2
    assert "stretch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('directory = "{folder}/file/data"', "directory: {folder}/file/data cannot be made: "),
        ('directory = "{folder}/open"', "directory: others may write to {folder}/open"),
        ('gpu_helper_directory = "{folder}/open"', "files into {folder}/open"),
        ('gpu_helper_directory = "{folder}/a/b"', "no such directory: {folder}/a"),
        ('gpu_helper_directory = "{folder}/closed"', "not everybody may read {folder}/closed"),
        ('directory = "{folder}/closed"', ""),
        ('directory = "{folder}/a/b/c"', ""),
        ('gpu_helper_directory = "{folder}/helpers"', ""),
    ],
)
def test_the_check_refuses_directories_with_which_no_agent_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "file").touch()
    for name, mode in (("open", 0o777), ("closed", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    path = tmp_path / "agent.toml"
    path.write_text(text.format(folder=tmp_path))
    before = {*tmp_path.rglob("*")}
    assert main(["agent", "--config", str(path), "--check-config"]) == (2 if said else 0)
    assert said.format(folder=tmp_path) in capsys.readouterr().err
    assert {*tmp_path.rglob("*")} == before  # it only looks


@pytest.mark.parametrize(
    ("health", "file", "said"),
    [
        ("127.0.0.1:7575", "file", "warning: health_cert_file: [SSL"),
        ("127.0.0.1:7575", "none", "warning: health_cert_file: [Errno 2] No such file"),
        ("", "none", ""),
    ],
)
def test_the_check_warns_of_a_certificate_without_which_there_is_no_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], health: str, file: str, said: str
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "agent.toml"
    path.write_text(f'health = "{health}"\nhealth_cert_file = "{tmp_path / file}"')
    # It is no reason not to record: a unit that checks before it starts would not.
    assert main(["agent", "--config", str(path), "--check-config"]) == 0
    assert said in (told := capsys.readouterr().err)
    assert said or not told


def test_what_is_handed_on_is_the_same(tmp_path: Path) -> None:
    text = f'node = "n\\"1"\n[sinks.captures]\ndirectory = "{tmp_path}"\nmax_size = "5GB"\n'
    config = _loaded(tmp_path, text)
    assert AgentConfig.of_plain(json.loads(json.dumps(config.plain()))) == config


def test_secrets_are_read_from_files_and_never_shown(tmp_path: Path) -> None:
    # GIVEN a token in a file, and one in the configuration
    path = tmp_path / "token"
    path.write_text("t0k3n\n")
    in_file = _backend(url="https://b.example", token_file=str(path))
    in_text = _backend(url="https://b.example", token="t0k3n", headers={"X-A b": "c"})
    assert in_file.token is not None and in_text.token is not None
    assert in_file.token.read() == in_text.token.read() == "t0k3n"
    # WHEN the file changes, as tokens of services do
    path.write_text("n3w")
    # THEN the new one is used,
    assert in_file.token.read() == "n3w"
    # AND nothing that is printed has either.
    shown = "\n".join([*toml_lines(in_file), *toml_lines(in_text), repr(in_file), repr(in_text)])
    assert "t0k3n" not in shown and "n3w" not in shown
    assert f'token_file = "{path}"' in shown and 'token = "***"' in shown
    assert '"X-A b" = "c"' in shown
    # BUT who has to send it gets it.
    assert plain(in_text)["token"] == "t0k3n"


def test_a_wrong_secret_is_not_shown_either() -> None:
    with pytest.raises(UsageError) as caught:
        _backend(url="https://b.example", token=["s3cret"])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"  \n", b"\xff\xfe"])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.toml: sinks\.b\.token_file: cannot read"):
        _backend(url="https://b.example", token_file=str(path))


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("https://b.example:443/x", False),
        ("http://127.0.0.1:4040", False),
        ("http://[::1]:4040", False),
        ("http://localhost:4040", False),
        ("http://b.example:4040", True),
        ("http://127.0.0.1.example", True),
        ("http://10.0.0.1", True),
    ],
)
def test_no_secret_goes_over_plain_http_but_on_this_host(url: str, is_open: bool) -> None:
    assert _backend(url=url).url == url
    if not is_open:
        assert _backend(url=url, token="t").url == url
        return
    with pytest.raises(UsageError, match=r"a\.toml: sinks\.b\.url: .*plain HTTP"):
        _backend(url=url, token="t")


@pytest.mark.parametrize(
    "url", ["ftp://b", "b.example:80", "https://", "https://u:p@b", "http://b:x"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="a URL"):
        _backend(url=url)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("text", ["0x" + "f" * 5000, "{ a" + ".a" * 3000 + " = 1 }"], ids=len)
def test_what_python_cannot_show_is_refused_in_words(text: str, kind: Kind) -> None:
    one = dataclasses.make_dataclass("_One", [("key", Any, setting(kind, "one", most=10**6))])
    given = {"key": Given(tomllib.loads(f"a = {text}")["a"], "a.toml")}
    with pytest.raises(UsageError) as caught:
        made(one, given)
    assert str(caught.value).startswith(f"a.toml: key: not {kind.value}")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["stretch = " + "9" * 5000, "stretch = " + "[" * 5000])
def test_a_file_that_is_too_much_for_its_parser_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"agent\.toml: not TOML: "):
        _loaded(tmp_path, text)


@pytest.mark.parametrize("bound", ["keep_size", "capture_size", "memory", "helper_memory"])
def test_no_size_is_larger_than_files_can_be(tmp_path: Path, bound: str) -> None:
    with pytest.raises(UsageError, match=f"{bound}: not a size"):
        _loaded(tmp_path, f"{bound} = {10**400}")


@dataclass(frozen=True, kw_only=True)
class _Base:
    """What all have.

    Attributes:
        url: Where to. Nothing else.
        token_file: A file with a token, which
            is read each time.
    """

    url: str
    token_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class _Typed(_Base):
    """What one has."""

    labels: tuple[str, ...] = ("node",)
    insecure: bool = False
    timeout_s: float = 10.0


def test_a_sink_may_declare_its_keys_by_their_types() -> None:
    declared = settings_of(_Typed)
    assert {key: one.kind for key, one in declared.items()} == {
        "url": Kind.URL,
        "token_file": Kind.PATH,
        "labels": Kind.TEXTS,
        "insecure": Kind.FLAG,
        "timeout_s": Kind.SHARE,
    }
    assert declared["url"].words == "Where to"
    assert declared["token_file"].words == "A file with a token, which is read each time"
    given = {
        "url": Given("http://h", "--a"),
        "token_file": Given("/run/token", "--b"),
        "labels": Given("node,pod", "--c"),
        "insecure": Given("yes", "--d"),
    }
    made_so = made(_Typed, given)
    assert made_so == _Typed(
        url="http://h", token_file=Path("/run/token"), labels=("node", "pod"), insecure=True
    )
    with pytest.raises(UsageError, match=r"--a: url: not a URL"):
        made(_Typed, {"url": Given("h", "--a")})


# What tomllib makes of each type of TOML, and of numbers at their ends.
_TOML_VALUES = {
    "true": "bool",
    "1": "number",
    "-1": "number",
    f"1{'0' * 400}": "number",
    "1.5": "number",
    "inf": "number",
    "nan": "number",
    '""': "text",
    '"5s"': "text",
    '"\\u0000"': "text",
    '["5s"]': "list",
    "[1]": "list",
    "[[]]": "list",
    "{ a = 1 }": "table",
    '{ a = "b" }': "table",
    "2026-01-01": "date",
    "12:00:00": "date",
    "2026-01-01T12:00:00Z": "date",
}
# Of which of them values of a kind may be.
_TAKEN = {
    Kind.FLAG: {"bool", "text"},
    Kind.COUNT: {"number", "text"},
    Kind.SHARE: {"number", "text"},
    Kind.SECONDS: {"number", "text"},
    Kind.BYTES: {"number", "text"},
    Kind.TEXTS: {"text", "list"},
    Kind.RULES: {"text", "list"},
    Kind.TABLE: {"text", "table"},
}


@pytest.mark.parametrize("value", _TOML_VALUES)
@pytest.mark.parametrize("kind", Kind)
def test_a_value_of_another_type_is_refused_with_words(
    tmp_path: Path, kind: Kind, value: str
) -> None:
    # GIVEN a key of each kind, and a value of each type
    @dataclass(frozen=True)
    class Settings:
        key: Any = setting(kind, "something")

    given = tomllib.loads(f"key = {value}")["key"]
    # WHEN that is given
    try:
        made(Settings, {"key": Given(given, "a.toml")})
    except UsageError as error:
        # THEN it is refused in words,
        assert f"a.toml: key: not {kind.value}: " in str(error)
    else:
        # or it is of a type that there is a meaning for.
        assert _TOML_VALUES[value] in _TAKEN.get(kind, {"text"})


def test_a_configuration_that_cannot_be_told_to_its_processes_is_refused(tmp_path: Path) -> None:
    rules = ", ".join(f'"container=job-{number}-of-the-night"' for number in range(3000))
    with pytest.raises(UsageError, match="too large") as refused:
        _loaded(tmp_path, f"exclude = [{rules}]\n")
    assert "fewer rules" in str(refused.value.hint)
