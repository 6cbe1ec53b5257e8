// SPDX-License-Identifier: Apache-2.0
// Filters of a fleet's page: of each label, which values the rest of the page is of.
// A choice is {label: [values]}; a label that is not in it, or has no value that there is, chooses all.
"use strict";

const SEARCHED_VALUES = 12; // as many are read at a glance

const otherValue = (label) => `other (${label.others.toLocaleString("en-US")})`;

// The values of a label as they are shown and kept in the address.
const valuesOf = (label) => (label.others ? [...label.values, otherValue(label)] : label.values);

// What of a choice there is.
function knownFilters(labels, given) {
  const known = {};
  for (const label of labels) {
    const all = valuesOf(label);
    const wanted = [...new Set(given(label.name))].filter((value) => all.includes(value));
    if (wanted.length && wanted.length < new Set(all).size) known[label.name] = wanted;
  }
  return known;
}

class Filters {
  constructor(page) {
    this.page = page;
    this.labels = page.settings.fleet.labels;
    const columns = page.sets.time.data;
    // By label and thread, the number of its value; -1 where the label is not of it.
    this.valueOf = this.labels.map((_, i) => columns["label_" + i].map((value) => value - 1));
    this.fields = this.labels.map((label, i) => this.makeField(label, i));
    byId("filters").hidden = !this.labels.length;
    byId("filters-note").textContent = this.noteWords();
    byId("filters-clear").addEventListener("click", () => this.choose({}));
    document.addEventListener("pointerdown", (event) => {
      for (const { field } of this.fields) if (!field.contains(event.target)) field.open = false;
    });
  }

  noteWords() {
    const cut = this.labels.filter((label) => label.others);
    return cut.map(({ name, values, others }) =>
      `${name}: the ${values.length.toLocaleString("en-US")} with most of ${(values.length + others).toLocaleString("en-US")} have a name here, the rest are other (${others.toLocaleString("en-US")})`)
      .join("; ");
  }

  // ---- making -----------------------------------------------------------------------------------

  makeField(label, at) {
    const field = element("details", null, { class: "filter", name: "filter", "data-label": label.name });
    const summary = element("summary", null);
    const panel = element("div", null, { class: "panel", role: "group", "aria-label": label.name });
    const search = element("input", null, { type: "search", placeholder: "find", "aria-label": `Find a ${label.name}`, autocomplete: "off", spellcheck: "false" });
    search.hidden = valuesOf(label).length <= SEARCHED_VALUES;
    search.addEventListener("input", () => this.find(at, search.value));
    const list = element("div", null, { class: "values" });
    const rows = valuesOf(label).map((value) => {
      const row = element("label", null);
      const box = element("input", null, { type: "checkbox" });
      box.addEventListener("change", () => this.tick(label, value, box.checked));
      const share = element("span", "", { class: "share" });
      row.append(box, element("span", value, { class: "value", title: value }), share);
      list.append(row);
      return { row, box, share, value };
    });
    const all = element("button", "All");
    all.addEventListener("click", () => this.choose({ ...this.page.state.filters, [label.name]: [] }));
    panel.append(search, list, all);
    field.append(summary, panel);
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !field.open) return;
      event.stopPropagation(); // here it closes the list before anything else
      field.open = false;
      summary.focus();
    });
    field.addEventListener("toggle", () => {
      // A list that would reach over the right edge of the page is drawn to the left.
      panel.classList.toggle("left", field.open && field.offsetLeft + panel.offsetWidth > document.body.clientWidth);
    });
    byId("filters-clear").before(field);
    return { field, summary, rows, all };
  }

  find(at, text) {
    const sought = text.toLowerCase();
    for (const { row, value } of this.fields[at].rows) row.hidden = !value.toLowerCase().includes(sought);
  }

  // ---- choosing ---------------------------------------------------------------------------------

  tick(label, value, isOn) {
    const chosen = (this.page.state.filters[label.name] || []).filter((one) => one !== value);
    this.choose({ ...this.page.state.filters, [label.name]: isOn ? [...chosen, value] : chosen });
  }

  choose(filters) {
    this.page.set({ filters: knownFilters(this.labels, (name) => filters[name] || []), zoom: this.page.state.zoom });
  }

  // By thread of a data set, whether the choice lets it through; null for all. `except`: a label that
  // is not asked.
  wanted(data, except = null) {
    const { filters } = this.page.state;
    const asked = this.labels.map((label, i) => [label, i]).filter(([label]) => label.name !== except && filters[label.name]);
    if (!asked.length) return null;
    const isIn = asked.map(([label]) => valuesOf(label).map((value) => filters[label.name].includes(value)));
    return data.threads.map((_, thread) => asked.every(([, i], k) => {
      const value = this.valueOf[i][thread];
      return value < 0 || isIn[k][value];
    }));
  }

  get words() {
    return this.labels.filter(({ name }) => this.page.state.filters[name])
      .map(({ name }) => `${name} ${this.page.state.filters[name].join(" or ")}`).join(", ");
  }

  // ---- showing ----------------------------------------------------------------------------------

  // Shares are of what all other filters and the time range let through, in this view.
  show() {
    const { state, data } = this.page;
    const rows = state.range ? within(this.page.all, state.range) : this.page.all;
    const classes = VIEW_CLASSES[state.view];
    const there = [...new Set(rows.row_thread)];
    const weights = new Float64Array(data.threads.length);
    for (let r = 0; r < rows.row_node.length; r++) {
      if (classes.includes(data.kinds[rows.row_kind[r]].klass)) weights[rows.row_thread[r]] += rows.row_ns[r];
    }
    this.labels.forEach((label, i) => {
      // What devices did has no class.
      this.fields[i].field.hidden = !there.some((thread) => this.valueOf[i][thread] >= 0);
      this.showField(label, i, weights);
    });
    byId("filters-clear").hidden = !Object.keys(state.filters).length;
  }

  showField(label, at, weights) {
    const { state, data } = this.page;
    const { field, summary, rows, all } = this.fields[at];
    const wanted = this.wanted(data, label.name);
    const sums = new Float64Array(rows.length);
    let whole = 0;
    weights.forEach((weight, thread) => {
      const value = this.valueOf[at][thread];
      if (value < 0 || (wanted !== null && !wanted[thread])) return;
      sums[value] += weight;
      whole += weight;
    });
    const chosen = state.filters[label.name] || [];
    rows.forEach(({ row, box, share, value }, i) => {
      box.checked = chosen.includes(value);
      share.textContent = percent(sums[i], whole);
      share.style.setProperty("--share", (whole ? (100 * sums[i]) / whole : 0) + "%");
      row.classList.toggle("none", !sums[i]);
    });
    const count = rows.length + (label.others ? label.others - 1 : 0);
    const few = chosen.length === 1 ? chosen[0] : `${chosen.length} of ${count.toLocaleString("en-US")}`;
    const words = chosen.length ? few : `all ${count.toLocaleString("en-US")}`;
    summary.replaceChildren(element("span", label.name, { class: "name" }), element("span", words, { class: "chosen" }));
    field.classList.toggle("on", chosen.length > 0);
    all.disabled = !chosen.length;
  }
}
