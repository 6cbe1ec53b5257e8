# SPDX-License-Identifier: Apache-2.0
"""Flame graph as one SVG file, for browsers, documents and README files.

The flame graph is whole without script, so it works as an image too. Opened in a browser it behaves
the way readers of flame graphs expect: it is as wide as the window and opens at its roots, a click
zooms, Ctrl-F searches by regular expression and says what share matched, Ctrl-I toggles case, and
the address keeps zoom and search.

Narrow frames are left out (`ReportOptions.min_width_pct`), which bounds the file's size; the
graph says how many. The html format keeps them.
"""

from __future__ import annotations

import html
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import repeat

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Difference, FrameKind, Profile
from aiflame.agent.reports import device_facts, difference, facts, palette, stall_colors
from aiflame.agent.reports.base import ReportOptions, View
from aiflame.agent.reports.device_rows import (
    DeviceSamples,
    Role,
    device_rows,
    device_samples,
    from_the_leaf,
)
from aiflame.agent.reports.device_times import DeviceTimes, device_times, time_rows
from aiflame.agent.reports.idle import without_idle
from aiflame.agent.reports.palette import Category
from aiflame.agent.reports.rows import TRUNCATED_MEANINGS, rows_for
from aiflame.agent.reports.tree import U64, Cut, Tree, build, invert, prune
from aiflame.agent.reports.words import percent
from aiflame.gpu.stalls import StallCategory

WIDTH_PX = 1200  # as an image: what readers of flame graphs know; it also fits a README
ROW_PX = 16
PAD_PX = 10  # around the flame graph
TOP_PX = 62  # title, subtitle and buttons
LINE_PX = 18  # of the text below the flame graph
CHAR_PX = 7.25  # a 12 px monospace font is 0.6 em wide, DejaVu Sans Mono a little more
TEXT_PAD_PX = 3
TITLE_CHARS = 96  # at 17 px, between the buttons
NOTE_CHARS = 160
MIN_CHARS = 3  # one letter and ".." tell nothing less

# 1.2 px: narrower frames can hardly be hit with a pointer, and hold no text.
MIN_WIDTH_PCT = 0.1

_WHOLE = "all"


@dataclass(frozen=True, slots=True)
class _Device:
    samples: DeviceSamples
    roles: list[int]  # Role by label
    stalls: U64  # samples by node and category
    certainties: U64  # samples by node and certainty


@dataclass(frozen=True, slots=True)
class _Times:
    times: DeviceTimes
    roles: list[int]  # Role by label
    certainties: U64  # ns by node and certainty


@dataclass(frozen=True, slots=True)
class _Sides:
    of: Difference
    base_ns: U64  # by node
    changes: npt.NDArray[np.float64]  # by node
    most: float  # the change that has the strongest colour


@dataclass(frozen=True, slots=True)
class _Graph:
    profile: Profile
    options: ReportOptions
    tree: Tree
    cut: Cut
    device: _Device | None = None  # of the view of device samples
    times: _Times | None = None  # of the view of GPU time
    sides: _Sides | None = None  # of a differential flame graph
    awake: Profile | None = None  # the profile without threads that are left out as idle
    idle: str = ""  # the sentence about these

    @property
    def rows(self) -> int:
        return int(self.tree.depth.max()) + 1

    @property
    def whole_ns(self) -> int:
        return int(self.tree.total_ns[0])

    @property
    def subtitle(self) -> str:
        if self.device is not None:
            return device_facts.subtitle(self.profile, self.device.samples)
        if self.times is not None:
            return device_facts.times_subtitle(self.profile, self.times.times)
        if self.sides is not None:
            return difference.whole_words(self.profile, self.sides.of)
        return facts.subtitle(self.awake or self.profile, self.options, self.whole_ns)

    def amount(self, weight: int) -> str:
        return device_facts.amount(self.options.view, weight)


class SvgReport:
    """The `svg` format."""

    name = "svg"
    extension = ".svg"
    is_binary = False

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the whole file."""
        width = MIN_WIDTH_PCT if options.min_width_pct is None else options.min_width_pct
        if profile.difference is not None:
            graph = _difference_graph(profile, profile.difference, options, width)
        elif options.view is View.GPU:
            graph = _device_graph(profile, options, width)
        elif options.view is View.GPU_TIME:
            graph = _times_graph(profile, options, width)
        else:
            is_folded = options.view is View.WALL and not (options.is_idle_shown or profile.fleet)
            awake, idle = without_idle(profile) if is_folded else (profile, "")
            tree, _ = build(rows_for(awake, options))
            if options.inverted:
                tree = invert(tree)
            graph = _Graph(profile, options, *prune(tree, width), awake=awake, idle=idle)
        return "\n".join(_document(graph)).encode()


def _device_graph(profile: Profile, options: ReportOptions, width: float) -> _Graph:
    samples = device_samples(profile)
    made = device_rows(profile, options, samples)
    full, node = build(from_the_leaf(made.rows) if options.inverted else made.rows)
    stalls = stall_colors.by_node(full, node, samples.category, samples.count)
    certainties = stall_colors.by_node(full, node, samples.certainty, samples.count)
    tree, cut = prune(full, width)
    device = _Device(samples, made.roles.tolist(), stalls[cut.kept], certainties[cut.kept])
    return _Graph(profile, options, tree, cut, device)


def _times_graph(profile: Profile, options: ReportOptions, width: float) -> _Graph:
    times = device_times(profile)
    made = time_rows(profile, options, times)
    full, node = build(from_the_leaf(made.rows) if options.inverted else made.rows)
    certainties = stall_colors.by_node(full, node, times.certainty, times.ns)
    tree, cut = prune(full, width)
    shown = _Times(times, made.roles.tolist(), certainties[cut.kept])
    return _Graph(profile, options, tree, cut, times=shown)


def _difference_graph(
    profile: Profile, of: Difference, options: ReportOptions, width: float
) -> _Graph:
    full = difference.difference_tree(profile, of, options)
    tree, cut = prune(full.tree, width)
    # Those that only base has are told of elsewhere.
    nodes = int(np.count_nonzero(full.tree.total_ns[~cut.kept]))
    changes = full.changes()
    most = difference.strongest(changes)
    sides = _Sides(of, full.base_ns[cut.kept], changes[cut.kept], most)
    return _Graph(profile, options, tree, replace(cut, nodes=nodes), sides=sides)


def _document(graph: _Graph) -> Iterator[str]:
    notes = [line for note in _notes(graph) for line in textwrap.wrap(note, NOTE_CHARS)]
    graph_px = graph.rows * ROW_PX
    below_px = TOP_PX + graph_px + LINE_PX + 4
    height = below_px + LINE_PX * (len(notes) + 1) + PAD_PX
    title = facts.title(graph.profile, graph.options)
    heading = html.escape(_cut(title, TITLE_CHARS))
    subtitle = html.escape(graph.subtitle)
    page = files("aiflame.agent.reports") / "page"
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" version="1.1" width="{WIDTH_PX}"'
        f' height="{height}" viewBox="0 0 {WIDTH_PX} {height}" role="img"'
        f' aria-label="{html.escape(title)}">'
    )
    yield f"<style>\n{(page / 'svg.css').read_text('utf-8')}</style>"
    yield '<rect class="paper" width="100%" height="100%"/>'
    yield '<g id="frames">'
    yield from _frames(graph)
    yield "</g>"
    yield f'<text id="details" x="{PAD_PX}" y="{TOP_PX + graph_px + 16}"> </text>'
    yield f'<text id="matched" x="{WIDTH_PX - PAD_PX}" y="{TOP_PX + graph_px + 16}"> </text>'
    yield from _legend(graph, below_px + 12)
    for i, note in enumerate(notes):
        y = below_px + LINE_PX * (i + 1) + 12
        text = html.escape(_cut(note, NOTE_CHARS))  # letters may be wider than one
        yield f'<text class="note" x="{PAD_PX}" y="{y}">{text}</text>'
    # After the frames: where it is scrolled, it stays above them.
    yield f'<g id="head"><rect class="paper" width="100%" height="{TOP_PX - 2}"/>'
    yield f'<text class="title" x="{WIDTH_PX // 2}" y="26">{heading}</text>'
    yield f'<text class="subtitle" x="{WIDTH_PX // 2}" y="46">{subtitle}</text>'
    yield '<text class="button" id="reset" x="10" y="26" tabindex="0" role="button"'
    yield ' style="display:none">Reset Zoom</text>'
    yield f'<text class="button" id="case" x="{WIDTH_PX - 90}" y="26" tabindex="0"'
    yield ' role="button" style="display:none"><title>Ctrl-I: match case</title>Aa</text>'
    yield f'<text class="button" id="search" x="{WIDTH_PX - 60}" y="26" tabindex="0"'
    yield ' role="button" style="display:none"><title>Ctrl-F: search</title>Search</text></g>'
    script = (page / "svg.js").read_text("utf-8")
    yield f"<script><![CDATA[\n{script}]]></script>"
    yield "</svg>\n"


def _notes(graph: _Graph) -> Iterable[str]:
    if graph.idle:
        yield graph.idle
    yield from facts.warnings(graph.profile)
    yield from facts.asked_for(graph.profile)
    if graph.cut.nodes:
        width = graph.options.min_width_pct
        share = MIN_WIDTH_PCT if width is None else width
        reason = f"each under {share:g} % of the whole"
        yield facts.left_out(graph.cut.nodes, reason, graph.cut.ns, graph.whole_ns)
    if graph.device is not None:
        yield from device_facts.notes(graph.profile, graph.device.samples)
    if graph.times is not None:
        yield device_facts.times_note(graph.profile, graph.times.times)
    if graph.sides is not None:
        yield from difference.notes(graph.profile, graph.sides.of)
    recording = graph.profile.recording
    own = percent(recording.recorder_cpu_ns, recording.duration_ns)
    yield (
        f"Complete stacks: {facts.complete_words(graph.profile)}."
        + (f" The recorder itself took {own} of one CPU." if facts.own_cost(recording) else "")
        + f" aiflame {recording.aiflame_version}"
    )


def _legend_entries(graph: _Graph) -> list[tuple[str, str]]:
    if graph.sides is not None:
        most = graph.sides.most
        changes = (-most, -most / 2, 0.0, most / 2, most)
        return [(difference.points(c), difference.fill(c, most)) for c in changes]
    if graph.device is not None and graph.options.shows_stalls:
        sums = dict(zip(StallCategory, graph.device.stalls[0].tolist(), strict=False))
        return [
            (f"{category.label} {percent(count, graph.whole_ns)}", category.color)
            for category, count in sorted(sums.items(), key=lambda item: (-item[1], item[0]))
            if count
        ]
    shown = [Category.NATIVE, Category.CPP, Category.PYTHON, Category.KERNEL, Category.MARKER]
    if (graph.tree.labels.categories[graph.tree.label[1:]] == Category.GENERATED).any():
        shown.insert(2, Category.GENERATED)
    if graph.options.view.is_of_devices:
        shown += (Category.BOUNDARY, *palette.DEVICE_CATEGORIES)
    middle = palette.SHADES // 2
    entries = [(palette.CATEGORIES[c], palette.fill(c, middle, False)) for c in shown]
    if graph.options.view in (View.WALL, View.OFFCPU):
        off_cpu = palette.fill(Category.NATIVE, middle, True)
        entries.append(("blue part of a frame: off the CPU", off_cpu))
        entries += [
            (palette.CATEGORIES[c], palette.fill(c, middle, True))
            for c in palette.CLASS_CATEGORY.values()
        ]
    return entries


def _legend(graph: _Graph, baseline: int) -> Iterator[str]:
    x = float(PAD_PX)
    for text, fill in _legend_entries(graph):
        yield f'<rect x="{x:g}" y="{baseline - 10}" width="12" height="12" fill="{fill}"/>'
        yield f'<text class="note" x="{x + 16:g}" y="{baseline}">{text}</text>'
        x += 34 + CHAR_PX * len(text)


def _frames(graph: _Graph) -> Iterator[str]:
    tree, whole = graph.tree, max(1, graph.whole_ns)
    scale = (WIDTH_PX - 2 * PAD_PX) / whole
    names, on_fill, off_fill = _faces(tree)
    columns = zip(
        tree.label.tolist(),
        tree.depth.tolist(),
        (tree.offsets_ns() * scale + PAD_PX).tolist(),
        (tree.total_ns * scale).tolist(),
        tree.total_ns.tolist(),
        tree.off_ns.tolist(),
        _node_faces(graph),
        strict=True,
    )
    markers = tree.labels.kinds == FrameKind.MARKER
    meanings = {
        label: f"; {TRUNCATED_MEANINGS[names[label]]}"
        for label in np.flatnonzero(markers).tolist()
        if names[label] in TRUNCATED_MEANINGS
    }
    # Flames rise from the bottom; merged from the leaf they hang from the top.
    bottom = TOP_PX + (graph.rows - 1) * ROW_PX
    for label, depth, x, width, total, off, stall in columns:
        y = TOP_PX + depth * ROW_PX if graph.options.inverted else bottom - depth * ROW_PX
        on_width = width * (total - off) / total if total else width
        share = f", {percent(off, total)} off-CPU" if off else stall.words
        meaning = meanings.get(label, "")
        fill = stall.fill or (off_fill[label] if off == total and total else on_fill[label])
        yield (
            f"<g><title>{html.escape(names[label])}"
            f" ({graph.amount(total)}, {percent(total, whole)}{share}{meaning})</title>"
            f'<rect x="{x:.4f}" y="{y}" width="{width:.4f}" height="{ROW_PX - 1}" fill="{fill}"/>'
        )
        if 0 < off < total:
            yield (
                f'<rect x="{x + on_width:.4f}" y="{y}" width="{width - on_width:.4f}"'
                f' height="{ROW_PX - 1}" fill="{off_fill[label]}"/>'
            )
        text = html.escape(_cut(names[label], int((width - 2 * TEXT_PAD_PX) / CHAR_PX)))
        yield f'<text x="{x + TEXT_PAD_PX:.4f}" y="{y + 11.5}"{stall.ink}>{text}</text></g>'


@dataclass(frozen=True, slots=True)
class _Face:
    words: str = ""  # of the tooltip
    fill: str = ""  # "": by the kind of frame
    ink: str = ""  # attribute of the text


def _node_faces(graph: _Graph) -> Iterator[_Face]:
    # One for each node; nothing in them but in views of devices and in differences.
    if graph.sides is not None:
        both = zip(graph.sides.base_ns.tolist(), graph.sides.changes.tolist(), strict=True)
        for base_ns, change in both:
            share = percent(base_ns, int(graph.sides.base_ns[0]))
            words = f"; base {share}, {difference.points(change)}"
            yield _Face(words, difference.fill(change, graph.sides.most))
        return
    if graph.times is not None:
        of_node = zip(graph.tree.label.tolist(), graph.times.certainties, strict=True)
        for label, certain in of_node:
            is_kernel = label >= 0 and graph.times.roles[label] == Role.KERNEL
            words = device_facts.certainty_words(certain.tolist()) if is_kernel else ""
            yield _Face(f"; launch stack {words}" if words else "")
        return
    if graph.device is None:
        yield from repeat(_Face(), len(graph.tree))
        return
    tree, device = graph.tree, graph.device
    categories = [*tree.labels.categories.tolist(), int(Category.MARKER)]
    columns = (tree.label.tolist(), tree.total_ns.tolist(), device.stalls, device.certainties)
    for label, total, counts, certain in zip(*columns, strict=True):
        stall = stall_colors.largest(counts)
        words = f", {percent(stall.count, total)} {stall.category.label}" if total else ""
        if label >= 0 and device.roles[label] == Role.KERNEL:
            words += f"; launch stack {device_facts.certainty_words(certain.tolist())}"
        fill, ink = stall_colors.fill(Category(categories[label]), stall, total)
        if not graph.options.shows_stalls:
            fill, ink = "", ""
        yield _Face(words, fill, f' style="fill:{ink}"' if ink == stall_colors.INKS[1] else "")


def _faces(tree: Tree) -> tuple[list[str], list[str], list[str]]:
    # Names and both colours by label; the last entry, which is index -1, is the whole.
    on_table, off_table = palette.tables()
    names = [*tree.labels.names, _WHOLE]
    categories = [*tree.labels.categories.tolist(), int(Category.MARKER)]
    used = set(tree.label.tolist())
    shades = [palette.shade_of(n) if i in used else 0 for i, n in enumerate(names[:-1])]
    shades.append(palette.SHADES - 1)
    on_fill = [on_table[c][s] for c, s in zip(categories, shades, strict=True)]
    off_fill = [off_table[c][s] for c, s in zip(categories, shades, strict=True)]
    return names, on_fill, off_fill


def _cut(text: str, columns: int) -> str:
    # The beginning of `text` that fits, with ".." where something is missing.
    if len(text) <= columns and text.isascii():
        return text
    if columns < MIN_CHARS:
        return ""
    if text.isascii():
        return f"{text[: columns - 2]}.."
    width = 0
    for at, char in enumerate(text):
        width += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width > columns:
            return f"{text[: max(0, at - 2)]}.."
    return text
