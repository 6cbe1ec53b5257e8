// SPDX-License-Identifier: Apache-2.0
// Device samples: their colours, their order from the leaf, and the figures of kernels. Nothing
// here touches the document.
"use strict";

// As Role in device_rows.py.
const ROLE = { KERNEL: 1, SOURCE: 2, INSTRUCTION: 3, REASON: 4, OFFSET: 5 };
// As Certainty in gpu/attribution; after these, what `weigh` adds.
const TIME_CLASS = { SHARED: 1, RUNS: 3, NS_OF_RUNS: 4 };
// From the leaf: the reason, then the instruction, then its offset.
const LEAF_ORDER = [ROLE.OFFSET, ROLE.INSTRUCTION, ROLE.REASON];

// ---- colours, as in stall_colors.py ------------------------------------------------------------

function channels(color) {
  return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
}

function mixed(neutral, color, strength) {
  const [weak, strong] = [channels(neutral), channels(color)];
  const rgb = weak.map((value, i) => Math.floor(value + (strong[i] - value) * strength + 0.5));
  return { fill: "#" + rgb.map((v) => v.toString(16).padStart(2, "0")).join(""), ink: inkOn(rgb) };
}

// Black or white, whichever reads better (WCAG 2.1, relative luminance).
function inkOn(rgb) {
  const linear = rgb.map((v) => v / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return (luminance + 0.05) ** 2 >= 1.05 * 0.05 ? "#000000" : "#ffffff";
}

// The largest category of a frame; of equal ones the first.
function largestStall(tree, node) {
  let best = 0;
  for (let k = 1; k < tree.klass.length; k++) if (tree.klass[k][node] > tree.klass[best][node]) best = k;
  return { category: best, count: tree.klass[best][node] };
}

// `faces.stalls`: {names, fills, neutral, least}; `faces.kindOf`: by label 0 CPU, 1 boundary, 2 device.
function stallFace(faces, tree, node) {
  const label = tree.label[node];
  const { stalls } = faces;
  const total = tree.total[node];
  if (label >= 0 && faces.kindOf[label] === 1) return { fill: faces.on[label], ink: "#000000" };
  if (label < 0 || faces.kindOf[label] !== 2 || !total) return { fill: stalls.neutral, ink: "#000000" };
  const { category, count } = largestStall(tree, node);
  const share = count / total;
  return mixed(stalls.neutral, stalls.fills[category], stalls.least + (1 - stalls.least) * share);
}

// ---- trees -------------------------------------------------------------------------------------

// The weighed tree with its locations of samples in the order of LEAF_ORDER, so that what is merged
// from the leaf begins with the reason.
function reasonFirst(tree, data) {
  const rank = (label) => LEAF_ORDER.indexOf(data.role[label]);
  const radix = tree.labels + 1;
  const ids = new Map();
  const parent = [-1];
  const label = [-1];
  const own = tree.klass.map((times) => selfTimes({ ...tree, total: times }));
  const moved = []; // pairs of a node of `tree` that has samples itself, and where these go
  const add = (up, next) => {
    const id = parent.length;
    parent.push(up);
    label.push(next);
    return id;
  };
  const step = (up, next) => {
    const key = up * radix + next;
    if (!ids.has(key)) ids.set(key, add(up, next));
    return ids.get(key);
  };
  const at = new Int32Array(tree.n);
  const tails = new Array(tree.n);
  for (let i = 0; i < tree.n; i++) {
    const up = tree.parent[i];
    const isPlace = i > 0 && rank(tree.label[i]) >= 0;
    if (i > 0) at[i] = isPlace ? at[up] : add(at[up], tree.label[i]);
    tails[i] = isPlace ? [...(tails[up] || []), tree.label[i]] : null;
    if (!own.some((times) => times[i] > 0)) continue;
    const end = [...(tails[i] || [])].sort((a, b) => rank(a) - rank(b)).reduce(step, at[i]);
    moved.push(i, end);
  }
  const { made, position } = arranged(parent, label);
  const sums = zeroClasses(made.n, own.length);
  for (let k = 0; k < own.length; k++) {
    for (let m = 0; m < moved.length; m += 2) sums[k][position[moved[m + 1]]] += own[k][moved[m]];
    for (let i = made.n - 1; i > 0; i--) sums[k][made.parent[i]] += sums[k][i];
  }
  return { ...made, klass: sums, labels: tree.labels };
}

// ---- kernels -----------------------------------------------------------------------------------

// Numbers of the kernels that a frame stands for: those of its name, in its process where the
// frame is in one.
function kernelsAt(data, tree, node) {
  const label = tree.label[node];
  if (label < 0 || data.role[label] !== ROLE.KERNEL) return [];
  const root = pathTo(tree, node)[0];
  const named = [...data.kernel_label.keys()].filter((k) => data.kernel_label[k] === label);
  const own = named.filter((k) => data.kernel_process[k] === root);
  return own.length ? own : named;
}

function summed(column, kernels) {
  return kernels.reduce((sum, k) => sum + column[k], 0);
}

// Samples of some kernels by a column of hits.
function hitsBy(data, column, kernels) {
  const sums = new Map();
  const wanted = new Set(kernels);
  for (let i = 0; i < data.hit_code.length; i++) {
    if (!data.hit_count[i] || !wanted.has(data.code_kernel[data.hit_code[i]])) continue;
    sums.set(column[i], (sums.get(column[i]) || 0) + data.hit_count[i]);
  }
  return sums;
}

// How sure the launching stacks of some kernels' samples are.
function certainty(data, kernels) {
  const sums = [...hitsBy(data, data.hit_certainty, kernels)].sort((a, b) => a[0] - b[0]);
  const whole = sums.reduce((sum, [, count]) => sum + count, 0);
  return sums.map(([which, count]) => `${percent(count, whole)} ${data.certainties[which]}`).join(", ");
}

// The same of GPU time, of all kernels.
function timeCertainty(data) {
  const sums = data.certainties.map(() => 0);
  data.row_kind.forEach((which, row) => { sums[which] += data.row_ns[row]; });
  const whole = sums.reduce((sum, ns) => sum + ns, 0);
  return sums.map((ns, which) => (ns ? `${percent(ns, whole)} ${data.certainties[which]}` : "")).filter(Boolean).join(", ");
}

// Samples by the vendor's reason, most first: [name, category, count].
function reasonsOf(data, kernels) {
  return [...hitsBy(data, data.hit_reason, kernels)].sort((a, b) => b[1] - a[1] || a[0] - b[0])
    .map(([kind, count]) => [data.kinds[kind].name, data.kinds[kind].klass, count]);
}

// How often some kernels were launched; that is not known by time range.
function launchWords(data, kernels) {
  return counted(summed(data.kernel_calls, kernels), "launch", "launches")
    + ` from ${counted(summed(data.kernel_stacks, kernels), "stack")}` + (data.isPart ? " in the whole recording" : "");
}

// How often a kernel ran, and how long each time.
function runWords(runs, ns) {
  return `${counted(runs, "run")}, ${duration(Math.round(ns / runs))} each`;
}

// The runs below a frame. Of shared time it is not known which stack launched which run.
function ownRuns(tree, node) {
  const [runs, ns] = [tree.klass[TIME_CLASS.RUNS][node], tree.klass[TIME_CLASS.NS_OF_RUNS][node]];
  const hasShared = tree.klass[TIME_CLASS.SHARED][node] > 0;
  if (!runs) return "a share of runs that several stacks launched";
  return runWords(runs, ns) + (hasShared ? ", and a share of others" : "");
}

// Pairs (heading, text) of a kernel's frame in GPU time. The runs of a time range are not known.
function kernelTimeFacts(data, tree, node) {
  const kernels = kernelsAt(data, tree, node);
  if (!kernels.length) return [];
  const name = data.kernel_names[kernels[0]];
  const whole = runWords(summed(data.kernel_runs, kernels), summed(data.kernel_ns, kernels));
  const facts = [["whole kernel", `${whole}; ${launchWords(data, kernels)}`]];
  if (data.row_runs) facts.unshift(["ran", ownRuns(tree, node)]);
  if (name !== data.names[tree.label[node]]) facts.push(["whole name", name]);
  return facts;
}

// Pairs (heading, text) of a kernel's frame in device samples.
function kernelFacts(data, tree, node) {
  const kernels = kernelsAt(data, tree, node);
  if (!kernels.length) return [];
  const name = data.kernel_names[kernels[0]];
  const reasons = reasonsOf(data, kernels);
  const whole = reasons.reduce((sum, [, , count]) => sum + count, 0);
  const facts = [
    ["launches", launchWords(data, kernels)],
    ["launch stacks", certainty(data, kernels)],
    ["reasons", reasons.slice(0, 5).map(([reason, , count]) => `${reason} ${percent(count, whole)}`).join(", ")],
  ];
  if (name !== data.names[tree.label[node]]) facts.push(["whole name", name]);
  return facts;
}

// The instructions of kernels by code: {code, rows: [{offset, text, source, count, reasons}], total}.
// What was sampled and has no text is listed as well.
function listings(data, kernels) {
  const found = new Map();
  const row = (code, offset) => {
    if (!found.has(code)) found.set(code, new Map());
    const rows = found.get(code);
    if (!rows.has(offset)) rows.set(offset, { offset, text: "", source: "", count: 0, reasons: new Map() });
    return rows.get(offset);
  };
  const wanted = new Set(kernels);
  const isWanted = (code) => wanted.has(data.code_kernel[code]);
  for (let i = 0; i < data.at_code.length; i++) {
    if (!isWanted(data.at_code[i])) continue;
    const made = row(data.at_code[i], data.at_offset[i]);
    made.text = data.texts[data.at_text[i]];
    made.source = data.sources[data.at_source[i]];
  }
  for (let i = 0; i < data.hit_code.length; i++) {
    if (!data.hit_count[i] || !isWanted(data.hit_code[i])) continue;
    const hit = row(data.hit_code[i], data.hit_offset[i]);
    hit.count += data.hit_count[i];
    hit.reasons.set(data.hit_reason[i], (hit.reasons.get(data.hit_reason[i]) || 0) + data.hit_count[i]);
  }
  return [...found].sort(([a], [b]) => a - b).map(([code, rows]) => {
    const sorted = [...rows.values()].sort((a, b) => a.offset - b.offset);
    return { code, rows: sorted, total: sorted.reduce((sum, one) => sum + one.count, 0) };
  }).filter((listing) => listing.total > 0);
}
