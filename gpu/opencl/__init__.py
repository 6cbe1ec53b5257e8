# SPDX-License-Identifier: Apache-2.0
"""OpenCL devices. PoCL's are made of CPU threads, and are sampled as such; of others only that they
are there is known here.
"""
