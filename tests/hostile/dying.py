# SPDX-License-Identifier: Apache-2.0
"""A module that ends whoever imports it, which a fork server does."""

import os
import signal
import sys

if sys.argv[0].endswith("forking.py"):
    os.kill(os.getpid(), signal.SIGKILL)
