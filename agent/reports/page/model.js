// SPDX-License-Identifier: Apache-2.0
// The page's data and trees. Nothing here touches the document, so it runs under node as well.
//
// A tree is arrays in preorder: the subtree of node i is the range i..end[i]. `klass[k][i]` is the
// time of node i and all below it in class k (0 on-CPU, 1 blocked, 2 waiting to run, 3 preempted).
// Times are float64, which is exact up to 2^53 ns, 104 days. Of device samples, classes are the
// categories of stalls, and what is called time is a number of samples. Of GPU time, classes are how
// sure its launching stacks are. Of a difference, they are the two sides; see difference.js.
"use strict";

const VIEW_CLASSES = { wall: [0, 1, 2, 3], cpu: [0], offcpu: [1, 2, 3], gpu: [0, 1, 2, 3, 4, 5, 6, 7, 8], gputime: [0, 1, 2], difference: [0] };
// Classes whose nodes a merged tree has: of a difference also those of width 0, which only base has.
const keptClasses = (view) => (view === "difference" ? [0, 1] : VIEW_CLASSES[view]);
const KIND_MARKER = 3; // as in FrameKind
// As Rank in own_code.py, after 0 for what aiflame made.
const RANK_SCHEDULER = 1;
const RANK_LIBRARY = 3;
const RANK_STANDARD = 4;
// The data set of a view.
const setOf = (view) => ({ gpu: "device", gputime: "gputime", difference: "difference" })[view] || "time";
const isOfDevices = (view) => ["device", "gputime"].includes(setOf(view));

async function inflate(base64) {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Undoes what pack.py did: byte planes, differences, JSON text.
function unpack(index, bytes) {
  const data = { ...index };
  for (const section of index.sections) {
    const chunk = bytes.subarray(section.start, section.start + section.length);
    data[section.name] = section.bytes
      ? integers(chunk, section)
      : JSON.parse(new TextDecoder().decode(chunk));
  }
  if (data.piece_count) data.piece_owner = owners(data.piece_count);
  return within(data, null);
}

// Which numbers below `size` a column has, ascending.
function occurring(column, size) {
  const isThere = new Uint8Array(size);
  for (let i = 0; i < column.length; i++) isThere[column[i]] = 1;
  return [...isThere.keys()].filter((value) => isThere[value]);
}

// The owner of each piece: the first `counts[0]` are of owner 0, and so on.
function owners(counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  const owner = new Int32Array(total);
  for (let i = 0, at = 0; i < counts.length; i++) for (const end = at + counts[i]; at < end; at++) owner[at] = i;
  return owner;
}

// The data with the weights of a range of buckets [from, to), null for all. A piece is a weight in
// each of `length` buckets from `first` on; see pack.py.
function within(data, range) {
  const chosen = { ...data, isPart: range !== null };
  if (range) chosen.row_runs = null; // when each run was is not known
  const column = data.hit_row ? "hit_count" : "row_ns";
  if (data.piece_count) {
    const { piece_owner: owner, piece_first: first, piece_length: length, piece_weight: weight } = data;
    const [from, to] = range || [0, Infinity];
    const sums = new Float64Array(data.piece_count.length);
    for (let i = 0; i < owner.length; i++) {
      const buckets = Math.min(first[i] + length[i], to) - Math.max(first[i], from);
      if (buckets > 0) sums[owner[i]] += weight[i] * buckets;
    }
    chosen[column] = sums;
  }
  // Device samples have their weights by hit, of which a row has several.
  if (data.hit_row) {
    chosen.row_ns = new Float64Array(data.row_node.length);
    for (let i = 0; i < data.hit_row.length; i++) chosen.row_ns[data.hit_row[i]] += chosen.hit_count[i];
  }
  return chosen;
}

// The data with only the weights of the threads that `wanted` (null for all) lets through.
function ofThreads(data, wanted) {
  if (wanted === null) return data;
  const chosen = { ...data, isPart: true };
  for (const column of ["row_ns", "row_runs", "row_run_ns"]) {
    if (data[column]) chosen[column] = data[column].map((weight, row) => (wanted[data.row_thread[row]] ? weight : 0));
  }
  if (data.hit_row) chosen.hit_count = data.hit_count.map((count, i) => (wanted[data.row_thread[data.hit_row[i]]] ? count : 0));
  return chosen;
}

// Weights by class and bucket, of the threads that `wanted` (null for all) lets through.
function activity(data, buckets, wanted) {
  const series = zeroClasses(buckets + 1, data.classes);
  const { piece_owner: owner, piece_first: first, piece_length: length, piece_weight: weight } = data;
  const klassOf = data.kinds.map((entry) => entry.klass);
  // First as steps up and down, since a long wait is one piece.
  for (let i = 0; i < owner.length; i++) {
    const row = data.hit_row ? data.hit_row[owner[i]] : owner[i];
    if (wanted !== null && !wanted[data.row_thread[row]]) continue;
    const steps = series[klassOf[data.row_kind[row]]];
    steps[first[i]] += weight[i];
    steps[first[i] + length[i]] -= weight[i];
  }
  for (const steps of series) for (let b = 1; b <= buckets; b++) steps[b] += steps[b - 1];
  return series.map((steps) => steps.subarray(0, buckets));
}

function integers(chunk, section) {
  const count = section.count;
  const column = section.bytes > 3 ? new Float64Array(count) : new Int32Array(count);
  let unit = 1;
  for (let plane = 0; plane < section.bytes; plane++, unit *= 256) {
    const start = plane * count;
    for (let i = 0; i < count; i++) column[i] += chunk[start + i] * unit;
  }
  if (section.is_delta) for (let i = 1; i < count; i++) column[i] += column[i - 1];
  return column;
}

// The tree of a data set, still without times.
function plainTree(data) {
  const depth = data.depth;
  const n = depth.length;
  const parent = new Int32Array(n).fill(-1);
  const label = Int32Array.from(data.label);
  const lastAt = [];
  for (let i = 0; i < n; i++) {
    lastAt[depth[i]] = i;
    if (i > 0) parent[i] = lastAt[depth[i] - 1];
  }
  label[0] = -1;
  return { n, label, parent, depth, end: ends(parent), labels: data.names.length };
}

function ends(parent) {
  const end = new Int32Array(parent.length);
  for (let i = parent.length - 1; i >= 0; i--) {
    if (end[i] === 0) end[i] = i + 1;
    if (i > 0 && end[i] > end[parent[i]]) end[parent[i]] = end[i];
  }
  return end;
}

// By label, whether a choice of frames leaves it out.
function hiddenLabels(data, frames, hideImports) {
  const kinds = data.hidden_kinds[frames];
  return Uint8Array.from(data.kind, (kind, label) =>
    kinds.includes(kind) || (hideImports && data.is_import[label]) ? 1 : 0);
}

// Adds to the labels of a data set those that processes have where some are one. `groups` has by
// choice {names, of: Map of a process's own name to the number of its new one}. Returns by choice the
// label that stands for each label.
function addGroups(data, groups) {
  const renames = {};
  for (const [merge, { names, of }] of Object.entries(groups)) {
    const own = data.names.flatMap((name, label) => (of.has(name) && data.kind[label] === KIND_MARKER ? [label] : []));
    const first = data.names.length;
    renames[merge] = Int32Array.from({ length: first }, (_, label) => label);
    for (const label of own) renames[merge][label] = first + of.get(data.names[label]);
    if (!own.length) continue;
    data.names = data.names.concat(names);
    // A process's colour, and all else, is as of any process.
    for (const column of ["category", "kind", "shade", "is_import", "rank", "file", "role"]) {
      if (!data[column]) continue;
      const longer = new data[column].constructor(data.names.length).fill(data[column][own[0]], first);
      longer.set(data[column]);
      data[column] = longer;
    }
  }
  return renames;
}

// The tree without the hidden labels, and the data with its rows at the nodes of that tree. The
// time of a hidden frame is that of the frame above; siblings that have become alike are one.
// `rename` gives the labels of processes, null for their own.
function selected(tree, data, hidden, rename = null) {
  if (!hidden.includes(1) && !rename) return { tree, data };
  const at = new Int32Array(tree.n);
  const parent = new Int32Array(tree.n).fill(-1);
  const label = new Int32Array(tree.n).fill(-1);
  let n = 1;
  // By (node above, label) the node, in open addressing: a Map of so many takes several times as long.
  const mask = 2 ** Math.ceil(Math.log2(2 * tree.n)) - 1;
  const slots = new Int32Array(mask + 1);
  for (let i = 1; i < tree.n; i++) {
    const up = at[tree.parent[i]];
    at[i] = up;
    if (hidden[tree.label[i]]) continue;
    const name = rename && tree.depth[i] === 1 ? rename[tree.label[i]] : tree.label[i];
    let slot = (Math.imul(up, 0x9e3779b1) ^ Math.imul(name, 0x85ebca6b)) >>> 7 & mask;
    while (slots[slot] && (parent[slots[slot]] !== up || label[slots[slot]] !== name)) slot = (slot + 1) & mask;
    if (!slots[slot]) {
      parent[n] = up;
      label[n] = name;
      slots[slot] = n++;
    }
    at[i] = slots[slot];
  }
  const { made, position } = arranged(parent.subarray(0, n), label.subarray(0, n));
  const rowNode = new Int32Array(data.row_node.length);
  for (let r = 0; r < rowNode.length; r++) rowNode[r] = position[at[data.row_node[r]]];
  const kernelProcess = rename && data.kernel_process ? { kernel_process: Int32Array.from(data.kernel_process, (label) => rename[label]) } : {};
  return { tree: { ...made, labels: tree.labels }, data: { ...data, ...kernelProcess, row_node: rowNode } };
}

// The tree, in preorder and siblings by label, of nodes that come after the one above them;
// `position` is where each one went.
function arranged(parent, label) {
  const n = parent.length;
  const byLabel = sortedBy(label);
  const first = new Int32Array(n).fill(-1); // the first node below
  const next = new Int32Array(n).fill(-1); // the next sibling
  for (let k = n - 1; k >= 0; k--) {
    const id = byLabel[k];
    if (id === 0) continue;
    next[id] = first[parent[id]];
    first[parent[id]] = id;
  }
  const size = new Int32Array(n).fill(1);
  for (let id = n - 1; id > 0; id--) size[parent[id]] += size[id];
  const made = { n, label: new Int32Array(n), parent: new Int32Array(n), depth: new Int32Array(n), end: new Int32Array(n) };
  const position = new Int32Array(n);
  for (let id = 0, at = 0; at < n; at++) {
    const up = at > 0 ? position[parent[id]] : -1;
    position[id] = at;
    made.label[at] = label[id];
    made.parent[at] = up;
    made.depth[at] = at > 0 ? made.depth[up] + 1 : 0;
    made.end[at] = at + size[id];
    let step = first[id];
    for (; step < 0 && id > 0; id = parent[id]) step = next[id];
    id = step;
  }
  return { made, position };
}

// The indexes of a column of labels (-1: none) in their order.
function sortedBy(label) {
  const starts = new Int32Array(label.reduce((most, one) => Math.max(most, one), -1) + 3);
  for (let i = 0; i < label.length; i++) starts[label[i] + 2]++;
  for (let one = 1; one < starts.length; one++) starts[one] += starts[one - 1];
  const sorted = new Int32Array(label.length);
  for (let i = 0; i < label.length; i++) sorted[starts[label[i] + 1]++] = i;
  return sorted;
}

function zeroClasses(n, classes) {
  return Array.from({ length: classes }, () => new Float64Array(n));
}

// Times of the rows that `wanted` (by thread; null for all) lets through. Of GPU time there are two
// classes more, which have no width: how many runs are known to be a row's, and their time.
function weigh(tree, data, wanted) {
  const more = data.row_runs ? [data.row_runs, data.row_run_ns] : [];
  const klass = zeroClasses(tree.n, data.classes + more.length);
  const { row_node: node, row_thread: thread, row_kind: kind, row_ns: ns } = data;
  const klassOf = data.kinds.map((entry) => entry.klass);
  for (let r = 0; r < node.length; r++) {
    if (wanted !== null && !wanted[thread[r]]) continue;
    klass[klassOf[kind[r]]][node[r]] += ns[r];
    for (let k = 0; k < more.length; k++) klass[data.classes + k][node[r]] += more[k][r];
  }
  for (const times of klass) {
    for (let i = tree.n - 1; i > 0; i--) times[tree.parent[i]] += times[i];
  }
  return { ...tree, klass };
}

// Adds what a flame graph of one view needs: total, off-CPU part and position on the x axis.
function lay(tree, view) {
  const total = new Float64Array(tree.n);
  const off = new Float64Array(tree.n);
  for (const k of VIEW_CLASSES[view]) {
    for (let i = 0; i < tree.n; i++) {
      total[i] += tree.klass[k][i];
      if (k > 0 && !isOfDevices(view)) off[i] += tree.klass[k][i];
    }
  }
  const x = new Float64Array(tree.n);
  const next = new Float64Array(tree.n);
  for (let i = 1; i < tree.n; i++) {
    const up = tree.parent[i];
    next[i] = x[i] = next[up];
    next[up] += total[i];
  }
  return { ...tree, view, total, off, x };
}

function selfTimes(tree) {
  const own = Float64Array.from(tree.total);
  for (let i = 1; i < tree.n; i++) own[tree.parent[i]] -= tree.total[i];
  return own;
}

// Builds a merged tree level by level, like agent/reports/tree.py. Each item stands at a node of
// `base`; `move` says where it goes next. Nodes under `least` ns are kept but not followed.
function grow(base, rootLabel, items, move, least) {
  const radix = base.labels + 1;
  const parent = [-1];
  const label = [rootLabel];
  const classes = base.klass.length;
  const klass = Array.from({ length: classes }, () => [0]);
  for (const item of items) for (let k = 0; k < classes; k++) klass[k][0] += item.ns[k];
  let level = items.flatMap((item) => move({ node: item.node, ns: item.ns, at: 0 }));
  let unfollowed = 0;
  while (level.length) {
    const ids = new Map();
    for (const item of level) ids.set(item.at * radix + base.label[item.node], 0);
    for (const key of Float64Array.from(ids.keys()).sort()) {
      ids.set(key, parent.length);
      parent.push(Math.floor(key / radix));
      label.push(key % radix);
      for (const times of klass) times.push(0);
    }
    for (const item of level) {
      item.at = ids.get(item.at * radix + base.label[item.node]);
      for (let k = 0; k < classes; k++) klass[k][item.at] += item.ns[k];
    }
    const wide = (item) => {
      let ns = 0;
      for (const k of keptClasses(base.view)) ns += klass[k][item.at];
      return ns >= least;
    };
    const next = [];
    for (const item of level) {
      const moved = move(item);
      if (!moved.length) continue;
      if (wide(item)) for (const one of moved) next.push(one);
      else unfollowed++;
    }
    level = next;
  }
  return { ...preorder(parent, label, klass), labels: base.labels, unfollowed };
}

// Renumbers nodes that are ordered by level, siblings together and in order of label.
function preorder(parent, label, klass) {
  const n = parent.length;
  const size = new Int32Array(n).fill(1);
  for (let i = n - 1; i > 0; i--) size[parent[i]] += size[i];
  const position = new Int32Array(n);
  const next = new Int32Array(n);
  const tree = {
    n, label: new Int32Array(n), parent: new Int32Array(n), depth: new Int32Array(n),
    end: new Int32Array(n), klass: zeroClasses(n, klass.length), position,
  };
  for (let i = 0; i < n; i++) {
    const up = parent[i];
    if (i > 0) { position[i] = next[up]; next[up] += size[i]; }
    next[i] = position[i] + 1;
    const at = position[i];
    tree.label[at] = label[i];
    tree.parent[at] = i > 0 ? position[up] : -1;
    tree.depth[at] = i > 0 ? tree.depth[position[up]] + 1 : 0;
    tree.end[at] = at + size[i];
    for (let k = 0; k < klass.length; k++) tree.klass[k][at] = klass[k][i];
  }
  return tree;
}

function isThere(view, klass, node) {
  return keptClasses(view).some((k) => klass[k][node] > 0);
}

function timesAt(tree, node) {
  return tree.klass.map((times) => times[node]);
}

function moveUp(tree) {
  return (item) => {
    const up = item.moved ? tree.parent[item.node] : item.node;
    return up > 0 ? [{ node: up, ns: item.ns, at: item.at, moved: true }] : [];
  };
}

function moveDown(tree) {
  return (item) => {
    const below = [];
    for (let c = item.node + 1; c < tree.end[item.node]; c = tree.end[c]) {
      if (isThere(tree.view, tree.klass, c)) below.push({ node: c, ns: timesAt(tree, c), at: item.at });
    }
    return below;
  };
}

// Merged from the leaf: below the whole are the frames that time was spent in.
function inverted(tree, leastShare) {
  const ownByClass = tree.klass.map((times) => selfTimes({ ...tree, total: times }));
  const items = [];
  for (let i = 1; i < tree.n; i++) {
    if (isThere(tree.view, ownByClass, i)) items.push({ node: i, ns: ownByClass.map((times) => times[i]) });
  }
  return grow(tree, -1, items, moveUp(tree), tree.total[0] * leastShare);
}

// The outermost frames of a function: a frame within another of the same function is part of it.
function occurrences(tree, label) {
  const found = [];
  for (let i = 1; i < tree.n; i = tree.label[i] === label ? tree.end[i] : i + 1) {
    if (tree.label[i] === label && isThere(tree.view, tree.klass, i)) found.push(i);
  }
  return found;
}

function sandwich(tree, label, leastShare) {
  const items = occurrences(tree, label).map((node) => ({ node, ns: timesAt(tree, node) }));
  const least = items.reduce((sum, item) => sum + tree.total[item.node], 0) * leastShare;
  const above = items.map((item) => ({ node: tree.parent[item.node], ns: item.ns }));
  return {
    callers: grow(tree, label, above, moveUp(tree), least),
    callees: grow(tree, label, items, moveDown(tree), least),
  };
}

// The node that has the self time of each node in the table of functions: time off the CPU is that
// of the innermost frame of the highest rank, see own_code.py. `rank` is by label; null: each its own.
function chargedNodes(tree, rank) {
  const charged = new Int32Array(tree.n);
  for (let i = 0; i < tree.n; i++) charged[i] = i;
  if (rank === null) return charged;
  for (let i = 1; i < tree.n; i++) {
    const best = charged[tree.parent[i]];
    if (best > 0 && rank[tree.label[i]] < rank[tree.label[best]]) charged[i] = best;
  }
  return charged;
}

// Self and total time of each label; nested frames of one function count once.
function totalsByLabel(tree, charged = chargedNodes(tree, null)) {
  const own = new Float64Array(tree.labels);
  const total = new Float64Array(tree.labels);
  const openUntil = new Int32Array(tree.labels);
  const self = selfTimes(tree);
  const selfOff = selfTimes({ ...tree, total: tree.off });
  for (let i = 1; i < tree.n; i++) {
    const label = tree.label[i];
    own[label] += self[i] - selfOff[i];
    own[tree.label[charged[i]]] += selfOff[i];
    if (i < openUntil[label]) continue;
    total[label] += tree.total[i];
    openUntil[label] = tree.end[i];
  }
  return { own, total };
}

// What the self time of each label was off the CPU for: Map of label to Map of words to ns.
function waitsByLabel(tree, data, wanted, charged) {
  const { row_node: node, row_thread: thread, row_kind: kind, row_ns: ns } = data;
  const classOf = data.kinds.map(({ klass }) => (VIEW_CLASSES[tree.view].includes(klass) ? klass : 0));
  // First by number: there are many rows, and few words.
  const [kinds, labels] = [data.kinds.length, tree.labels + 1];
  const sums = new Map();
  for (let r = 0; r < node.length; r++) {
    const klass = classOf[kind[r]];
    if (!klass || !ns[r] || (wanted !== null && !wanted[thread[r]])) continue;
    const at = charged[node[r]];
    const waiting = klass === 1 ? waitingIn(tree, data, node[r], at) : -1;
    const key = ((waiting + 1) * kinds + kind[r]) * labels + tree.label[at] + 1;
    sums.set(key, (sums.get(key) || 0) + ns[r]);
  }
  const found = new Map();
  for (const [key, sum] of sums) {
    const label = (key % labels) - 1;
    const which = Math.floor(key / labels);
    const waiting = Math.floor(which / kinds) - 1;
    const words = data.kinds[which % kinds].name.replace(/^\[(blocked: )?|\]$/g, "") + (waiting >= 0 ? ` (${data.names[waiting].split(".")[0]})` : "");
    if (!found.has(label)) found.set(label, new Map());
    found.get(label).set(words, (found.get(label).get(words) || 0) + sum);
  }
  return found;
}

// The label of the function of the kernel or a library that waits, between the node and the one it is
// charged to; -1 for none.
function waitingIn(tree, data, node, charged) {
  for (let i = node; i > charged; i = tree.parent[i]) {
    const rank = data.rank[tree.label[i]];
    if (rank > RANK_SCHEDULER) return rank <= RANK_LIBRARY ? tree.label[i] : -1;
  }
  return -1;
}

// Time within frames that match (by label), under `node`; nested matches count once.
function matchedTime(tree, matches, node) {
  for (let up = node; up >= 0; up = tree.parent[up]) {
    if (tree.label[up] >= 0 && matches[tree.label[up]]) return tree.total[node];
  }
  let sum = 0;
  for (let i = node + 1; i < tree.end[node]; ) {
    if (matches[tree.label[i]]) { sum += tree.total[i]; i = tree.end[i]; } else i++;
  }
  return sum;
}

// On-CPU self time by category of frame, and off-CPU time by kind of wait.
function legendTotals(tree, data, wanted) {
  const { row_node: node, row_thread: thread, row_kind: kind, row_ns: ns } = data;
  const onCpu = new Float64Array(tree.labels + 1); // by label, the last of what has none
  const byKind = new Float64Array(data.kinds.length);
  for (let r = 0; r < node.length; r++) {
    if (wanted !== null && !wanted[thread[r]]) continue;
    const label = tree.label[node[r]];
    if (kind[r] === 0) onCpu[label >= 0 ? label : tree.labels] += ns[r];
    else byKind[kind[r]] += ns[r];
  }
  // Each category that occurs is listed, also where nothing ended in it.
  const byCategory = new Map(onCpu[tree.labels] ? [[-1, onCpu[tree.labels]]] : []);
  for (const label of occurring(tree.label.subarray(1), tree.labels)) {
    const category = data.category[label];
    byCategory.set(category, (byCategory.get(category) || 0) + onCpu[label]);
  }
  return { byCategory, byKind: new Map([...byKind.entries()].filter(([, sum]) => sum)) };
}

// The node that a path of labels leads to from the root, as far as it goes.
function follow(tree, path) {
  let node = 0;
  for (const label of path) {
    let child = node + 1;
    // What has no time in what is shown is not there.
    while (child < tree.end[node] && (tree.label[child] !== label || !tree.total[child])) child = tree.end[child];
    if (child >= tree.end[node]) break;
    node = child;
  }
  return node;
}

function pathTo(tree, node) {
  const path = [];
  for (let i = node; i > 0; i = tree.parent[i]) path.push(tree.label[i]);
  return path.reverse();
}

// A time since the start: "2.5 s", of recordings that are longer than two minutes "1:02:03".
function moment(seconds, whole) {
  if (whole <= 120) return Number(seconds.toFixed(3)) + " s";
  const two = (n) => String(n).padStart(2, "0");
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Number((seconds % 60).toFixed(0))];
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

// A time of day, UTC; with its date where that is not clear from the whole, from and to in seconds of Unix.
function clock(unix, whole) {
  const text = new Date(Math.round(unix) * 1000).toISOString();
  const day = (seconds) => Math.floor(seconds / 86400);
  return (day(whole[0]) === day(whole[1]) ? "" : text.slice(5, 10) + " ") + text.slice(11, 19);
}

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "us"]];

function duration(ns) {
  for (const [size, unit] of UNITS) {
    if (ns >= size) {
      const figure = (ns / size).toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
      return figure + " " + unit;
    }
  }
  return ns + " ns";
}

function counted(n, noun, plural = noun + "s") {
  return n.toLocaleString("en-US") + " " + (n === 1 ? noun : plural);
}

// What a frame of a view weighs, with its unit.
function amount(view, weight) {
  return view === "gpu" ? counted(weight, "sample") : duration(weight);
}

function percent(part, whole) {
  return (whole > 0 ? (100 * part) / whole : 0).toFixed(2) + " %";
}

if (typeof module !== "undefined") {
  module.exports = {
    unpack, within, ofThreads, activity, moment, clock, plainTree, hiddenLabels, selected, weigh, lay, inverted, sandwich, addGroups, chargedNodes, totalsByLabel, waitsByLabel, matchedTime, legendTotals,
    follow, pathTo, selfTimes, arranged, duration, percent, counted, amount,
  };
}
