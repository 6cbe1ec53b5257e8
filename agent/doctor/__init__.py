# SPDX-License-Identifier: Apache-2.0
"""Checks whether this machine can record, by doing what a recording does at its start."""
