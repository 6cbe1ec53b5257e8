# SPDX-License-Identifier: Apache-2.0
"""Flame graph as one self-contained page: every view, searchable, with all facts around it.

The page needs nothing from the network, since profiled machines are often offline. Its data is
packed by `pack`, its behaviour is the files of `page/`, put in when it is rendered.

Names come from the profiled processes and are hostile. They are in the compressed data, in JSON
with `<` escaped, or passed through html.escape; and a content security policy lets no script run
but the page's own, known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import MOST_PERMILLE, GpuProfile
from aiflame.agent.model.profile import NS_PER_S, Fleet, Profile
from aiflame.agent.reports import device_facts, difference, facts, palette, stall_colors
from aiflame.agent.reports.base import ColorBy, ReportOptions, View
from aiflame.agent.reports.buckets import Grid, Part, choose_grid
from aiflame.agent.reports.device_readings import DeviceLoad, loads
from aiflame.agent.reports.device_rows import DeviceSamples, device_samples
from aiflame.agent.reports.device_times import DeviceTimes, device_times
from aiflame.agent.reports.kernel_stats import launch_calls
from aiflame.agent.reports.merge import default_merge
from aiflame.agent.reports.pack import MAX_NODES, Packed, draft
from aiflame.agent.reports.pack_device import draft_device, draft_times
from aiflame.agent.reports.palette import Category
from aiflame.agent.reports.rows import TRUNCATED_MEANINGS
from aiflame.agent.reports.selection import has_python
from aiflame.agent.reports.words import showable

# In this order they are one program: data and trees, drawing, words, state, the page.
_SCRIPTS = (
    *("model.js", "device.js", "difference.js", "draw.js", "tip.js", "address.js"),
    *("idle.js", "strip.js", "filters.js", "legend.js", "table.js", "listing.js", "page.js"),
)


class HtmlReport:
    """The `html` format."""

    name = "html"
    extension = ".html"
    is_binary = False

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the whole file."""
        samples = device_samples(profile) if len(profile.gpu.samples) else None
        times = device_times(profile) if len(profile.gpu.times) else None
        sets, grid = _packed(profile, options, samples, times)
        page = files("aiflame.agent.reports") / "page"
        script = "\n".join((page / name).read_text("utf-8") for name in _SCRIPTS)
        style = (page / "page.css").read_text("utf-8")
        values = {
            "title": html.escape(facts.title(profile, options)),
            "subtitle": html.escape(_subtitle(profile, sets)),
            "warnings": _warnings(profile) + _paragraphs(facts.asked_for(profile), "note"),
            "cut": html.escape(_cut_note(sets, options)),
            "losses": _losses(profile),
            "facts": _definitions(_facts(profile)),
            "settings": _json({**_settings(profile, sets, options), "time": _time(profile, grid)}),
            "graph_note": html.escape(_graph_note(profile, samples, times)),
            "data": _data(sets),
            "script": script,
            "style": style,
            "script_hash": _hash_source(script),
            "style_hash": _hash_source(style),
        }
        template = (page / "page.html").read_text("utf-8")
        return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template).encode()


# The data sets of a page, as page.js calls them: the first is there, or else the one below.
_TIME, _DEVICE, _GPU_TIME = "time", "device", "gputime"
# In its place where two captures, or parts of a store, are compared; it has one view, of this name.
_DIFFERENCE = "difference"
_SET_OF = {View.GPU: _DEVICE, View.GPU_TIME: _GPU_TIME}

# Sentences about more losses than these would push the flame graph out of the window.
_MOST_LOSSES_EXPLAINED = 3


def _packed(
    profile: Profile,
    options: ReportOptions,
    samples: DeviceSamples | None,
    times: DeviceTimes | None,
) -> tuple[dict[str, Packed], Grid | None]:
    drafts = {_TIME if profile.difference is None else _DIFFERENCE: draft(profile, options)}
    if samples is not None:
        drafts[_DEVICE] = draft_device(profile, options, samples)
    if times is not None:
        drafts[_GPU_TIME] = draft_times(profile, options, times)
    parts = [(one.spans, one.owner) for one in drafts.values()]
    # Of a profile that was not read from a capture it may be unknown when its time was.
    # Two that are compared have no time in common.
    is_known = profile.difference is None and all(
        len(spans) or not len(owner) for spans, owner in parts
    )
    least_s = profile.fleet.bucket_s if profile.fleet is not None else 1
    chosen = choose_grid(*_seconds(profile, parts), parts, least_s) if is_known else None
    grid, pieces = chosen if chosen is not None else (None, [None] * len(drafts))
    sets = {name: one.packed(own) for (name, one), own in zip(drafts.items(), pieces, strict=True)}
    return sets, grid


def _seconds(profile: Profile, parts: Sequence[Part]) -> tuple[int, int]:
    """Return the first second shown and the one after the last, as far as there is anything."""
    shown, calls = profile.recording.shown_range, profile.gpu.calls
    ends = [calls["interval"].astype(np.int64) + 1]
    ends += [spans["first_s"].astype(np.int64) + spans["seconds"] for spans, _ in parts]
    known_s = max(int(end.max(initial=0)) for end in ends)
    return shown.start_ns // NS_PER_S, max(known_s, -(-shown.end_ns // NS_PER_S))


def _time(profile: Profile, grid: Grid | None) -> dict[str, Any] | None:
    """Return what the page needs to know of its buckets, None where there are none."""
    if grid is None:
        return None
    end_s = float(grid.start_s + grid.buckets * grid.width_s)
    recorded_s = profile.recording.shown_range.end_ns / NS_PER_S
    # The last bucket ends with the recording, if it is known when that was.
    if end_s - grid.width_s < recorded_s < end_s:
        end_s = recorded_s
    calls = launch_calls(profile.gpu)
    bucket = (calls["interval"].astype(np.int64) - grid.start_s) // grid.width_s
    told = loads(profile.gpu, grid.start_s, grid.width_s, grid.buckets)
    launches = np.bincount(bucket, calls["count"], grid.buckets).astype(np.int64)
    return {
        "start_s": grid.start_s,
        "width_s": grid.width_s,
        "buckets": grid.buckets,
        "end_s": end_s,
        "recorded_s": profile.recording.duration_ns / NS_PER_S or end_s,
        "launches": launches.tolist() if launches.any() else [],
        "devices": [_load(load, profile.gpu) for load in told[:_MAX_LOADS]],
        "devices_left_out": max(0, len(told) - _MAX_LOADS),
    }


# A device has a lane of 35 pixels; a machine has 16.
_MAX_LOADS = 16
_MIB = 1 << 20


def _load(load: DeviceLoad, gpu: GpuProfile) -> dict[str, Any]:
    """Return what the page needs to know of a device: shares in permille, sizes in MiB."""
    return {
        "name": device_facts.short_name(gpu, load.number),
        "model": showable(load.device.name or load.device.family),
        "busy": _numbers(load.busy * MOST_PERMILLE),
        "used": _numbers(load.used_bytes / _MIB),
        "total": round(load.total_bytes / _MIB),
    }


def _numbers(values: npt.NDArray[np.float64]) -> list[int | None]:
    return [None if value != value else round(value) for value in values.tolist()]


def _subtitle(profile: Profile, sets: Mapping[str, Packed]) -> str:
    if profile.difference is not None:
        return difference.whole_words(profile, profile.difference)
    return facts.subtitle(profile, ReportOptions(view=View.WALL), sets[_TIME].whole_ns)


def _facts(profile: Profile) -> list[tuple[str, str]]:
    if profile.difference is not None:
        return difference.recording_facts(profile)
    return [*facts.recording_facts(profile), *device_facts.device_lines(profile.gpu)]


def _graph_note(profile: Profile, samples: DeviceSamples | None, times: DeviceTimes | None) -> str:
    if profile.difference is not None:
        return " ".join(difference.notes(profile, profile.difference))
    if not device_facts.is_about_devices(profile):
        return ""
    of_samples = device_facts.absence(profile)
    if samples is not None:
        of_samples = device_facts.attribution(profile, samples)
    return (
        of_samples if times is None else f"{of_samples} {device_facts.times_note(profile, times)}"
    )


def _data(sets: Mapping[str, Packed]) -> str:
    return "\n".join(
        f'<script type="text/plain" id="data-{name}">{packed.blob}</script>'
        for name, packed in sets.items()
    )


def _settings(
    profile: Profile, sets: Mapping[str, Packed], options: ReportOptions
) -> dict[str, Any]:
    on_fills, off_fills = palette.tables()
    lightest = palette.SHADES - 1
    fleet = profile.fleet
    # Without its data there is no such view.
    view = (options.view if _SET_OF.get(options.view, _TIME) in sets else View.WALL).value
    return {
        "sets": {name: packed.index for name, packed in sets.items()},
        "view": view if profile.difference is None else _DIFFERENCE,
        "color": (options.color_by or ColorBy.STALL).value,
        "stalls": stall_colors.settings(),
        "stall_kinds": stall_colors.KINDS,
        "inverted": options.inverted,
        "idle": options.is_idle_shown,
        "merge": (options.merge or default_merge(profile)).value,
        "has_python": has_python(profile),
        "frames": options.frames.value,
        "hide_imports": options.hide_importlib,
        "lasted": facts.lasted(profile.recording) if fleet is None else fleet.when,
        "class_fills": palette.class_fills(),
        "on_fills": on_fills,
        "off_fills": off_fills,
        "whole_fills": [on_fills[Category.MARKER][lightest], off_fills[Category.MARKER][lightest]],
        "hit_fill": palette.HIT,
        "ink": palette.INK,
        "categories": palette.CATEGORIES,
        "truncated": TRUNCATED_MEANINGS,
        "is_wait": [c in palette.CLASS_CATEGORY.values() for c in Category],
        **({"fleet": _fleet(fleet)} if fleet is not None else {}),
        **({"difference": difference.settings()} if profile.difference is not None else {}),
    }


def _fleet(fleet: Fleet) -> dict[str, Any]:
    """Return what the page needs to know of a fleet; which thread has which value is packed."""
    return {
        "begin_s": fleet.begin_s,
        "labels": [
            {
                "name": label.name,
                "values": [showable(value) if value else "[none]" for value in label.values],
                "others": label.others,
            }
            for label in fleet.labels
        ],
    }


def _json(value: object) -> str:
    # A JSON string may spell any character as \\u003c; so no "</script>" or "<!--" can appear.
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _hash_source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _warnings(profile: Profile) -> str:
    """Return what stands above the flame graph; many losses are explained by a click."""
    lost = _paragraphs(facts.lost(profile), "warning")
    if len(facts.lost(profile)) > _MOST_LOSSES_EXPLAINED:
        short = html.escape(facts.lost_in_short(profile))
        lost = f'<details class="warning"><summary>{short}</summary>{lost}</details>'
    return _paragraphs(facts.doubts(profile), "warning") + lost


def _paragraphs(lines: list[str], kind: str) -> str:
    return "".join(f'<p class="{kind}">{html.escape(line)}</p>' for line in lines)


def _definitions(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in pairs)


def _losses(profile: Profile) -> str:
    lost = [loss for loss in profile.losses if loss.count]
    if not lost:
        return "<p>Nothing was lost.</p>"
    pairs = [(showable(loss.name), f"{loss.count:,}: {showable(loss.meaning)}") for loss in lost]
    return f"<dl>{_definitions(pairs)}</dl>"


_WHOLES = {
    _TIME: "all time",
    _DEVICE: "all device samples",
    _GPU_TIME: "all GPU time",
    _DIFFERENCE: "both",
}


def _cut_note(sets: Mapping[str, Packed], options: ReportOptions) -> str:
    sentences = [_cut_sentence(packed, options, _WHOLES[name]) for name, packed in sets.items()]
    return " ".join(filter(None, sentences))


def _cut_sentence(packed: Packed, options: ReportOptions, whole: str) -> str:
    if not packed.cut.nodes:
        return ""
    reason = f"each under {options.min_width_pct or 0:g} % of {whole}"
    if packed.cut.is_capped:
        reason = f"the narrowest, since a page holds {MAX_NODES:,}"
    return facts.left_out(packed.cut.nodes, reason, packed.cut.ns, packed.whole_ns)
