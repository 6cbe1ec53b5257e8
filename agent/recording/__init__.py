# SPDX-License-Identifier: Apache-2.0
"""The half that needs privilege: loading and draining the kernel programs, and reading targets."""
