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
from importlib.resources import files
from typing import Any

from aiflame.agent.model import Profile
from aiflame.agent.reports import device_facts, facts, palette, stall_colors
from aiflame.agent.reports.base import ColorBy, ReportOptions, View
from aiflame.agent.reports.device_rows import DeviceSamples, device_samples
from aiflame.agent.reports.pack import MAX_NODES, Packed, pack
from aiflame.agent.reports.pack_device import pack_device
from aiflame.agent.reports.palette import Category
from aiflame.agent.reports.rows import showable
from aiflame.agent.reports.selection import has_python

# In this order they are one program: data and trees, drawing, words, state, the page.
_SCRIPTS = (
    *("model.js", "device.js", "draw.js", "tip.js", "address.js"),
    *("legend.js", "table.js", "listing.js", "page.js"),
)


class HtmlReport:
    """The `html` format."""

    name = "html"
    extension = ".html"
    is_binary = False

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the whole file."""
        packed = pack(profile, options)
        samples = device_samples(profile) if len(profile.gpu.samples) else None
        device = pack_device(profile, options, samples) if samples is not None else None
        page = files("aiflame.agent.reports") / "page"
        script = "\n".join((page / name).read_text("utf-8") for name in _SCRIPTS)
        style = (page / "page.css").read_text("utf-8")
        values = {
            "title": html.escape(facts.title(profile, options)),
            "subtitle": html.escape(_subtitle(profile, packed)),
            "warnings": _paragraphs(facts.warnings(profile)),
            "cut": html.escape(_cut_note(packed, device, options)),
            "losses": _losses(profile),
            "facts": _definitions(
                [*facts.recording_facts(profile), *device_facts.device_lines(profile.gpu)]
            ),
            "settings": _json(_settings(profile, packed, device, options)),
            "data": packed.blob,
            "device_note": html.escape(_device_note(profile, samples)),
            "device_data": _device_data(device),
            "script": script,
            "style": style,
            "script_hash": _hash_source(script),
            "style_hash": _hash_source(style),
        }
        template = (page / "page.html").read_text("utf-8")
        return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template).encode()


def _subtitle(profile: Profile, packed: Packed) -> str:
    return facts.subtitle(profile, ReportOptions(view=View.WALL), packed.whole_ns)


def _device_note(profile: Profile, samples: DeviceSamples | None) -> str:
    if samples is None:
        return device_facts.absence(profile)
    return device_facts.attribution(profile, samples)


def _device_data(device: Packed | None) -> str:
    if device is None:
        return ""
    return f'\n<script type="text/plain" id="device-data">{device.blob}</script>'


def _settings(
    profile: Profile, packed: Packed, device: Packed | None, options: ReportOptions
) -> dict[str, Any]:
    on_fills, off_fills = palette.tables()
    lightest = palette.SHADES - 1
    return {
        "index": packed.index,
        "device_index": device.index if device is not None else None,
        # Without samples there is no such view.
        "view": View.WALL.value
        if device is None and options.view is View.GPU
        else options.view.value,
        "color": (options.color_by or ColorBy.STALL).value,
        "stalls": stall_colors.settings(),
        "stall_kinds": stall_colors.KINDS,
        "inverted": options.inverted,
        "has_python": has_python(profile),
        "frames": options.frames.value,
        "hide_imports": options.hide_importlib,
        "lasted": facts.duration(profile.recording.duration_ns),
        "on_fills": on_fills,
        "off_fills": off_fills,
        "whole_fills": [on_fills[Category.MARKER][lightest], off_fills[Category.MARKER][lightest]],
        "hit_fill": palette.HIT,
        "ink": palette.INK,
        "categories": palette.CATEGORIES,
        "is_wait": [c in palette.CLASS_CATEGORY.values() for c in Category],
    }


def _json(value: object) -> str:
    # A JSON string may spell any character as \\u003c; so no "</script>" or "<!--" can appear.
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _hash_source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _paragraphs(lines: list[str]) -> str:
    return "".join(f'<p class="warning">{html.escape(line)}</p>' for line in lines)


def _definitions(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in pairs)


def _losses(profile: Profile) -> str:
    lost = [loss for loss in profile.losses if loss.count]
    if not lost:
        return "<p>Nothing was lost.</p>"
    pairs = [(showable(loss.name), f"{loss.count:,}: {showable(loss.meaning)}") for loss in lost]
    return f"<dl>{_definitions(pairs)}</dl>"


def _cut_note(packed: Packed, device: Packed | None, options: ReportOptions) -> str:
    sentences = [_cut_sentence(packed, options, "all time")]
    if device is not None:
        sentences.append(_cut_sentence(device, options, "all device samples"))
    return " ".join(filter(None, sentences))


def _cut_sentence(packed: Packed, options: ReportOptions, whole: str) -> str:
    if not packed.cut.nodes:
        return ""
    reason = f"each under {options.min_width_pct or 0:g} % of {whole}"
    if packed.cut.is_capped:
        reason = f"the narrowest, since a page holds {MAX_NODES:,}"
    return facts.left_out(packed.cut.nodes, reason, packed.cut.ns, packed.whole_ns)
