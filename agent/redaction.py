# SPDX-License-Identifier: Apache-2.0
"""Command lines without what must not be shown: passwords, tokens and keys.

A heuristic, by names and by known shapes: `--token X`, `--password=X`, `KEY=X`, `user:X@` of URLs,
`Authorization: X`, keys of clouds. Rather a value too many is masked than one too few. Command
lines are chosen by their processes: it takes time in proportion to their length, whatever is in
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"

# Parts of names whose values are secret, anywhere, and those that have to be a word of a name, or
# its end: tokenizer and max_tokens are of every language model, and no secrets.
_ANYWHERE = re.compile(r"secret|passw|passphrase|credential|apikey|accesskey|privatekey")
_AT_END = ("token", "key", "pwd", "auth", "authorization", "bearer", "pass", "dsn")
# Names of where a secret is, or of what it is like: their values are of use, and say nothing.
_ABOUT = ("file", "path", "dir", "directory", "id", "name", "length", "type", "env")
# Schemes of authentication, after which a secret comes (RFC 7617, RFC 6750).
_SCHEMES = ("bearer", "basic")

# Between the scheme and the host of a URL (RFC 3986, 3.2.1).
_USER_INFO = re.compile(r"(?<=://)[^/\s@]*@")
# What those who issue tokens begin them with. Each starts after what cannot be in one, so that a
# text is looked at once.
_SHAPES = re.compile(
    r"(?<![\w-])(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|hf_\w{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}"  # Google
    r"|eyJ[\w-]{10,}\.[\w-]+(?:\.[\w-]*)?"  # a JSON web token
    r")"
)
_PRIVATE_KEY = "PRIVATE KEY-----"
_SPACES = re.compile(r"(\s+)")
_PARTS = re.compile(r"[=:]|[^=:,;?&\"'{}\[\]()]+")
_NOT_OF_WORDS = re.compile(r"[^a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def redacted(arguments: Iterable[str]) -> list[str]:
    """Returns the arguments of a program, with secrets masked."""
    found = []
    is_next_secret = False
    for argument in arguments:
        found.append(MASK if is_next_secret else _redacted(argument))
        is_next_secret = not is_next_secret and _announces(argument)
    return found


def _announces(word: str) -> bool:
    """Whether a word says that the next one is a secret: --token, Bearer, password:."""
    if word.lower() in _SCHEMES:
        return True
    is_flag = word.startswith("-") and "=" not in word
    return (is_flag or word.endswith((":", "="))) and _is_secret(word)


def _redacted(argument: str) -> str:
    """Masks what is secret of one argument, which may be a whole command line of its own."""
    if _PRIVATE_KEY in argument:
        return MASK
    pieces = _SPACES.split(argument)  # words, and what is between them
    for at in range(0, len(pieces), 2):
        if at and pieces[at] and _announces(pieces[at - 2]):
            # Of a scheme the next one is it: Authorization: Bearer X
            pieces[at] = pieces[at] if pieces[at].lower() in _SCHEMES else MASK
        else:
            word = pieces[at]
            pieces[at] = _of_word(word)
            if at == 0 and pieces[at] != word and pieces[at].endswith(("=" + MASK, ":" + MASK)):
                return pieces[at]  # a value with spaces in it
    return "".join(pieces)


def _of_word(word: str) -> str:
    word = _SHAPES.sub(MASK, _USER_INFO.sub(f"{MASK}@", word))
    head, mark, query = word.partition("?")
    masked = _of_assignment(head)
    if masked != head:  # the rest may be part of the secret
        return masked
    return head + mark + "&".join(map(_of_assignment, query.split("&")))


def _of_assignment(text: str) -> str:
    name = ""
    for match in _PARTS.finditer(text):
        part = match.group()
        if part not in "=:":
            name = part
        elif match.end() < len(text) and _is_secret(name):
            return text[: match.end()] + MASK
    return text


def _is_secret(name: str) -> bool:
    """Whether the value of what is so named is a secret."""
    words = [w for w in _NOT_OF_WORDS.split(_CAMEL.sub("-", name).lower()) if w]
    if not words or words[-1] in _ABOUT:
        return False
    joined = "".join(words)
    return _ANYWHERE.search(joined) is not None or words[-1].endswith(_AT_END)
