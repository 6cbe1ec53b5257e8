# SPDX-License-Identifier: Apache-2.0
"""The device half of aiflame: launch calls by API, device families, stall reasons, attribution.

Of agent/ it knows the profile model and nothing else.
"""
