// SPDX-License-Identifier: Apache-2.0
// The table of frames by their self and total time.
"use strict";

const TABLE_ROWS = 200; // enough to read; the rest is found by searching

function showTable(page) {
  const { own, total } = page.sums;
  const { names } = page.data;
  const value = { own: (i) => own[i], total: (i) => total[i] }[page.sort.by];
  const found = [];
  for (let i = 0; i < names.length; i++) if (total[i] > 0 && (!page.matches || page.matches[i])) found.push(i);
  const order = value ? (a, b) => value(b) - value(a) || a - b : (a, b) => b - a; // ids are in order of name
  found.sort(page.sort.up ? (a, b) => order(b, a) : order);
  const whole = page.laid.total[0];
  const body = byId("top").tBodies[0];
  const rows = found.slice(0, TABLE_ROWS).map((i) => {
    const row = element("tr", null, i === page.state.fn ? { class: "chosen" } : {});
    const cell = row.insertCell();
    const swatch = element("span", null, { class: "swatch" });
    swatch.style.background = page.faces.on[i];
    const button = element("button", names[i], { title: "Callers and callees" });
    button.addEventListener("click", () => page.openSandwich(i));
    cell.append(swatch, button);
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
    + (page.matches ? " that match" : "") + `; 100 % = ${wholeWords(page.state.view, whole)}`;
  for (const button of document.querySelectorAll("[data-sort]")) {
    const heading = button.parentElement;
    if (button.dataset.sort !== page.sort.by) heading.removeAttribute("aria-sort");
    else heading.setAttribute("aria-sort", page.sort.up ? "ascending" : "descending");
  }
}
