// SPDX-License-Identifier: Apache-2.0
// The state of the page, kept after the # of its address, so that it can be sent as a link and
// the browser's Back goes back. What equals the report's own options is left out.
"use strict";

const MAX_PATH = 400; // frames of a zoom that fit into an address

function firstMode(settings) {
  return settings.inverted ? "inverted" : "flame";
}

// The buckets that a range of seconds touches; null for none, or all of them.
function bucketsOf(time, from, to) {
  const known = (text) => (/^\d+$/.test(text) ? Number(text) : NaN);
  if (!time || !(known(from) < known(to))) return null;
  const first = Math.max(0, Math.floor((known(from) - time.start_s) / time.width_s));
  const end = Math.min(time.buckets, Math.ceil((known(to) - time.start_s) / time.width_s));
  return first < end && end - first < time.buckets ? [first, end] : null;
}

// An address may have been edited by hand: what makes no sense is taken for absent.
// `dataOf` gives the data of a view, undefined where there is none.
function readAddress(settings, dataOf) {
  const given = new URLSearchParams(location.hash.slice(1));
  const oneOf = (name, values, other) => (values.includes(given.get(name)) ? given.get(name) : other);
  const view = oneOf("view", Object.keys(VIEW_CLASSES).filter((name) => dataOf(name)), settings.view);
  const labelCount = dataOf(view).names.length;
  const fn = /^\d+$/.test(given.get("fn")) && Number(given.get("fn")) < labelCount ? Number(given.get("fn")) : null;
  const mode = oneOf("mode", ["flame", "inverted", "sandwich"], firstMode(settings));
  return {
    view,
    color: oneOf("color", ["stall", "frame"], settings.color),
    mode: mode === "sandwich" && fn === null ? "flame" : mode,
    frames: oneOf("frames", Object.keys(dataOf(view).hidden_kinds), settings.frames),
    hideImports: oneOf("imports", ["0", "1"], settings.hide_imports ? "0" : "1") === "0",
    merge: oneOf("merge", ["none", ...MERGES], settings.merge),
    idle: oneOf("idle", ["0", "1"], settings.idle ? "1" : "0") === "1",
    raw: given.get("raw") === "1",
    fn,
    range: bucketsOf(settings.time, given.get("from"), given.get("to")),
    filters: settings.fleet ? knownFilters(settings.fleet.labels, (name) => given.getAll(name)) : {},
    threads: given.get("threads") || "",
    search: given.get("search") || "",
    matchCase: given.get("case") === "1",
    zoom: (given.get("zoom") || "").split(".").filter((part) => part !== "").map(Number),
  };
}

function writeAddress(state, settings, isStep) {
  const kept = new URLSearchParams();
  if (state.view !== settings.view) kept.set("view", state.view);
  if (state.color !== settings.color) kept.set("color", state.color);
  if (state.mode !== firstMode(settings)) kept.set("mode", state.mode);
  if (state.frames !== settings.frames) kept.set("frames", state.frames);
  if (state.hideImports !== settings.hide_imports) kept.set("imports", state.hideImports ? "0" : "1");
  if (state.merge !== settings.merge) kept.set("merge", state.merge);
  if (state.idle !== settings.idle) kept.set("idle", state.idle ? "1" : "0");
  if (state.raw) kept.set("raw", "1");
  if (state.fn !== null) kept.set("fn", state.fn);
  if (state.range) {
    const [from, to] = state.range.map((bucket) => settings.time.start_s + bucket * settings.time.width_s);
    kept.set("from", from);
    kept.set("to", to);
  }
  for (const [name, values] of Object.entries(state.filters)) for (const value of values) kept.append(name, value);
  if (state.threads) kept.set("threads", state.threads);
  if (state.search) kept.set("search", state.search);
  if (state.matchCase) kept.set("case", "1");
  if (state.zoom.length && state.zoom.length <= MAX_PATH) kept.set("zoom", state.zoom.join("."));
  const address = "#" + kept.toString();
  if (address === (location.hash || "#")) return;
  try {
    if (isStep) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
  } catch (error) {
    // A page inside another one may not change the address; it works without.
    if (error.name !== "SecurityError") throw error;
  }
}
