# SPDX-License-Identifier: Apache-2.0
"""Which parts of command lines are masked, and how long that takes."""

from __future__ import annotations

import random
import shlex
import time

import pytest
from aiflame.agent.processes.procfs import joined_arguments
from aiflame.agent.redaction import redacted

_TOKEN = "Zq9x7Lw2"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("serve --token Zq9x7Lw2 --port 80", "serve --token *** --port 80"),
        ("serve --password=Zq9x7Lw2 -v", "serve --password=*** -v"),
        ("serve --db-password='Zq9x7Lw2 two words' -v", "serve --db-password=*** -v"),
        ("serve --api-key 'Zq9x7Lw2 two words' -v", "serve --api-key *** -v"),
        ("env HF_TOKEN=Zq9x7Lw2 python a.py", "env HF_TOKEN=*** python a.py"),
        ("env dbPassword=Zq9x7Lw2&=,;x", "env dbPassword=***"),
        ("java -Djavax.net.ssl.keyStorePassword=Zq9x7Lw2 A", None),
        ("java --set a=1,auth.secret=Zq9x7Lw2,b=2", "java --set a=1,auth.secret=***"),
        ("psql postgres://app:Zq9x7Lw2@db:5432/x", "psql postgres://***@db:5432/x"),
        ("git clone https://Zq9x7Lw2@github.com/a/b", "git clone https://***@github.com/a/b"),
        (
            "curl https://h/x?a=1&access_token=Zq9x7Lw2&b=2",
            "curl https://h/x?a=1&access_token=***&b=2",
        ),
        ("curl -H 'Authorization: Bearer Zq9x7Lw2' h", "curl -H Authorization: Bearer *** h"),
        ("curl -H 'X-Api-Key: Zq9x7Lw2' h", "curl -H X-Api-Key: *** h"),
        ("curl -H Authorization:Zq9x7Lw2 h", "curl -H Authorization:*** h"),
        ("""a '{"user": "x", "password": "Zq9x7Lw2"}'""", None),
        ("""a '{"password":"Zq9x7Lw2"}'""", None),
        ("sh -c 'mysql --password Zq9x7Lw2 db'", "sh -c mysql --password *** db"),
        ("aws configure set x AKIAZQ9X7LW2ZQ9X7LW2", "aws configure set x ***"),
        ("login ghp_Zq9x7Lw2Zq9x7Lw2Zq9x7Lw2", "login ***"),
        ("login hf_Zq9x7Lw2Zq9x7Lw2Zq9x7Lw2", "login ***"),
        ("call --jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIx.Zq9x7Lw2", "call --jwt ***"),
        ("ssh-add '-----BEGIN RSA PRIVATE KEY-----\nZq9x7Lw2\n'", "ssh-add ***"),
    ],
)
def test_secrets_are_masked(given: str, left: str | None) -> None:
    found = " ".join(redacted(shlex.split(given.replace("&", r"\&"))))
    assert _TOKEN not in found and "***" in found
    assert left is None or found == left
    # AND the same where a process has written its title, which is one text
    title = joined_arguments(given.replace("'", "").encode())
    assert _TOKEN not in title


@pytest.mark.parametrize(
    "given",
    [
        "python -u train.py --tokenizer llama --max-tokens 512 --max_new_tokens=128",
        "serve --token-file /run/secret --password-file=/etc/x --port 80",
        "aiflame agent --config /etc/aiflame/agent.toml --health-token-file /etc/aiflame/token",
        "curl http://[::1]:8080/a:b?q=x&page=2",
        "/usr/bin/redis-server 127.0.0.1:6379",
        "docker run -v /a:/b:ro image:tag",
        "",
        "  two  spaces ",
    ],
)
def test_all_else_stays_as_it_is(given: str) -> None:
    assert redacted(given.split(" ")) == given.split(" ")
    assert redacted([given]) == [given]


def test_arguments_of_a_process_are_masked() -> None:
    raw = b"serve\0--token\0Zq9x7Lw2\0URL=http://a:b@h/\0"
    assert joined_arguments(raw) == "serve --token *** URL=http://***@h/"
    assert joined_arguments(b"") == ""
    assert joined_arguments(b"\xff\xfe--token\0\xff") != ""


def test_hostile_command_lines_take_no_longer_than_others() -> None:
    # GIVEN texts that patterns like these have taken minutes for, and such by chance
    parts = ["://", "eyJ", "sk-", "a", "=", ":", "&", "?", " ", "\0", "key", "@", '"', "-", "."]
    chance = random.Random(5)
    texts = [part * (100_000 // len(part)) for part in parts]
    texts += ["".join(chance.choices(parts, k=2)) * 30_000 for _ in range(40)]
    texts += ["".join(chance.choices(parts, k=50_000)) for _ in range(20)]
    for text in texts:
        begun_s = time.process_time()
        found = redacted(text.split("\0"))
        # THEN a text of 20 times what is read of a process takes as long as it is: a pattern that
        # goes back takes minutes
        assert time.process_time() - begun_s < 10
        assert len(found) == text.count("\0") + 1
