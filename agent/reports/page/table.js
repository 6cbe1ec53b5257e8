// SPDX-License-Identifier: Apache-2.0
// The table of frames by their self and total time.
"use strict";

const TABLE_ROWS = 200; // enough to read; the rest is found by searching
const REASONS_NAMED = 2; // as in wait_words.py, and so is the share below which none is
const LEAST_REASON = 0.1;

// What the self time of a function was off the CPU for, most first.
function waitWords(reasons, own) {
  return [...(reasons || [])].sort((a, b) => b[1] - a[1]).slice(0, REASONS_NAMED)
    .filter(([, ns]) => ns >= LEAST_REASON * own).map(([words, ns]) => `${((100 * ns) / own).toFixed(0)} % ${words}`).join(", ");
}

// A name whose lines end at what separates its words, where they fit.
function breakable(name) {
  return name.split(/(?<=::|[./$_,<(@])/).flatMap((part, i) => (i ? [element("wbr", null), part] : [part]));
}

function showTable(page) {
  const { own, total } = page.sums;
  const { names } = page.data;
  const value = { own: (i) => own[i], total: (i) => total[i] }[page.sort.by];
  const found = [];
  for (let i = 0; i < names.length; i++) if (total[i] > 0 && (!page.matches || page.matches[i])) found.push(i);
  const order = value ? (a, b) => value(b) - value(a) || a - b : (a, b) => (names[a] < names[b] ? 1 : names[a] > names[b] ? -1 : 0);
  found.sort(page.sort.up ? (a, b) => order(b, a) : order);
  const whole = page.laid.total[0];
  const { difference, on } = page.faces;
  const sides = difference && sidesByLabel(page.laid);
  const fillOf = (label) => (difference ? changeFace(difference, changeOf(difference, sides(label))).fill : on[label]);
  const body = byId("top").tBodies[0];
  const rows = found.slice(0, TABLE_ROWS).map((i) => {
    const row = element("tr", null, i === page.state.fn ? { class: "chosen" } : {});
    const cell = row.insertCell();
    const swatch = element("span", null, { class: "swatch" });
    swatch.style.background = fillOf(i);
    const button = element("button", null, { title: "Callers and callees" });
    button.append(...breakable(names[i]));
    button.addEventListener("click", () => page.openSandwich(i));
    cell.append(swatch, button);
    const reasons = waitWords(page.waits.get(i), own[i]);
    if (reasons) cell.append(element("div", reasons, { class: "reasons" }));
    for (const ns of [own[i], total[i]]) {
      for (const text of [amount(page.state.view, ns), percent(ns, whole)]) {
        const figure = row.insertCell();
        figure.className = "figure";
        figure.textContent = text;
      }
    }
    return row;
  });
  body.replaceChildren(...rows);
  byId("top-note").textContent = `${rows.length} of ${found.length.toLocaleString("en-US")} ${isOfDevices(page.state.view) ? "frames" : "functions"}`
    + (page.matches ? " that match" : "") + `; 100 % = ${wholeWords(page.state.view, whole)}${page.idleWords()}`
    + (page.waits.size ? "; self: waits without the kernel, libc and Python's own" : "");
  for (const button of document.querySelectorAll("[data-sort]")) {
    const heading = button.parentElement;
    if (button.dataset.sort !== page.sort.by) heading.removeAttribute("aria-sort");
    else heading.setAttribute("aria-sort", page.sort.up ? "ascending" : "descending");
  }
}
