# SPDX-License-Identifier: Apache-2.0
"""The way to the bytes of targets: processes with few rights, which can be killed.

`memory` reads memory of processes in a child; `sandbox` takes rights away from children.
"""
