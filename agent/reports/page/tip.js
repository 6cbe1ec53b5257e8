// SPDX-License-Identifier: Apache-2.0
// What is told about one frame: in the tooltip, and in the line under the graph for the keyboard.
"use strict";

const TIME_CLASSES = ["on CPU", "blocked", "waiting to run", "preempted"];

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Pairs (heading, text); `ofWhole` names what the whole of the graph is.
function frameFacts(graph, node, ofWhole) {
  const { tree } = graph;
  const { view } = tree;
  if (graph.faces.difference) return differenceFacts(graph.faces.difference, timesAt(tree, node));
  const isDevice = view === "gpu";
  const names = { device: graph.faces.stalls.names, gputime: graph.faces.certainties, time: TIME_CLASSES }[setOf(view)];
  const [total, whole] = [tree.total[node], tree.total[0]];
  const up = tree.parent[node];
  let own = total;
  for (let c = node + 1; c < tree.end[node]; c = tree.end[c]) own -= tree.total[c];
  const lines = [
    [isDevice ? "samples" : "time", `${amount(view, total)}, ${percent(total, whole)} ${ofWhole}`],
  ];
  if (!isDevice) lines.push(["self", `${duration(own)}, ${percent(own, whole)} ${ofWhole}`]);
  if (up >= 0) lines.splice(1, 0, ["", `${percent(total, tree.total[up])} of the frame ${graph.rises ? "below" : "above"}`]);
  const classes = VIEW_CLASSES[view].filter((k) => tree.klass[k][node] > 0);
  if (isDevice) classes.sort((a, b) => tree.klass[b][node] - tree.klass[a][node]);
  for (const k of classes) {
    const ns = tree.klass[k][node];
    lines.push([names[k], `${amount(view, ns)}, ${percent(ns, total)} of the frame`]);
  }
  return lines;
}

function sourceFacts(data, label) {
  if (label < 0) return [];
  const { file, files, line_label: labels, line, line_ns: ns } = data;
  const name = files[file[label]];
  const rows = [];
  let sum = 0;
  for (let i = 0; i < labels.length; i++) if (labels[i] === label) { rows.push(i); sum += ns[i]; }
  if (!rows.length) return name ? [["file", name]] : [];
  return rows.map((i, at) => [at ? "" : data.isPart ? "hottest lines of the recording" : "hottest lines", `${name}:${line[i]} (${percent(ns[i], sum)} of these)`]);
}

function showTip(tip, graph, box, event, factsOf) {
  tip.hidden = !box;
  if (!box) return;
  if (tip.box !== box) {
    tip.box = box;
    fillTip(tip, box.more ? "narrow frames" : graph.nameOf(box.node), box.more
      ? [["frames", `${box.more.toLocaleString("en-US")}, together ${amount(graph.tree.view, box.ns)}; click to zoom in`]]
      : factsOf(box.node));
  }
  placeTip(tip, event);
}

// A tip that is not about a frame.
function showLines(tip, event, title, lines) {
  tip.hidden = false;
  tip.box = null;
  fillTip(tip, title, lines);
  placeTip(tip, event);
}

function fillTip(tip, title, lines) {
  tip.replaceChildren(element("strong", title));
  const table = element("table", null);
  for (const [name, text] of lines) {
    const row = table.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = text;
  }
  tip.append(table);
}

function placeTip(tip, event) {
  const room = { x: innerWidth - tip.offsetWidth - 8, y: innerHeight - tip.offsetHeight - 8 };
  const above = event.clientY - tip.offsetHeight - 12;
  const below = event.clientY + 18;
  tip.style.left = Math.max(0, Math.min(event.clientX + 14, room.x)) + "px";
  tip.style.top = Math.max(0, below > room.y ? above : below) + "px";
}
