# SPDX-License-Identifier: Apache-2.0
"""Which device families a recording has: what `--gpu` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiflame.agent.errors import EnvironmentUnfit
from aiflame.gpu.base import Family
from aiflame.gpu.families import FAMILIES

AUTO, NONE = "auto", "none"
CHOICES = (AUTO, NONE, *FAMILIES)

# What `--gpu` says, and which families that means: `choose_families`, of some registry.
ChooseFamilies = Callable[[str], tuple[Family, ...]]


def choose_families(
    word: str, known: Mapping[str, Callable[[], Family]] = FAMILIES
) -> tuple[Family, ...]:
    """Returns the families to record.

    Args:
        word: One of CHOICES. "auto" never fails: a family that finds no device here says so in the
            capture, and may still find one in a target's container.
        known: Those that there are.

    Raises:
        EnvironmentUnfit: A family was named and has no device here.
    """
    if word == NONE:
        return ()
    if word == AUTO:
        return tuple(make() for make in known.values())
    family = known[word]()
    finding = family.detect()
    if not finding.devices:
        cure = "; or ".join(filter(None, [finding.cure, "--gpu auto records without"]))
        raise EnvironmentUnfit(f"--gpu {word}: {finding.why}", cure)
    return (family,)
