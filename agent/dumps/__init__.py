# SPDX-License-Identifier: Apache-2.0
"""What every thread of a process does at this moment; nothing is recorded, nothing is stopped."""
