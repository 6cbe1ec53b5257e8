# SPDX-License-Identifier: Apache-2.0
"""The agent that records a host all day: configuration, stretches, batches, delivery."""
