# SPDX-License-Identifier: Apache-2.0
"""Whom processes belong to and which are left out, as the agent's configuration says."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from aiflame.agent.fleet.config import MOST_LEFT_OUT, AgentSettings
from aiflame.agent.fleet.engine_watch import EngineWatch
from aiflame.agent.fleet.host_checks import CgroupLayout, cgroup_layout
from aiflame.agent.fleet.known_containers import keep, kept
from aiflame.agent.fleet.kubelet import Kubelet, KubeletSettings, PodWatch
from aiflame.agent.fleet.labels import KEPT_S, UNKNOWN_CONTAINER, Labeller, LabelOptions
from aiflame.agent.fleet.rootless import RootlessEngines
from aiflame.agent.fleet.selection import left_out, left_out_paths
from aiflame.agent.losses import LossKind
from aiflame.agent.model.batch import Labels, distinct_labels
from aiflame.agent.model.profile import Loss, Process
from aiflame.agent.model.window import Window
from aiflame.agent.processes.targets import cgroup2_mounts

# Of a stretch: more than a host with 500 pods has. Each is a profile of its own for each sink.
_MAX_LABEL_SETS = 2048
# The latest cgroups that processes were seen in: what was left out of one that is dropped here is
# recorded until it is seen again.
_MAX_PATHS = 4 * MOST_LEFT_OUT
# How often all cgroups are looked at: containers start and end, and pods are known a moment later.
_LOOK_S = 10.0


def _kubelet_settings(settings: AgentSettings) -> KubeletSettings:
    return KubeletSettings(
        settings.kubelet,
        settings.kubelet_port,
        settings.kubelet_token_file,
        settings.kubelet_ca_file,
        settings.kubelet_skip_verify,
    )


def kubelet_of(settings: AgentSettings) -> Kubelet:
    """Returns who is asked for pods; `kubelet` is not ""."""
    return Kubelet(_kubelet_settings(settings))


def label_options(settings: AgentSettings) -> LabelOptions:
    """Returns what the configuration says about labels."""
    # Whoever asks for what is on disk asks by names.
    kept_s = max(KEPT_S, settings.keep + settings.stretch)
    return LabelOptions(
        settings.node_name, settings.pod_labels, settings.service_annotation, kept_s
    )


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the kernel half is to leave out.

    Attributes:
        ids: Of cgroups of v2.
        paths: Of others, as processes have them where v1 groups them.
    """

    ids: frozenset[int] = frozenset()
    paths: frozenset[str] = frozenset()


class Labelling:
    """Labels of processes, and cgroups that are to be left out.

    Args:
        settings: Of the agent.

    Attributes:
        losses: Of the labels that were made last.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.losses: tuple[Loss, ...] = ()
        self._directory = settings.directory
        self._kubelet: KubeletSettings | None = None
        self._watch: PodWatch | None = None
        self._engines = EngineWatch()
        self._rootless = RootlessEngines()
        self._labeller = Labeller(
            label_options(settings),
            None,
            self._engines.facts_of,
            rootless_facts=self._rootless.facts_of,
        )
        self._labeller.learn(kept(self._directory))
        self._kept_changes = 0
        self._mounts = cgroup2_mounts()
        self._layout = cgroup_layout()
        self._paths: OrderedDict[str, None] = OrderedDict()  # of processes, where v1 groups them
        self.use(settings)

    def use(self, settings: AgentSettings) -> None:
        """Takes another configuration; what is known of containers and pods stays."""
        self._selection = settings.selection
        kubelet = _kubelet_settings(settings)
        if kubelet != self._kubelet:
            self._kubelet = kubelet
            if self._watch is not None:
                self._watch.stop()
                self._watch = None
            if settings.kubelet:
                self._watch = PodWatch(kubelet_of(settings).fetch)
                self._watch.start()
        self._labeller.use(label_options(settings), self._watch)
        self._looked_s = 0.0
        self._left_out: LeftOut | None = None

    @property
    def error(self) -> str:
        """Why pods have no names, "" if they have, or none are asked for."""
        return "" if self._watch is None else self._watch.error

    def expect(self, window: Window) -> None:
        """Looks for the containers of a window while those know them who may forget them soon."""
        paths = [window.texts[path] for path in window.cgroups["path"].tolist()]
        self._labeller.expect(paths)
        if self._layout is not CgroupLayout.UNIFIED:
            self._know(paths)
        if self._labeller.changes != self._kept_changes:
            self._kept_changes = self._labeller.changes
            keep(self._directory, self._labeller.known)

    def of(self, processes: Sequence[Process]) -> list[Labels | None]:
        """Returns the labels of the processes of a stretch, None of those that are left out.

        There are `_MAX_LABEL_SETS` at most: back-ends have a series for each.
        """
        found = [
            subject.labels if self._selection.takes(subject, process.name) else None
            for subject, process in zip(self._labeller.subjects(processes), processes, strict=True)
        ]
        distinct = distinct_labels(found)
        kept = frozenset(islice(distinct, _MAX_LABEL_SETS))
        merged = []
        if len(kept) < len(distinct):
            merged = [at for at, labels in enumerate(found) if labels and labels not in kept]
        for at in merged:
            found[at] = self._labeller.other
        unnamed = {each.container_id for each in distinct if _is_unnamed(each)}
        counts = {LossKind.UNNAMED_CONTAINERS: len(unnamed), LossKind.LABELS_MERGED: len(merged)}
        self.losses = tuple(
            Loss(kind.stored_name, count, f"{kind.meaning}; {kind.cure}")
            for kind, count in counts.items()
            if count
        )
        return found

    def _know(self, paths: Iterable[str]) -> None:
        """Takes in which cgroups processes have been seen in."""
        for path in paths:
            if path not in self._paths:
                self._looked_s = 0.0  # it may be one to be left out
            self._paths[path] = None
            self._paths.move_to_end(path)
        while len(self._paths) > _MAX_PATHS:
            self._paths.popitem(last=False)

    def newly_left_out(self) -> LeftOut | None:
        """Returns what is to be left out; None where it is what it was last time."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return None
        self._looked_s = now_s
        ids: set[int] = set()
        if self._mounts:
            is_v1_beside = self._layout is not CgroupLayout.UNIFIED
            ids = left_out(
                self._mounts[0], self._selection, self._labeller, is_v1_beside=is_v1_beside
            )
        found = LeftOut(
            frozenset(sorted(ids)[:MOST_LEFT_OUT]),
            frozenset(left_out_paths(self._paths, self._selection, self._labeller)),
        )
        # The first time also that there are none: a configuration before may have had rules.
        if found == self._left_out:
            return None
        self._left_out = found
        return found


def _is_unnamed(labels: Labels) -> bool:
    """Whether these are of a container of which only the id is known, of root's or of a user's."""
    return not labels.container and labels.service.rpartition("/")[2] == UNKNOWN_CONTAINER
