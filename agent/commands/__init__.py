# SPDX-License-Identifier: Apache-2.0
"""The verbs: one thin module each, listed in cli.VERBS."""
