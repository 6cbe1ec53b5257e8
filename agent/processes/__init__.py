# SPDX-License-Identifier: Apache-2.0
"""What /proc tells of a live process; so far who it is: container, unit and pod."""
