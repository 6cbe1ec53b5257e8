# SPDX-License-Identifier: Apache-2.0
"""What is pushed: profiles of a stretch of time, one for each container or service of a host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiflame.agent.model.profile import Profile


@dataclass(frozen=True, slots=True)
class Labels:
    """Who it was. "" stands where something is not known, or does not apply.

    Values come from users, container engines and Kubernetes: sinks escape and bound them.

    Attributes:
        service: The name that people look for, never "".
        container_id: 64 hex digits.
        container: Its name.
        engine: What runs it, as `processes.identity.Engine` says.
        unit: The systemd unit, of what is in no container.
        node: The host's name.
        namespace: Of the pod.
        pod: Its name.
        pod_uid: As Kubernetes gives it.
        workload: What made the pod: a Deployment, for its ReplicaSets.
        workload_kind: For instance "Deployment".
        version: Of the service.
        extra: Labels and annotations that the configuration asks for, by name.
    """

    service: str
    container_id: str = ""
    container: str = ""
    engine: str = ""
    unit: str = ""
    node: str = ""
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    workload: str = ""
    workload_kind: str = ""
    version: str = ""
    extra: tuple[tuple[str, str], ...] = ()


def distinct_labels(labels: Iterable[Labels | None]) -> dict[Labels, None]:
    """Returns those that differ, in the order of their coming.

    To hash labels takes longer than all else that is done with a process, and those of one service
    mostly are one object.
    """
    return dict.fromkeys({id(one): one for one in labels if one is not None}.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """What one stretch of time has of one set of labels.

    The profiles of a stretch share nothing; their time and samples add up to those of its capture.

    Attributes:
        labels: Of all its processes.
        profile: Of these alone. Losses are those of the whole host, in each of them.
        begin_unix_ns: When the stretch began.
        duration_ns: How long it is.
    """

    labels: Labels
    profile: Profile
    begin_unix_ns: int
    duration_ns: int
