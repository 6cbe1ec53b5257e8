// SPDX-License-Identifier: Apache-2.0
// The strip: what went on in each second, and the time range that the rest of the page is of.
"use strict";

const GUTTER_PX = 148; // for the names of lanes
const LANE_PX = 30;
const LANE_GAP_PX = 5;
const MODELS_TOLD = 4; // a machine with more devices mostly has them of one model
const KEY_PX = 8; // what bars and lines of a lane look like, before their names
const AXIS_PX = 16;
const TICK_PX = 90; // at least, between two labels of the axis
const DRAG_PX = 3; // less is a click
const PAGE_BUCKETS = 10; // that Page Up and Page Down go

// Lengths between labels of an axis, in seconds.
const TICKS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

class Strip {
  constructor(page) {
    this.page = page;
    this.time = page.settings.time;
    this.whole = this.time.end_s;
    this.begin = page.settings.fleet?.begin_s; // in seconds of Unix
    this.canvas = byId("strip-canvas");
    this.dragged = null; // buckets [from, to) while the pointer is down
    this.lanes = null;
    this.lanesOf = ""; // the choice of threads and filters that `lanes` are of
    byId("strip").hidden = false;
    this.listen();
  }

  // ---- time ----------------------------------------------------------------------------------

  startOf(bucket) {
    return Math.min(this.time.start_s + bucket * this.time.width_s, this.whole);
  }

  // By what weights of buckets [from, to) are divided for a rate. A recording may end milliseconds
  // after a bucket has begun: the rate of so little says nothing.
  secondsOf(from, to = from + 1) {
    return Math.max(this.startOf(to) - this.startOf(from), this.time.width_s / 2);
  }

  // A recording counts from its start; a fleet, whose hosts have one clock, by the time of day.
  moment(seconds) {
    if (!this.begin) return moment(seconds, this.whole);
    return clock(this.begin + seconds, [this.begin + this.time.start_s, this.begin + this.whole]);
  }

  rangeWords([from, to]) {
    return `${this.moment(this.startOf(from))} to ${this.moment(this.startOf(to))}${this.begin ? " UTC" : ""}`;
  }

  // ---- lanes ---------------------------------------------------------------------------------

  // A lane has weights by part and bucket; `rate` says what a weight is in a second of it.
  makeLanes() {
    const { settings, sets } = this.page;
    const { buckets, launches } = this.time;
    const plain = (n, digits = 0) => n.toLocaleString("en-US", { maximumFractionDigits: digits });
    const perSecond = (n, seconds) => `${plain(n / seconds, n / seconds < 10 ? 1 : 0)} a second`;
    const times = activity(sets.time.data, buckets, this.page.wanted("time"));
    const cpus = (ns, seconds) => `${(ns / 1e9 / seconds).toFixed(2)} CPUs`;
    const threads = (ns, seconds) => `${(ns / 1e9 / seconds).toFixed(1)} threads`;
    const lanes = [
      { name: "On CPU", parts: TIME_CLASSES.slice(0, 1), fills: settings.class_fills.slice(0, 1), series: times.slice(0, 1), rate: cpus, say: duration },
      { name: "Waiting", parts: TIME_CLASSES.slice(1), fills: settings.class_fills.slice(1), series: times.slice(1), rate: threads, say: duration },
    ];
    if (sets.device) {
      const { names, fills } = settings.stalls;
      lanes.push({ name: "GPU samples", parts: names, fills, series: activity(sets.device.data, buckets, this.page.wanted("device")), rate: perSecond, say: plain });
    } else if (!sets.gputime && launches.length) {
      lanes.push({ name: "GPU launches", parts: ["launches"], fills: settings.stalls.fills.slice(0, 1), series: [launches], rate: perSecond, say: plain });
    }
    if (sets.gputime) {
      const atOnce = (ns, seconds) => `${(ns / 1e9 / seconds).toFixed(2)} kernels at once`;
      const fills = [settings.stalls.fills[0], settings.stalls.fills[7], settings.stalls.fills[8]];
      lanes.push({ name: "GPU time", parts: sets.gputime.data.certainties, fills, series: activity(sets.gputime.data, buckets, this.page.wanted("gputime")), rate: atOnce, say: duration });
    }
    for (const lane of lanes) {
      lane.total = new Float64Array(buckets);
      for (const part of lane.series) part.forEach((weight, b) => { lane.total[b] += weight; });
      lane.most = 0; // the bucket with the highest rate
      for (let b = 1; b < buckets; b++) if (this.height(lane, b) > this.height(lane, lane.most)) lane.most = b;
    }
    return [...lanes.filter((lane) => lane.total[lane.most] > 0), ...this.time.devices.map((device) => this.deviceLane(device))];
  }

  // A lane of how busy a device was, which is bars from nothing to all the time, and a line of how
  // much of its memory was in use. Either may be unknown, of a bucket or of all.
  deviceLane({ name, model, busy, used, total }) {
    const most = (values) => values.reduce((found, value) => (value === null ? found : Math.max(found ?? 0, value)), null);
    const percent = (permille) => `${(permille / 10).toFixed(0)} %`;
    const gib = (mib) => (mib / 1024).toFixed(mib < 10240 ? 1 : 0);
    const ofMemory = (mib) => `${gib(mib)} of ${gib(total)} GiB`;
    const words = (from, to) => {
      const seconds = busy.slice(from, to).map((share, at) => (share === null ? 0 : this.secondsOf(from + at)));
      const known = seconds.reduce((sum, length) => sum + length, 0);
      const mean = seconds.reduce((sum, length, at) => sum + length * (busy[from + at] ?? 0), 0) / known;
      const peak = most(busy.slice(from, to));
      const memory = most(used.slice(from, to));
      const isRange = to - from > 1;
      return [
        known ? `busy ${percent(mean)}${isRange ? ` (most ${percent(peak)})` : ""}` : "busy: not known",
        memory === null ? "memory: not known" : `memory ${isRange ? "up to " : ""}${ofMemory(memory)}`,
      ].join(", ");
    };
    const [peak, memory] = [most(busy), most(used)];
    return {
      name, model, busy, used, total, words,
      labels: [
        `${name} busy${peak === null ? ": not known" : `, most ${percent(peak)}`}`,
        memory === null ? "memory: not known" : ofMemory(memory),
      ],
      isBusyKnown: peak !== null,
      fill: this.page.settings.stalls.fills[0],
    };
  }

  height(lane, bucket) {
    return lane.total[bucket] / this.secondsOf(bucket);
  }

  // ---- drawing -------------------------------------------------------------------------------

  show() {
    const { threads, filters } = this.page.state;
    const choice = JSON.stringify([threads, filters]);
    if (!this.lanes || this.lanesOf !== choice) {
      this.lanesOf = choice;
      this.lanes = this.makeLanes();
    }
    this.paint();
    this.describe();
  }

  x(bucket) {
    const { start_s: start } = this.time;
    return GUTTER_PX + ((this.startOf(bucket) - start) * (this.width - GUTTER_PX)) / (this.whole - start);
  }

  paint() {
    const ratio = window.devicePixelRatio || 1;
    this.width = Math.max(GUTTER_PX + 50, byId("strip").clientWidth);
    const height = this.lanes.length * (LANE_PX + LANE_GAP_PX) + AXIS_PX;
    Object.assign(this.canvas, { width: Math.round(this.width * ratio), height: Math.round(height * ratio) });
    Object.assign(this.canvas.style, { width: this.width + "px", height: height + "px" });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    this.lanes.forEach((lane, at) => {
      const top = at * (LANE_PX + LANE_GAP_PX);
      if (lane.busy) this.paintDevice(pen, lane, top, color);
      else this.paintLane(pen, lane, top, color);
    });
    this.paintAxis(pen, height - AXIS_PX, color);
    this.paintRange(pen, height - AXIS_PX, color);
  }

  paintLane(pen, lane, top, color) {
    pen.fillStyle = color("--ink");
    pen.fillText(lane.name, 0, top + LANE_PX / 2 - 7);
    pen.fillStyle = color("--soft");
    pen.fillText("most " + lane.rate(lane.total[lane.most], this.secondsOf(lane.most)), 0, top + LANE_PX / 2 + 7, GUTTER_PX - 6);
    pen.fillStyle = color("--panel");
    pen.fillRect(GUTTER_PX, top, this.width - GUTTER_PX, LANE_PX);
    const scale = LANE_PX / this.height(lane, lane.most);
    const { buckets } = this.time;
    // Of buckets that share a pixel, the highest is drawn: a short peak is not to be lost.
    for (let b = 0; b < buckets; ) {
      let shown = b;
      let end = b + 1;
      for (; end < buckets && this.x(end + 1) - this.x(b) <= 1; end++) if (this.height(lane, end) > this.height(lane, shown)) shown = end;
      const [left, right] = [this.x(b), this.x(end)];
      let y = top + LANE_PX;
      lane.series.forEach((part, at) => {
        const px = (part[shown] / this.secondsOf(shown)) * scale;
        if (!(px > 0)) return;
        pen.fillStyle = lane.fills[at];
        pen.fillRect(left, y - px, right - left - (right - left > 4 ? 1 : 0), px);
        y -= px;
      });
      b = end;
    }
  }

  paintDevice(pen, lane, top, color) {
    const [first, second] = [top + LANE_PX / 2 - 7, top + LANE_PX / 2 + 7];
    pen.fillStyle = lane.fill;
    if (lane.isBusyKnown) pen.fillRect(0, first - 4, KEY_PX, 8);
    pen.fillStyle = color("--accent");
    if (lane.total) pen.fillRect(0, second - 1, KEY_PX, 2);
    pen.fillStyle = color("--ink");
    pen.fillText(lane.labels[0], KEY_PX + 4, first, GUTTER_PX - KEY_PX - 10);
    pen.fillStyle = color("--soft");
    pen.fillText(lane.labels[1], KEY_PX + 4, second, GUTTER_PX - KEY_PX - 10);
    pen.fillStyle = color("--panel");
    pen.fillRect(GUTTER_PX, top, this.width - GUTTER_PX, LANE_PX);
    const { buckets } = this.time;
    for (let b = 0; b < buckets; ) {
      // Of buckets that share a pixel, the highest is drawn, as in other lanes.
      let end = b + 1;
      while (end < buckets && this.x(end + 1) - this.x(b) <= 1) end++;
      const [left, right] = [this.x(b), this.x(end)];
      const px = (Math.max(0, ...lane.busy.slice(b, end)) / 1000) * LANE_PX;
      pen.fillStyle = lane.fill;
      pen.fillRect(left, top + LANE_PX - px, right - left - (right - left > 4 ? 1 : 0), px);
      b = end;
    }
    pen.strokeStyle = color("--accent");
    pen.lineWidth = 2;
    pen.beginPath();
    let isDown = false;
    for (let b = 0; b < buckets; b++) {
      if (lane.used[b] === null || !lane.total) { isDown = false; continue; }
      const y = top + 1 + (LANE_PX - 2) * (1 - lane.used[b] / lane.total);
      if (isDown) pen.lineTo(this.x(b), y);
      else pen.moveTo(this.x(b), y);
      pen.lineTo(this.x(b + 1), y);
      isDown = true;
    }
    pen.stroke();
  }

  paintAxis(pen, top, color) {
    const { start_s: start } = this.time;
    const seconds = this.whole - start;
    const room = Math.max(1, Math.floor((this.width - GUTTER_PX) / TICK_PX));
    const step = TICKS_S.find((s) => seconds / s <= room) || TICKS_S[TICKS_S.length - 1] * Math.ceil(seconds / room / TICKS_S[TICKS_S.length - 1]);
    pen.fillStyle = color("--soft");
    const shift = (this.begin || 0) % step; // labels are at whole minutes of the day
    for (let at = Math.ceil((start + shift) / step) * step - shift; at < this.whole; at += step) {
      const x = this.x((at - start) / this.time.width_s);
      const label = this.moment(at);
      pen.fillRect(x, top, 1, 4);
      if (x + 3 + pen.measureText(label).width <= this.width) pen.fillText(label, x + 3, top + 9);
    }
  }

  paintRange(pen, bottom, color) {
    const range = this.dragged || this.page.state.range;
    if (!range) return;
    const [left, right] = range.map((bucket) => this.x(bucket));
    pen.globalAlpha = 0.7;
    pen.fillStyle = color("--paper");
    pen.fillRect(GUTTER_PX, 0, left - GUTTER_PX, bottom);
    pen.fillRect(right, 0, this.width - right, bottom);
    pen.globalAlpha = 1;
    pen.strokeStyle = color("--accent");
    pen.lineWidth = 2;
    pen.strokeRect(left, 1, Math.max(2, right - left), bottom - 4);
  }

  // What is told of buckets [from, to): pairs (heading, text).
  facts(from, to) {
    const facts = [];
    const seconds = this.secondsOf(from, to);
    for (const lane of this.lanes) {
      if (lane.busy) {
        facts.push([lane.name, lane.words(from, to)]);
        if (this.time.devices.length <= MODELS_TOLD) facts.push(["", lane.model]);
        continue;
      }
      const weights = lane.series.map((part) => part.slice(from, to).reduce((sum, weight) => sum + weight, 0));
      const total = weights.reduce((sum, weight) => sum + weight, 0);
      facts.push([lane.name, `${lane.say(total)}, ${lane.rate(total, seconds)}`]);
      if (lane.series.length < 2) continue;
      weights.forEach((weight, at) => { if (weight) facts.push(["", `${lane.parts[at]} ${lane.say(weight)}`]); });
    }
    return facts;
  }

  // The line under the strip, which a screen reader reads out.
  describe() {
    const range = this.dragged || this.page.state.range;
    byId("range-clear").hidden = !this.page.state.range;
    const words = range ? this.facts(...range).filter(([name]) => name).map((fact) => fact.join(" ")) : [];
    const coarse = this.time.width_s > 1 ? ` A bar is ${moment(this.time.width_s, 0)}.` : "";
    const more = this.time.devices_left_out;
    const leftOut = more ? ` ${more} more devices are in aiflame stats.` : "";
    const seconds = range ? range.map((bucket) => Number(this.startOf(bucket).toFixed(3))) : [];
    const [from, to] = seconds.map((second) => (this.begin ? this.begin + second : `${second}s`));
    byId("range").title = range ? `aiflame ${this.begin ? "query flame" : "report CAPTURE"} --from ${from} --to ${to}` : "";
    byId("range").textContent = range
      ? `${this.rangeWords(range)}: ${words.join("; ")}` : `Drag over the strip to choose a time range.${coarse}${leftOut}`;
  }

  // ---- events --------------------------------------------------------------------------------

  choose(range, isStep) {
    const { buckets } = this.time;
    this.page.set({ range: range && range[1] - range[0] < buckets ? range : null }, isStep);
  }

  bucketAt(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const seconds = ((x - GUTTER_PX) * (this.whole - this.time.start_s)) / (this.width - GUTTER_PX);
    const at = Math.floor(seconds / this.time.width_s);
    return Math.max(0, Math.min(this.time.buckets - 1, at));
  }

  listen() {
    const on = (type, action) => this.canvas.addEventListener(type, action);
    on("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.down = { x: event.clientX, bucket: this.bucketAt(event) };
      this.canvas.setPointerCapture(event.pointerId);
    });
    on("pointermove", (event) => this.move(event));
    on("pointerup", () => {
      const chosen = this.dragged;
      this.down = this.dragged = null;
      if (chosen) this.choose(chosen, true);
    });
    on("pointercancel", () => { this.down = this.dragged = null; this.show(); });
    on("pointerleave", () => { byId("tip").hidden = true; });
    on("dblclick", () => this.choose(null, true));
    on("keydown", (event) => this.key(event));
    byId("range-clear").addEventListener("click", () => this.choose(null, true));
    new ResizeObserver(() => { if (this.lanes) this.paint(); }).observe(byId("strip"));
    DARK.addEventListener("change", () => this.paint());
  }

  move(event) {
    const bucket = this.bucketAt(event);
    if (this.down && (this.dragged || Math.abs(event.clientX - this.down.x) >= DRAG_PX)) {
      this.dragged = [Math.min(bucket, this.down.bucket), Math.max(bucket, this.down.bucket) + 1];
      this.paint();
      this.describe();
    }
    const shown = this.dragged || [bucket, bucket + 1];
    showLines(byId("tip"), event, this.rangeWords(shown), this.facts(...shown));
  }

  // The arrow keys move the range, with Shift its end.
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { buckets } = this.time;
    const range = this.page.state.range;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -PAGE_BUCKETS, PageDown: PAGE_BUCKETS, Home: -buckets, End: buckets };
    if (event.key === "Escape" && range) {
      event.stopPropagation(); // here it clears the range before anything else
      this.choose(null, true);
    } else if (event.key in steps) {
      const step = steps[event.key];
      let [from, to] = range || (step > 0 ? [-1, 0] : [buckets, buckets + 1]);
      if (!range && Math.abs(step) > 1) [from, to] = [0, 1];
      if (event.shiftKey && range) to = Math.max(from + 1, Math.min(buckets, to + step));
      else {
        const moved = Math.max(0, Math.min(buckets - (to - from), from + step));
        [from, to] = [moved, moved + to - from];
      }
      this.choose([from, to], false);
    } else return;
    event.preventDefault();
  }
}
