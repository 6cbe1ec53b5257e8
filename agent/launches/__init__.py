# SPDX-License-Identifier: Apache-2.0
"""Device API descriptions to probes, and probes to counted launches."""
