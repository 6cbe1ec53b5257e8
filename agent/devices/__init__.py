# SPDX-License-Identifier: Apache-2.0
"""Device families: what they sample, and where their code is."""
