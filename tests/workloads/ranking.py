# SPDX-License-Identifier: Apache-2.0
"""A worker that ranks documents, to be recorded: `make fleet-demo` runs it, and a changed one.

The change is in `remove_duplicates`: it looks for each document in a list. Arguments: seconds to
run for, and "canary" for the changed one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

DOCUMENTS, WORDS = 240, 40
# Between two requests: both together leave most of a CPU to others.
PAUSE_S = 0.02


def make_request(chance: random.Random) -> str:
    """Returns documents as they come over the network."""
    words = [f"w{number}" for number in range(WORDS)]
    documents = [
        {"id": chance.randrange(DOCUMENTS), "words": chance.choices(words, k=12)}
        for _ in range(DOCUMENTS)
    ]
    return json.dumps(documents)


class Ranker:
    """Ranks the documents of a request."""

    def __init__(self, is_canary: bool) -> None:
        self.is_canary = is_canary
        self.weights = {f"w{number}": number / WORDS for number in range(WORDS)}

    def rank(self, request: str) -> list[int]:
        """Returns the ids of the best documents."""
        documents = self.remove_duplicates(json.loads(request))
        return sorted(documents, key=lambda one: self.score(documents[one]), reverse=True)[:10]

    def remove_duplicates(self, documents: list[dict[str, Any]]) -> dict[int, list[str]]:
        """Returns the words of each document, once."""
        if not self.is_canary:
            return {document["id"]: document["words"] for document in documents}
        seen: list[dict[str, Any]] = []
        for document in documents:
            if document not in seen:
                seen.append(document)
        return {document["id"]: document["words"] for document in seen}

    def score(self, words: list[str]) -> float:
        """Returns what a document is worth."""
        return sum(self.weights[word] ** 2 for word in words)


def main() -> None:
    """Answers the same requests until the time is over."""
    chance = random.Random(1)
    requests = [make_request(chance) for _ in range(48)]
    ranker = Ranker("canary" in sys.argv)
    until_s = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until_s:
        for request in requests:
            ranker.rank(request)
        time.sleep(PAUSE_S)


main()
