// SPDX-License-Identifier: Apache-2.0
// The page: what is shown (the state, kept in the address), and the controls that change it.
// Names come from the profiled processes: they reach the document as text only.
"use strict";

// Merged trees stop following frames under this share: 0.005 % is a tenth of a pixel.
const LEAST_SHARE = 0.00005;

const byId = (id) => document.getElementById(id);
const VIEW_NAMES = { wall: "wall time", cpu: "CPU time", offcpu: "off-CPU time", gpu: "device samples", gputime: "GPU time", difference: "time of new" };
const wholeWords = (view, whole) => (view === "gpu" ? counted(whole, "device sample") : `${duration(whole)} of ${VIEW_NAMES[view]}`);

const MERGES = ["process", "comm", "cgroup", "container"]; // as Merge in base.py, but none

const viewOfKey = (key) => (/^[1-9]$/.test(key) ? Object.keys(VIEW_CLASSES)[key - 1] : undefined);
const sameRange = (a, b) => String(a) === String(b);

class Page {
  // `sets`: the data of times, and of device samples and GPU time where there are any; or that of a
  // difference.
  constructor(settings, sets) {
    this.settings = settings;
    this.sets = {};
    this.groups = sets.time && !settings.fleet ? this.makeGroups(sets.time) : {};
    for (const [name, data] of Object.entries(sets)) {
      const renames = addGroups(data, this.groups);
      this.sets[name] = { data, renames, faces: this.makeFaces(data) };
    }
    this.use(sets.time ? "time" : "difference");
    const { faces } = this;
    const events = {
      onHover: (graph, box, event) => showTip(byId("tip"), graph, box, event, (node) => this.facts(graph, node)),
      onZoom: (graph) => this.zoomed(graph),
      onSelect: (graph, node) => this.describe(graph, node),
    };
    this.graph = new Graph(byId("graph"), faces, { rises: false, label: "Flame graph. Arrow keys move, Enter zooms.", ...events });
    this.callers = new Graph(byId("callers"), faces, { rises: true, label: "Callers. Arrow keys move, Enter zooms.", ...events });
    byId("frames").hidden = !settings.has_python;
    for (const view of ["gpu", "gputime"]) document.querySelector(`[data-view="${view}"]`).hidden = !sets[setOf(view)];
    byId("views").hidden = !sets.time;
    this.legendTable = new Legend(this);
    this.subtitle = byId("whole").textContent;
    this.strip = settings.time ? new Strip(this) : null;
    this.filters = settings.fleet ? new Filters(this) : null; // of a fleet, in place of threads
    this.graphNote = byId("graph-note").textContent;
    byId("merge-choice").hidden = Boolean(this.filters) || !sets.time || this.processesOf(sets.time).size < 2;
    this.listen();
    this.recall();
  }

  makeFaces(data) {
    const { settings } = this;
    const shaded = (table) => data.names.map((_, i) => table[data.category[i]][data.shade[i]]);
    return {
      names: data.names, on: shaded(settings.on_fills), off: shaded(settings.off_fills),
      whole: settings.whole_fills, hit: settings.hit_fill, ink: settings.ink, stalls: settings.stalls,
      certainties: data.certainties || [],
      kindOf: Array.from(data.category, (category) => settings.stall_kinds[category]),
    };
  }

  // By choice of what is one, the names of processes, and which each process has.
  makeGroups(data) {
    const groups = {};
    for (const merge of MERGES) {
      const group = data[merge + "_group"];
      groups[merge] = { names: data[merge + "_names"], group, of: new Map(data.processes.map((name, i) => [name, group[i]])) };
    }
    return groups;
  }

  processesOf(data) {
    return new Set(occurring(data.row_thread, data.threads.length).map((thread) => data.threads[thread].process));
  }

  // The number of what each process is part of.
  groupOf(process) {
    const groups = this.groups[this.state.merge];
    return groups ? groups.group[process] : process;
  }

  // Chooses the data set; numbers of labels are of one set only.
  use(name) {
    if (this.set_ === name) return;
    const set = this.sets[name];
    this.set_ = name;
    this.data = set.data;
    this.faces = set.faces;
    this.whole = set.whole = set.whole || plainTree(set.data);
    this.plain = null;
    this.sort = { by: name === "device" ? "total" : "own", up: false }; // samples end in offsets
    for (const graph of [this.graph, this.callers]) if (graph) graph.faces = set.faces;
  }

  fillThreads() {
    const { data } = this.sets.time || this.sets.difference;
    const { merge } = this.state;
    this.counted = occurring(data.row_thread, data.threads.length);
    this.threadGroups = [];
    this.showThreads("");
    if (this.filters) return; // a fleet has thousands, which only its labels tell apart
    const found = new Map(); // of what is one: its name, and by the name of threads the first and how many
    for (const i of this.counted) {
      const thread = data.threads[i];
      const group = this.groupOf(thread.process);
      const names = this.groups[merge]?.names || data.processes;
      if (!found.has(group)) found.set(group, { name: names[group], process: thread.process, threads: new Map() });
      const { threads } = found.get(group);
      const name = this.threadName(thread);
      threads.set(name, [threads.get(name)?.[0] ?? i, (threads.get(name)?.[1] || 0) + 1]);
    }
    this.threadGroups = [...found].sort(([a], [b]) => a - b).map(([, { name, process, threads }]) => ({
      name,
      entries: [["p" + process, "all of " + name], ...[...threads].map(([own, [i, count]]) => ["t" + i, own + (count > 1 ? ` (${counted(count, "thread")})` : "")])],
    }));
    byId("thread-search").value = "";
    byId("thread-search").hidden = this.threadGroups.reduce((sum, { entries }) => sum + entries.length, 0) <= SEARCHED_VALUES;
    this.showThreads("");
  }

  // Fills the list of threads with those whose name, or that of their process, has a text in it, and
  // the chosen one.
  showThreads(text) {
    const select = byId("threads");
    const sought = text.toLowerCase();
    select.replaceChildren(element("option", "all", { value: "" }));
    for (const { name, entries } of this.threadGroups) {
      const isWhole = name.toLowerCase().includes(sought);
      const wanted = entries.filter(([value, own]) => isWhole || own.toLowerCase().includes(sought) || value === this.state.threads);
      if (!wanted.length) continue;
      const group = element("optgroup", null, { label: name });
      group.append(...wanted.map(([value, own]) => element("option", own, { value })));
      select.append(group);
    }
    select.value = this.state.threads;
  }

  // Enter chooses the first thread that was found.
  threadKey(event) {
    if (event.key === "Escape" && event.target.value) {
      event.target.value = "";
      this.showThreads("");
      event.stopPropagation();
    } else if (event.key === "Enter" && event.target.value) {
      const first = [...byId("threads").options].find((option) => option.value && option.value !== this.state.threads);
      if (first) this.set({ threads: byId("threads").value = first.value, zoom: [] });
    }
  }

  // Where processes are one, so are their threads of one name.
  threadName(thread) {
    return this.groups[this.state.merge] ? thread.name.replace(/ \(\d+\)$/, "") : thread.name;
  }

  // ---- state ---------------------------------------------------------------------------------

  recall() {
    this.state = readAddress(this.settings, (view) => this.sets[setOf(view)]?.data);
    this.use(setOf(this.state.view));
    byId("merge").value = this.state.merge;
    this.fillThreads();
    byId("search").value = this.state.search;
    if (byId("threads").selectedIndex < 0) this.state.threads = byId("threads").value = "";
    this.plain = null;
    this.update();
  }

  remember(isStep) {
    writeAddress(this.state, this.settings, isStep);
  }

  set(change, isStep = true) {
    const before = this.state;
    this.state = { ...before, ...change };
    if (setOf(this.state.view) !== setOf(before.view)) {
      const mode = this.state.mode === "sandwich" ? "flame" : this.state.mode;
      this.state = { ...this.state, mode, zoom: [], fn: null };
      this.use(setOf(this.state.view));
    }
    if (this.state.merge !== before.merge) {
      this.state = { ...this.state, threads: "", zoom: [], fn: null, mode: this.state.mode === "sandwich" ? "flame" : this.state.mode };
      this.fillThreads();
      byId("merge").value = this.state.merge;
    }
    if (this.state.merge !== before.merge || this.state.frames !== before.frames || this.state.hideImports !== before.hideImports) this.plain = null;
    if (this.state.threads !== before.threads || this.state.filters !== before.filters || !sameRange(this.state.range, before.range)) this.weighed = null;
    if (this.state.view !== before.view) this.laid = null;
    // Only wall time has idle threads.
    if (this.state.view !== before.view || this.state.idle !== before.idle) this.weighed = null;
    if (this.state.raw !== before.raw) this.sums = null;
    this.update();
    this.remember(isStep);
  }

  // By thread of a data set, whether it is chosen; null for all.
  wanted(set = this.set_) {
    if (this.filters) return this.filters.wanted(this.sets[set].data);
    return set === "time" ? this.chosenThreads() : null; // what devices did has no thread
  }

  // The same, of the flame graph: without idle threads where they are folded.
  shown() {
    return this.idle && !this.state.idle ? this.idle.isIdle.map((idle) => !idle) : this.wanted();
  }

  // Data with the weights of the chosen time range, and of the processes that the filters choose.
  partOf(set, data) {
    const part = this.state.range ? within(data, this.state.range) : data;
    return this.filters ? ofThreads(part, this.wanted(set)) : part;
  }

  chosenThreads() {
    const choice = this.state.threads;
    if (!choice) return null;
    const id = Number(choice.slice(1));
    const { threads } = this.sets.time.data;
    if (choice[0] === "p") return threads.map((t) => this.groupOf(t.process) === this.groupOf(id));
    if (!this.groups[this.state.merge]) return threads.map((_, i) => i === id);
    const wanted = threads[id];
    return threads.map((t) => this.groupOf(t.process) === this.groupOf(wanted.process) && this.threadName(t) === this.threadName(wanted));
  }

  // ---- from state to flame graph -----------------------------------------------------------------

  update() {
    if (!this.plain) {
      const hidden = hiddenLabels(this.data, this.state.frames, this.state.hideImports);
      ({ tree: this.plain, data: this.all } = selected(this.whole, this.data, hidden, this.sets[this.set_].renames[this.state.merge]));
      this.weighed = null;
    }
    if (!this.weighed) {
      this.rows = this.partOf(this.set_, this.all);
      const mayFold = this.state.view === "wall" && !this.state.threads && !this.filters;
      this.idle = mayFold ? idleThreads(this.plain, this.rows) : null;
      this.weighed = weigh(this.plain, this.rows, this.shown());
      this.legend = legendTotals(this.plain, this.rows, this.shown());
      this.laid = null;
    }
    if (!this.laid) {
      this.laid = lay(this.weighed, this.state.view);
      if (this.settings.difference) this.faces.difference = differenceScale(this.settings.difference, this.laid);
      this.merged = {};
      this.sums = null;
    }
    if (!this.sums) {
      const isCharged = !this.state.raw && setOf(this.state.view) === "time";
      const charged = chargedNodes(this.laid, isCharged ? this.data.rank : null);
      this.sums = totalsByLabel(this.laid, charged);
      this.waits = isCharged ? waitsByLabel(this.laid, this.rows, this.shown(), charged) : new Map();
    }
    this.faces.byStall = this.state.view === "gpu" && this.state.color === "stall";
    this.showGraphs();
    this.applySearch();
    this.showControls();
    this.legendTable.show();
    this.showPath();
    showIdle(this);
    if (this.filters) this.filters.show();
    if (this.strip) this.strip.show();
  }

  showGraphs() {
    const { mode, view, fn, zoom } = this.state;
    const isSandwich = mode === "sandwich";
    const key = isSandwich ? "sandwich" + fn : mode;
    if (!this.merged[key]) this.merged[key] = this.makeGraphs(mode, fn, view);
    const { main, callers } = this.merged[key];
    byId("callers").hidden = byId("callers-title").hidden = byId("callees-title").hidden = !isSandwich;
    if (isSandwich) {
      byId("callers-title").textContent = "Callers of " + this.faces.names[fn];
      byId("callees-title").textContent = "Called from " + this.faces.names[fn];
      this.callers.show(callers, 0);
    }
    this.graph.show(main, follow(main, zoom));
    const empty = main.total[0] === 0;
    byId("empty").hidden = !empty;
    byId("empty").textContent = this.data.row_node.length
      ? `This selection has no ${VIEW_NAMES[view]}.` : "Nothing was recorded.";
    const unfollowed = (main.unfollowed || 0) + (isSandwich ? callers.unfollowed : 0);
    byId("details").textContent = "";
    byId("unfollowed").textContent = unfollowed
      ? unfollowed.toLocaleString("en-US") + " stacks end early here: merged frames under 0.005 % of the whole are not followed." : "";
  }

  makeGraphs(mode, fn, view) {
    if (mode === "flame") return { main: this.laid };
    if (mode === "inverted") {
      const base = view === "gpu" ? lay(reasonFirst(this.laid, this.data), view) : this.laid;
      return { main: lay(inverted(base, LEAST_SHARE), view) };
    }
    const { callers, callees } = sandwich(this.laid, fn, LEAST_SHARE);
    return { main: lay(callees, view), callers: lay(callers, view) };
  }

  showControls() {
    const press = (name, value) => {
      for (const button of document.querySelectorAll(`[data-${name}]`)) {
        button.setAttribute("aria-pressed", String(button.dataset[name] === value));
      }
    };
    press("view", this.state.view);
    press("mode", this.state.mode);
    press("frames", this.state.frames);
    press("color", this.state.color);
    byId("colors").hidden = this.state.view !== "gpu";
    byId("thread-choice").hidden = setOf(this.state.view) !== "time" || Boolean(this.filters);
    byId("raw").setAttribute("aria-pressed", String(this.state.raw));
    byId("raw").hidden = setOf(this.state.view) !== "time" || this.state.view === "cpu";
    byId("imports").setAttribute("aria-pressed", String(!this.state.hideImports));
    document.querySelector('[data-mode="sandwich"]').disabled = this.state.fn === null;
    byId("case").setAttribute("aria-pressed", String(this.state.matchCase));
    byId("reset").disabled = this.state.zoom.length === 0;
    this.showGraphNote();
    const whole = this.laid.total[0];
    const when = this.filters ? this.fleetWords() : this.state.range ? `${this.strip.rangeWords(this.state.range)} of ${moment(this.settings.time.recorded_s, this.strip.whole)} recorded` : this.settings.lasted;
    if (this.state.view === "gpu") {
      const kernels = new Set(Array.from(this.rows.hit_code, (code, i) => (this.rows.hit_count[i] ? this.data.code_kernel[code] : -1)));
      kernels.delete(-1);
      byId("whole").textContent = `100 % = ${wholeWords("gpu", whole)} of ${counted(kernels.size, "kernel")}, ${when}`;
      return;
    }
    if (this.state.view === "gputime") {
      byId("whole").textContent = `100 % = ${wholeWords("gputime", whole)}, ${when}`;
      return;
    }
    if (this.state.view === "difference") {
      byId("whole").textContent = this.subtitle;
      return;
    }
    if (this.filters) {
      byId("whole").textContent = `100 % = ${wholeWords(this.state.view, whole)}, ${when}`;
      return;
    }
    const wanted = this.shown();
    const there = this.state.range ? occurring(this.rows.row_thread.filter((_, row) => this.rows.row_ns[row] > 0), this.rows.threads.length) : this.counted;
    const threads = there.filter((thread) => wanted === null || wanted[thread]).length;
    byId("whole").textContent = `100 % = ${wholeWords(this.state.view, whole)}`
      + ` summed over ${counted(threads, "thread")}, ${when}${this.idleWords()}`;
  }

  // What the whole is without.
  idleWords() {
    return this.idle && !this.state.idle ? `; without ${duration(this.idle.ns)} of ${counted(this.idle.count, "idle thread")}` : "";
  }

  fleetWords() {
    const when = this.state.range ? `${this.strip.rangeWords(this.state.range)} of ${this.settings.lasted}` : this.settings.lasted;
    return this.filters.words ? `${this.filters.words}, ${when}` : when;
  }

  // How sure the stacks of device samples are, of the whole recording or of what was chosen.
  showGraphNote() {
    const { sets, state: { range } } = this;
    const notes = [];
    const isFiltered = Boolean(this.filters?.words);
    const where = [range ? "in this time range" : "", isFiltered ? "with these filters" : ""].filter(Boolean).join(" ");
    if (where && sets.device) {
      const words = certainty(this.partOf("device", sets.device.data), [...sets.device.data.kernel_names.keys()]);
      notes.push(`Attribution ${where}: ${words || "no device samples"}.`);
    }
    if (where && sets.gputime) notes.push(`Attribution of GPU time ${where}: ${timeCertainty(this.partOf("gputime", sets.gputime.data)) || "no GPU time"}.`);
    byId("graph-note").textContent = notes.join(" ") || this.graphNote;
  }

  showPath() {
    const nav = byId("path");
    nav.replaceChildren();
    const { tree, zoomed } = this.graph;
    const chain = [];
    this.showListingButton();
    for (let i = zoomed; i >= 0; i = tree.parent[i]) chain.push(i);
    if (chain.length < 2) return;
    for (const node of chain.reverse()) {
      const link = element("button", this.graph.nameOf(node));
      link.addEventListener("click", () => this.graph.zoom(node));
      if (nav.children.length) nav.append("\u203a");
      nav.append(link);
    }
    nav.lastChild.setAttribute("aria-current", "location");
    nav.scrollTop = nav.scrollHeight;
  }

  // The kernel that is selected or zoomed to, or that is around that frame, has a listing.
  showListingButton() {
    const { zoomed, selected } = this.graph;
    const kernels = this.kernelsOf(selected >= 0 ? selected : zoomed);
    byId("list").hidden = !kernels.length;
    byId("list").textContent = kernels.length ? "Instructions of " + this.faces.names[this.data.kernel_label[kernels[0]]] : "";
  }

  openListing() {
    const { zoomed, selected } = this.graph;
    const kernels = this.kernelsOf(selected >= 0 ? selected : zoomed);
    if (kernels.length) showListing(this.rows, kernels, this.faces);
  }

  // ---- search and table ----------------------------------------------------------------------

  applySearch() {
    const { search, matchCase } = this.state;
    const field = byId("search");
    field.setCustomValidity("");
    this.matches = null;
    if (search) {
      try {
        const pattern = new RegExp(search, matchCase ? "" : "i");
        this.matches = Uint8Array.from(this.data.names, (name) => (pattern.test(name) ? 1 : 0));
      } catch (error) {
        field.setCustomValidity("not a regular expression");
      }
    }
    this.graph.setMatches(this.matches);
    this.callers.setMatches(this.matches);
    this.showMatched();
    showTable(this);
  }

  showMatched() {
    const { tree, zoomed } = this.graph;
    if (this.matches === null) {
      byId("matched").textContent = this.state.search ? "not a regular expression" : "";
      return;
    }
    // The whole is the same merged either way, and only from the root is every frame followed.
    const isWhole = zoomed === 0 && this.state.mode !== "sandwich";
    const sum = isWhole ? matchedTime(this.laid, this.matches, 0) : matchedTime(tree, this.matches, zoomed);
    const least = !isWhole && tree.unfollowed ? "at least " : "";
    byId("matched").textContent = `Matched: ${least}${percent(sum, tree.total[zoomed])} (${amount(tree.view, sum)})`
      + (zoomed ? " of the zoom" : "");
  }

  openSandwich(label) {
    this.set({ mode: "sandwich", fn: label, zoom: [] });
    byId("callers-title").scrollIntoView({ block: "nearest" });
  }

  // ---- events --------------------------------------------------------------------------------

  zoomed(graph) {
    if (graph !== this.graph) return;
    this.state = { ...this.state, zoom: pathTo(graph.tree, graph.zoomed) };
    this.showPath();
    this.showMatched();
    this.showControls();
    this.remember(true);
  }

  facts(graph, node) {
    const whole = this.state.mode === "sandwich" ? "of the function" : "of all";
    const known = {
      device: () => kernelFacts(this.rows, graph.tree, node),
      gputime: () => kernelTimeFacts(this.rows, graph.tree, node),
      time: () => this.timeFacts(graph.tree.label[node]),
      difference: () => sourceFacts(this.rows, graph.tree.label[node]),
    }[setOf(this.state.view)]();
    return frameFacts(graph, node, whole).concat(known, known.length && this.state.view === "gpu" ? [["", "click, then l: its instructions"]] : []);
  }

  timeFacts(label) {
    if (label < 0 || !isTruncation(this.settings, this.data, label)) return sourceFacts(this.rows, label);
    return [["meaning", this.settings.truncated[this.data.names[label]]]];
  }

  kernelsOf(node) {
    if (this.state.view !== "gpu") return [];
    const { tree } = this.graph;
    for (let up = node; up > 0; up = tree.parent[up]) {
      const kernels = kernelsAt(this.rows, tree, up);
      if (kernels.length) return kernels;
    }
    return [];
  }

  describe(graph, node) {
    const [time, ...rest] = this.facts(graph, node);
    const words = [time, ...rest].map(([name, text]) => (name ? name + " " : "") + text);
    this.showListingButton();
    byId("details").textContent = graph.nameOf(node) + ": " + words.slice(0, 3).join("; ");
  }

  listen() {
    const on = (id, type, action) => byId(id).addEventListener(type, action);
    for (const button of document.querySelectorAll("[data-view]")) {
      button.addEventListener("click", () => this.set({ view: button.dataset.view }));
    }
    for (const button of document.querySelectorAll("[data-mode]")) {
      button.addEventListener("click", () => this.set({ mode: button.dataset.mode, zoom: [] }));
    }
    for (const button of document.querySelectorAll("[data-frames]")) {
      button.addEventListener("click", () => this.set({ frames: button.dataset.frames, zoom: [] }));
    }
    on("imports", "click", () => this.set({ hideImports: !this.state.hideImports, zoom: [] }));
    for (const button of document.querySelectorAll("[data-sort]")) {
      button.addEventListener("click", () => {
        const by = button.dataset.sort;
        this.sort = { by, up: this.sort.by === by ? !this.sort.up : by === "name" };
        showTable(this);
      });
    }
    on("idle", "click", () => this.set({ idle: !this.state.idle, zoom: [] }));
    on("raw", "click", () => this.set({ raw: !this.state.raw }));
    on("merge", "change", () => this.set({ merge: byId("merge").value }));
    on("threads", "change", () => this.set({ threads: byId("threads").value, zoom: [] }));
    on("thread-search", "input", (event) => this.showThreads(event.target.value));
    on("thread-search", "keydown", (event) => this.threadKey(event));
    on("search", "input", () => this.search({ search: byId("search").value }));
    on("search", "keydown", (event) => { if (event.key === "Enter") this.graph.canvas.focus(); });
    on("case", "click", () => this.search({ matchCase: !this.state.matchCase }));
    on("clear", "click", () => this.search({ search: byId("search").value = "" }));
    on("reset", "click", () => this.graph.zoom(0));
    on("list", "click", () => this.openListing());
    for (const button of document.querySelectorAll("[data-color]")) {
      button.addEventListener("click", () => this.set({ color: button.dataset.color }));
    }
    on("help-button", "click", () => byId("help").showModal());
    window.addEventListener("popstate", () => this.recall());
    window.addEventListener("keydown", (event) => this.key(event));
  }

  search(change) {
    this.state = { ...this.state, ...change };
    this.applySearch();
    this.showControls();
    this.remember(false);
  }

  back() {
    const { search, zoom, mode } = this.state;
    if (search) this.search({ search: byId("search").value = "" });
    else if (zoom.length) this.graph.zoom(0);
    else if (mode === "sandwich") this.set({ mode: "flame" });
    else if (this.state.range) this.set({ range: null });
    else if (Object.keys(this.state.filters).length) this.set({ filters: {} });
  }

  sandwichSelected() {
    const focused = document.activeElement === this.callers.canvas ? this.callers : this.graph;
    const node = focused.selected >= 0 ? focused.selected : focused.zoomed;
    const label = focused.tree.label[node];
    if (label >= 0) this.openSandwich(label);
  }

  key(event) {
    if (byId("help").open || byId("listing").open) return;
    const control = event.ctrlKey || event.metaKey;
    const typing = /^(INPUT|SELECT)$/.test(event.target.tagName || "");
    const key = event.key.toLowerCase();
    if (control && key === "i") this.search({ matchCase: !this.state.matchCase });
    else if ((control && key === "f") || (key === "/" && !typing)) byId("search").select();
    else if (key === "escape") this.back();
    else if (typing || control || event.altKey) return;
    else if (key === "?") byId("help").showModal();
    else if (this.sets[setOf(viewOfKey(key))] && viewOfKey(key)) this.set({ view: viewOfKey(key) });
    else if (key === "l") this.openListing();
    else if (key === "i") this.set({ mode: this.state.mode === "inverted" ? "flame" : "inverted", zoom: [] });
    else if (key === "s") this.sandwichSelected();
    else return;
    event.preventDefault();
  }
}

async function start() {
  const settings = JSON.parse(byId("facts").textContent);
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser is too old: it needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4).");
  }
  const sets = {};
  for (const [name, index] of Object.entries(settings.sets)) sets[name] = unpack(index, await inflate(byId("data-" + name).textContent));
  byId("app").hidden = false;
  window.aiflame = new Page(settings, sets);
}

start().catch((error) => {
  byId("failure").hidden = false;
  byId("failure").textContent = "The flame graph could not be drawn: " + error.message;
});
