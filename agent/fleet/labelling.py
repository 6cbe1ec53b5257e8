# SPDX-License-Identifier: Apache-2.0
"""Whom processes belong to and which are left out, as the agent's configuration says."""

from __future__ import annotations

import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from aiflame.agent.fleet.config import MOST_LEFT_OUT, AgentSettings
from aiflame.agent.fleet.engine_watch import EngineWatch
from aiflame.agent.fleet.host_checks import CgroupLayout, cgroup_layout
from aiflame.agent.fleet.known_containers import keep, kept
from aiflame.agent.fleet.kubelet import Kubelet, KubeletSettings, PodWatch
from aiflame.agent.fleet.labels import KEPT_S, UNKNOWN_CONTAINER, Labeller, LabelOptions
from aiflame.agent.fleet.rootless import RootlessEngines
from aiflame.agent.fleet.selection import ids_below, known_groups, left_out_paths
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
# How often all cgroups are looked at as windows come; the collector asks for it more often, where
# there are rules. The 2,000 of 500 pods take 25 ms if none has changed, and 0.15 s the first time.
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


def is_roots(mounts: Sequence[Path], cgroup: str) -> bool:
    """Whether nobody but root can make cgroups in one: those of others are delegated.

    Args:
        mounts: Of cgroup v2.
        cgroup: Its path.
    """
    try:
        found = (mounts[0] / cgroup.lstrip("/")).stat()
    except (OSError, IndexError):  # it is gone, or there is no cgroup v2
        return False
    return found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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
        self._mounts = cgroup2_mounts()
        self._engines = EngineWatch()
        self._rootless = RootlessEngines()
        self._labeller = Labeller(
            label_options(settings),
            None,
            self._engines.facts_of,
            rootless_facts=self._rootless.facts_of,
            names_of=self._engines.names_of,
            is_roots=partial(is_roots, self._mounts),
        )
        self._labeller.learn(kept(self._directory))
        self._kept_changes = 0
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

    @property
    def _is_told_nothing(self) -> bool:
        """Whether nobody tells of pods."""
        return self._watch is None or bool(self._watch.error)

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
        found: list[Labels | None] = []
        held_back = set()
        for subject, process in zip(self._labeller.subjects(processes), processes, strict=True):
            is_taken = self._selection.takes(subject, process.name)
            found.append(subject.labels if is_taken else None)
            if is_taken is None:
                held_back.add(subject.labels.container_id)
        distinct = distinct_labels(found)
        kept = frozenset(islice(distinct, _MAX_LABEL_SETS))
        merged = []
        if len(kept) < len(distinct):
            merged = [at for at, labels in enumerate(found) if labels and labels not in kept]
        for at in merged:
            found[at] = self._labeller.other
        unnamed = {each.container_id for each in distinct if _is_unnamed(each)}
        of_pods = LossKind.PODS_NOT_KNOWN if self._is_told_nothing else LossKind.PODS_NOT_TOLD
        counts = {
            LossKind.UNNAMED_CONTAINERS: len(unnamed),
            LossKind.LABELS_MERGED: len(merged),
            of_pods: len(held_back),
        }
        self.losses = tuple(
            Loss(kind.stored_name, count, "; ".join(filter(None, (kind.meaning, kind.cure))))
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

    def newly_left_out(self, *, is_due: bool = False) -> LeftOut | None:
        """Returns what is to be left out; None where it is what it was last time.

        Args:
            is_due: All cgroups are looked at, however short ago they were.
        """
        now_s = time.monotonic()
        is_due |= self._left_out is None or now_s - self._looked_s >= _LOOK_S
        if self._left_out is not None and not is_due:
            learnt = self._labeller.take_learnt() if self._selection.asks_pods else ()
            return self._changed(self._with(self._left_out, learnt)) if learnt else None
        self._looked_s = now_s
        self._labeller.take_learnt()
        return self._changed(self._look())

    def _look(self) -> LeftOut:
        """Looks at all cgroups."""
        if not self._selection.has_rules:
            return LeftOut()
        groups: dict[str, int] = {}  # which are there, by v2
        for mount in self._mounts[:1]:
            is_v1_beside = self._layout is not CgroupLayout.UNIFIED
            groups = known_groups(mount, is_v1_beside=is_v1_beside)
        paths = {**groups, **self._paths}
        found = left_out_paths(paths, self._selection, self._labeller)
        ids = sorted(groups[path] for path in found if path in groups)
        return LeftOut(frozenset(ids[:MOST_LEFT_OUT]), frozenset(found & self._paths.keys()))

    def _with(self, before: LeftOut, learnt: Iterable[str]) -> LeftOut:
        """Looks at some cgroups of containers, and at what is below them."""
        ids, paths = {*before.ids}, {*before.paths}
        for group in learnt:
            is_out = self._selection.leaves_out(self._labeller.of_group(group))
            below = {p for p in self._paths if p == group or p.startswith(f"{group}/")}
            paths = paths | below if is_out else paths - below
            for mount in self._mounts[:1]:
                numbers = ids_below(mount, group)
                ids = ids | numbers if is_out else ids - numbers
        return LeftOut(frozenset(sorted(ids)[:MOST_LEFT_OUT]), frozenset(paths))

    def _changed(self, found: LeftOut) -> LeftOut | None:
        # The first time also that there are none: a configuration before may have had rules.
        if found == self._left_out:
            return None
        self._left_out = found
        return found


def _is_unnamed(labels: Labels) -> bool:
    """Whether these are of a container of which only the id is known, of root's or of a user's."""
    return not labels.container and labels.service.rpartition("/")[2] == UNKNOWN_CONTAINER
