// SPDX-License-Identifier: Apache-2.0
// One flame graph on a canvas. Only what is at least a pixel wide is looked at: narrower
// neighbours are drawn together as one strip, and what lies under a strip not at all, so the cost
// of a flame graph is bounded by its area, not by the recording.
"use strict";

const ROW_PX = 18;
const MIN_PX = 1;
const TEXT_PAD_PX = 4;
const MIN_CHARS = 3;

// Frames around the zoomed one are fainter: lighter on light paper, with the ink of all frames, and
// darker on dark paper, with the light one. Contrasts are then 4.5:1 at least, as elsewhere.
const DARK = matchMedia("(prefers-color-scheme: dark)");
const PATH = { light: { alpha: 0.6 }, dark: { alpha: 0.4, ink: "#ffffff" } };

class Graph {
  // `rises`: the root is at the bottom. `faces`: {names, on, off, hit} by label, colours as CSS; with
  // `byStall`, colours are those of device.js, with `difference` those of difference.js.
  constructor(pane, faces, { rises, label, onHover, onZoom, onSelect }) {
    this.pane = pane;
    this.faces = faces;
    this.rises = rises;
    this.events = { onHover, onZoom, onSelect };
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", label);
    this.spacer = document.createElement("div");
    this.spacer.append(this.canvas);
    pane.append(this.spacer);
    this.tree = null;
    this.zoomed = 0;
    this.selected = -1;
    this.hovered = null;
    this.matches = null;
    this.frame = 0;
    pane.addEventListener("scroll", () => this.paintSoon(), { passive: true });
    new ResizeObserver(() => this.layOut()).observe(pane);
    DARK.addEventListener("change", () => this.paintSoon());
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => this.hover(null));
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.paintSoon());
    this.canvas.addEventListener("blur", () => this.paintSoon());
  }

  show(tree, zoomed) {
    this.tree = tree;
    this.zoomed = zoomed;
    this.selected = -1;
    this.layOut();
    if (this.rises) this.pane.scrollTop = this.pane.scrollHeight;
  }

  setMatches(matches) {
    this.matches = matches;
    this.paintSoon();
  }

  // Finds the boxes of this zoom: {node, x, width, row}, `more` is how many share a strip.
  layOut() {
    if (!this.tree) return;
    const width = Math.max(1, this.pane.clientWidth);
    const { total, x, parent, depth } = this.tree;
    const boxes = [];
    for (let up = parent[this.zoomed]; up >= 0; up = parent[up]) {
      boxes.push({ node: up, x: 0, width, row: depth[up], more: 0, isPath: true });
    }
    const scale = total[this.zoomed] > 0 ? width / total[this.zoomed] : 0;
    const origin = x[this.zoomed];
    const todo = [this.zoomed];
    let rows = 1;
    while (todo.length) {
      const node = todo.pop();
      const row = depth[node];
      rows = Math.max(rows, row + 1);
      boxes.push({ node, x: (x[node] - origin) * scale, width: total[node] * scale, row, more: 0 });
      for (const box of this.below(node, scale, origin)) {
        if (box.more) boxes.push(box);
        else todo.push(box.node);
        rows = Math.max(rows, row + 2);
      }
    }
    this.boxes = boxes;
    this.hover(null);
    this.rows = rows;
    this.width = width;
    this.spacer.style.height = rows * ROW_PX + "px";
    this.paintSoon();
  }

  // The frames above or below `node` that are wide enough, and strips of those between them.
  below(node, scale, origin) {
    const { total, x, end, depth } = this.tree;
    const found = [];
    let strip = null;
    for (let c = node + 1; c < end[node]; c = end[c]) {
      const width = total[c] * scale;
      if (width >= MIN_PX) {
        found.push({ node: c, more: 0 });
        strip = null;
      } else if (width > 0) {
        if (strip === null) {
          strip = { node: c, x: (x[c] - origin) * scale, width: 0, row: depth[c], more: 0, ns: 0 };
          found.push(strip);
        }
        strip.more++;
        strip.ns += total[c];
        strip.width += width;
      }
    }
    return found;
  }

  paintSoon() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paint());
  }

  top(box) {
    const row = this.rises ? this.rows - 1 - box.row : box.row;
    return row * ROW_PX - this.pane.scrollTop;
  }

  paint() {
    this.frame = 0;
    if (!this.tree) return;
    const height = Math.min(this.pane.clientHeight || this.rows * ROW_PX, this.rows * ROW_PX);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = this.width + "px";
    this.canvas.style.height = height + "px";
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
    pen.textBaseline = "middle";
    this.charPx = pen.measureText("MMMMMMMMMM").width / 10;
    for (const box of this.boxes) {
      const y = this.top(box);
      if (y > -ROW_PX && y < height) this.paintBox(pen, box, y);
    }
    this.paintOutline(pen, this.hovered, 1);
    if (document.activeElement === this.canvas) {
      this.paintOutline(pen, this.boxOf(this.selected >= 0 ? this.selected : this.zoomed), 2);
    }
  }

  paintBox(pen, box, y) {
    const { faces, tree } = this;
    const label = tree.label[box.node];
    const gap = box.width > 3 ? 0.7 : 0; // keeps neighbours apart where there is room
    const width = box.width - gap;
    const total = tree.total[box.node];
    const offShare = total > 0 ? tree.off[box.node] / total : 0;
    const face = this.faceOf(box.node);
    const path = DARK.matches ? PATH.dark : PATH.light;
    pen.globalAlpha = box.isPath ? path.alpha : 1;
    if (this.isHit(label)) {
      pen.fillStyle = faces.hit;
      pen.fillRect(box.x, y, width, ROW_PX - 1);
    } else {
      pen.fillStyle = face ? face.fill : label < 0 ? faces.whole[0] : faces.on[label];
      pen.fillRect(box.x, y, width * (1 - offShare), ROW_PX - 1);
      pen.fillStyle = label < 0 ? faces.whole[1] : faces.off[label];
      pen.fillRect(box.x + width * (1 - offShare), y, width * offShare, ROW_PX - 1);
    }
    pen.globalAlpha = 1;
    const columns = Math.floor((box.width - 2 * TEXT_PAD_PX) / this.charPx);
    if (box.more || columns < MIN_CHARS) return;
    if (box.isPath) pen.fillStyle = path.ink || faces.ink;
    else pen.fillStyle = face && !this.isHit(label) ? face.ink : faces.ink;
    pen.fillText(fitted(this.nameOf(box.node), columns), box.x + TEXT_PAD_PX, y + ROW_PX / 2, box.width - TEXT_PAD_PX);
  }

  // The colours of a node, where they are not those of what its frame is.
  faceOf(node) {
    const { faces, tree } = this;
    if (faces.difference) return changeFace(faces.difference, changeOf(faces.difference, timesAt(tree, node)));
    return faces.byStall ? stallFace(faces, tree, node) : null;
  }

  paintOutline(pen, box, width) {
    if (!box) return;
    pen.strokeStyle = this.faces.ink;
    pen.lineWidth = width + 2;
    const rectangle = [box.x + 1, this.top(box) + 1, Math.max(1, box.width - 3), ROW_PX - 3];
    pen.strokeRect(...rectangle);
    pen.strokeStyle = "#ffffff";
    pen.lineWidth = width;
    pen.strokeRect(...rectangle);
  }

  isHit(label) {
    return this.matches !== null && label >= 0 && this.matches[label] === 1;
  }

  nameOf(node) {
    const label = this.tree.label[node];
    return label < 0 ? "all" : this.faces.names[label];
  }

  boxOf(node) {
    return this.boxes.find((box) => box.node === node && !box.more) || null;
  }

  boxAt(event) {
    const canvas = this.canvas.getBoundingClientRect();
    const x = event.clientX - canvas.left;
    const y = event.clientY - canvas.top;
    return this.boxes.find((box) => {
      const top = this.top(box);
      return y >= top && y < top + ROW_PX && x >= box.x && x < box.x + box.width;
    }) || null;
  }

  hover(event) {
    const box = event ? this.boxAt(event) : null;
    if (box !== this.hovered) this.paintSoon();
    this.hovered = box;
    this.events.onHover(this, box, event);
  }

  click(event) {
    const box = this.boxAt(event);
    this.canvas.focus({ preventScroll: true });
    // A strip opens the frame that it lies on: its own are too narrow to tell apart.
    if (box) this.zoom(box.more ? this.tree.parent[box.node] : box.node);
  }

  zoom(node) {
    this.zoomed = node;
    this.selected = node;
    this.layOut();
    this.reveal(node);
    this.events.onZoom(this, node);
  }

  select(node) {
    this.selected = node;
    this.reveal(node);
    this.paintSoon();
    this.events.onSelect(this, node);
  }

  // Scrolls so that the row of `node` can be seen.
  reveal(node) {
    const box = this.boxOf(node);
    if (!box) return;
    const top = this.top(box);
    const room = this.pane.clientHeight;
    if (top < 0) this.pane.scrollTop += top;
    else if (top + ROW_PX > room) this.pane.scrollTop += top + ROW_PX - room;
  }

  // Where an arrow key leads from the selected frame, -1 for nowhere.
  neighbour(key) {
    const { tree } = this;
    const node = this.selected >= 0 ? this.selected : this.zoomed;
    const towardsRoot = this.rises ? "ArrowDown" : "ArrowUp";
    if (key === "Home") return this.zoomed;
    if (key === towardsRoot) return tree.parent[node];
    const isSibling = key === "ArrowLeft" || key === "ArrowRight";
    const up = isSibling ? tree.parent[node] : node;
    if (up < 0) return -1;
    const drawn = [];
    for (let c = up + 1; c < tree.end[up]; c = tree.end[c]) if (this.isDrawn(c)) drawn.push(c);
    if (!isSibling) return drawn.reduce((best, c) => (best < 0 || tree.total[c] > tree.total[best] ? c : best), -1);
    const at = drawn.indexOf(node) + (key === "ArrowLeft" ? -1 : 1);
    return at >= 0 && at < drawn.length ? drawn[at] : -1;
  }

  isDrawn(node) {
    return this.tree.total[node] * (this.width / this.tree.total[this.zoomed]) >= MIN_PX;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") {
      this.zoom(this.selected >= 0 ? this.selected : this.zoomed);
    } else if (event.key === "Backspace") {
      this.zoom(Math.max(0, this.tree.parent[this.zoomed]));
    } else if (event.key.startsWith("Arrow") || event.key === "Home") {
      const node = this.neighbour(event.key);
      if (node >= 0) this.select(node);
    } else return;
    event.preventDefault();
  }
}

function fitted(name, columns) {
  if (name.length <= columns) return name;
  return name.slice(0, columns - 2) + "..";
}
