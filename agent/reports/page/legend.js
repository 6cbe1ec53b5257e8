// SPDX-License-Identifier: Apache-2.0
// The legend: what the colours mean, and how much of the flame graph each one is.
"use strict";

const NAMED_REASONS = 4; // of a category, in the vendor's words

// Whether a label is a mark for missing frames, and not a function that is called like one.
function isTruncation(settings, data, label) {
  return data.kind[label] === KIND_MARKER && Object.hasOwn(settings.truncated, data.names[label]);
}

class Legend {
  constructor(page) {
    this.page = page;
    this.body = byId("legend").tBodies[0];
  }

  add(fill, name, weight) {
    const { state, laid } = this.page;
    const row = this.body.insertRow();
    const swatch = element("span", null, { class: "swatch" });
    swatch.style.background = fill;
    row.insertCell().append(swatch, name);
    row.insertCell().textContent = weight === null ? "" : amount(state.view, weight);
    row.insertCell().textContent = weight === null ? "" : percent(weight, laid.total[0]);
    for (const cell of [row.cells[1], row.cells[2]]) cell.className = "figure";
  }

  show() {
    this.body.replaceChildren();
    const { view, color } = this.page.state;
    const isDevice = isOfDevices(view);
    byId("legend-note").textContent = view === "difference"
      ? "How a frame's share of all time, with what it calls, has changed from base to new. Widths are of new."
      : !isDevice
      ? "Warm part of a frame: its time on a CPU. Blue part: its time off the CPU."
      : view === "gpu" && color === "stall"
        ? "A device frame has the colour of its largest category, the stronger the larger its share; frames of the CPU are pale."
        : "Colours say what a frame is.";
    if (view === "difference") this.showChanges();
    else if (!isDevice) this.showTimes();
    else if (view === "gpu" && color === "stall") this.showStalls();
    else this.showKinds();
    this.showTruncated();
  }

  // The marks in the flame graph that stand for missing callers, most first, and what they mean.
  showTruncated() {
    const { settings, data, sums, state, laid } = this.page;
    const marks = data.names.flatMap((name, label) => (isTruncation(settings, data, label) && sums.total[label] ? [[name, sums.total[label]]] : []));
    const body = byId("truncated").querySelector("tbody");
    body.replaceChildren(...marks.sort((a, b) => b[1] - a[1]).flatMap(([name, weight]) => {
      const [row, below] = [element("tr", null), element("tr", null)];
      const figures = [amount(state.view, weight), percent(weight, laid.total[0])];
      row.append(element("td", name), ...figures.map((text) => element("td", text, { class: "figure" })));
      below.append(element("td", settings.truncated[name], { class: "meaning", colspan: 3 }));
      return [row, below];
    }));
    byId("truncated").hidden = !marks.length;
  }

  showTimes() {
    const { settings, data, state, legend: { byCategory, byKind } } = this.page;
    const middle = settings.on_fills[0].length >> 1;
    if (state.view !== "offcpu") {
      for (const [category, ns] of [...byCategory].sort((a, b) => b[1] - a[1] || a[0] - b[0])) {
        if (settings.is_wait[category]) continue; // the markers of waits are listed below
        const fill = category < 0 ? settings.whole_fills[0] : settings.on_fills[category][middle];
        this.add(fill, "on CPU: " + (settings.categories[category] || "cut"), ns);
      }
    }
    if (state.view !== "cpu") {
      for (const [kind, ns] of [...byKind].sort((a, b) => b[1] - a[1])) {
        this.add(settings.off_fills[data.kinds[kind].category][middle], "off CPU: " + data.kinds[kind].name, ns);
      }
    }
  }

  showChanges() {
    const { difference } = this.page.faces;
    for (const part of [1, 0.5, 0, -0.5, -1]) {
      const change = part * difference.most;
      const words = part > 0 ? ": grew" : part < 0 ? ": shrank" : ": unchanged";
      this.add(changeFace(difference, change).fill, points(change) + words, null);
    }
  }

  // Each category with the vendor's own words for what is in it.
  showStalls() {
    const { data, laid, faces: { stalls } } = this.page;
    const order = [...stalls.names.keys()].sort((a, b) => laid.klass[b][0] - laid.klass[a][0] || a - b);
    const words = data.kinds.map((kind) => kind.name);
    for (const category of order) {
      if (!laid.klass[category][0]) continue;
      const reasons = words.filter((_, kind) => data.kinds[kind].klass === category);
      const others = reasons.filter((reason) => reason !== stalls.names[category]);
      const named = others.slice(0, NAMED_REASONS).join(", ") + (others.length > NAMED_REASONS ? ", ..." : "");
      this.add(stalls.fills[category], stalls.names[category] + (named ? ": " + named : ""), laid.klass[category][0]);
    }
  }

  showKinds() {
    const { settings, plain, data } = this.page;
    const middle = settings.on_fills[0].length >> 1;
    const found = new Set(Array.from(plain.label.slice(1), (label) => data.category[label]));
    for (const category of [...found].sort((a, b) => a - b)) {
      this.add(settings.on_fills[category][middle], settings.categories[category], null);
    }
  }
}
