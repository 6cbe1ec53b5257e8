# SPDX-License-Identifier: Apache-2.0
"""The host half of aiflame: command line, recording, symbols, captures and reports."""

__version__ = "0.1.0"
