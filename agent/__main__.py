# SPDX-License-Identifier: Apache-2.0
"""`python -m aiflame.agent`: the same as the command `aiflame`."""

import sys

from aiflame.agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
