# SPDX-License-Identifier: Apache-2.0
"""A toy language model on an OpenCL device, to be recorded: what `make demo` shows.

What looks like half a block of a transformer makes tokens one after another. `matmul` is launched
from four lines and `softmax` from two, so that a flame graph has to tell them apart; `gelu` and
`layer_norm` from one each. All work items of a kernel do the same work, so that sharing by their
number is right. The CPU's part is to choose a token by its weight.

Needs pyopencl, which Debian and Ubuntu have for their own interpreter. Argument: seconds to run
for (5 without).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyopencl as cl

TOKENS, WIDTH, HIDDEN, VOCABULARY = 128, 64, 512, 512

KERNELS = Path(__file__).with_suffix(".cl")


class Device:
    """A queue, the kernels, and memory for them."""

    def __init__(self) -> None:
        self.context = cl.create_some_context(interactive=False)
        self.queue = cl.CommandQueue(self.context)
        # The compiler is given a text without a name.
        text = f'#line 1 "{KERNELS.name}"\n{KERNELS.read_text()}'
        program = cl.Program(self.context, text).build(options=["-g"], cache_dir=False)
        self._matmul, self._softmax = program.matmul, program.softmax
        self._gelu, self._layer_norm = program.gelu, program.layer_norm
        self.random = np.random.default_rng(1)

    def tensor(self, *shape: int) -> cl.Buffer:
        """Returns memory that holds small random numbers."""
        values = self.random.normal(0, 0.1, shape).astype(np.float32)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        return cl.Buffer(self.context, flags, hostbuf=values)

    def matmul(self, left: cl.Buffer, right: cl.Buffer, out: cl.Buffer, columns: int) -> None:
        """Starts out = left x right, where left has a row of WIDTH for each token."""
        fours = columns // 4
        sizes = (fours, TOKENS), (16, 1)
        self._matmul(self.queue, *sizes, left, right, out, np.int32(WIDTH), np.int32(fours))

    def softmax(self, values: cl.Buffer, columns: int) -> None:
        """Starts it on groups of TOKENS numbers."""
        self._softmax(self.queue, (columns,), (8,), values, np.int32(TOKENS))

    def gelu(self, values: cl.Buffer, columns: int) -> None:
        """Starts it on a row for each token."""
        self._gelu(self.queue, (TOKENS * columns,), (64,), values)

    def layer_norm(self, values: cl.Buffer) -> None:
        """Starts it on a row of WIDTH for each token."""
        self._layer_norm(self.queue, (TOKENS,), (8,), values, np.int32(WIDTH))


class Attention:
    """Every token looks at every other."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.asking, self.keys = device.tensor(WIDTH, WIDTH), device.tensor(WIDTH, TOKENS)
        self.queries, self.scores = device.tensor(TOKENS, WIDTH), device.tensor(TOKENS, TOKENS)

    def forward(self, hidden: cl.Buffer) -> None:
        """Leaves the weight of each pair of tokens in `scores`."""
        self.device.matmul(hidden, self.asking, self.queries, WIDTH)
        self.device.matmul(self.queries, self.keys, self.scores, TOKENS)
        self.device.softmax(self.scores, TOKENS)


class FeedForward:
    """Up to the hidden width."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.up = device.tensor(WIDTH, HIDDEN)
        self.wide = device.tensor(TOKENS, HIDDEN)

    def forward(self, hidden: cl.Buffer) -> None:
        """Leaves the result in `wide`."""
        self.device.layer_norm(hidden)
        self.device.matmul(hidden, self.up, self.wide, HIDDEN)
        self.device.gelu(self.wide, HIDDEN)


class Model:
    """The block, and what makes a token of its result."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.attention, self.feed_forward = Attention(device), FeedForward(device)
        self.hidden = device.tensor(TOKENS, WIDTH)
        self.words = device.tensor(WIDTH, VOCABULARY)
        self.weights = device.tensor(TOKENS, VOCABULARY)
        self.answer = np.empty((TOKENS, VOCABULARY), np.float32)

    def forward(self) -> None:
        """Leaves the weight of each word after each token in `weights`."""
        self.attention.forward(self.hidden)
        self.feed_forward.forward(self.hidden)
        self.device.matmul(self.hidden, self.words, self.weights, VOCABULARY)
        self.device.softmax(self.weights, VOCABULARY)

    def next_token(self) -> int:
        """Returns a token, chosen at random by its weight."""
        self.forward()
        self.device.queue.finish()
        cl.enqueue_copy(self.device.queue, self.answer, self.weights)
        weights = self.answer[-1].astype(np.float64)
        return int(self.device.random.choice(VOCABULARY, p=weights / weights.sum()))


def make_tokens(seconds: float) -> int:
    """Returns how many it made."""
    model = Model(Device())
    tokens = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        model.next_token()
        tokens += 1
    return tokens


def main() -> None:
    """Compiles the kernels anew: of cached ones with debug information PoCL 3.1 complains."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POCL_CACHE_DIR"] = folder
        tokens = make_tokens(float(sys.argv[1] if len(sys.argv) > 1 else 5))
    print(f"made {tokens} tokens")


main()
