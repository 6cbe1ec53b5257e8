# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of back-ends that profiles are pushed to, as strict as their rules, for tests.

They are written from what the formats and the servers' sources say, and share nothing with what
encodes: messages are read by the published protos. None of them is a real server.
"""
