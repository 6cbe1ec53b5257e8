# SPDX-License-Identifier: Apache-2.0
"""The kernel half: C sources, shipped as package data and compiled when a recording starts."""
