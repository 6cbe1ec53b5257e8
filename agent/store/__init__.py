# SPDX-License-Identifier: Apache-2.0
"""The fleet's store: profiles of many hosts in ClickHouse, or in a directory by chDB."""
