// SPDX-License-Identifier: Apache-2.0
// The listing of a kernel: its instructions with their samples and reasons, beside their source lines.
"use strict";

const LISTED_ROWS = 2000; // of one build of a kernel: more than is read, less than a browser chokes on
const NEAR_ROWS = 3; // instructions kept around a sampled one where not all are shown

function reasonWords(data, reasons, whole) {
  return [...reasons].sort((a, b) => b[1] - a[1] || a[0] - b[0])
    .map(([kind, count]) => `${data.kinds[kind].name} ${percent(count, whole)}`).join(", ");
}

// Of a long listing, the rows near samples; the most sampled ones if even these are too many.
function shownRows(rows) {
  if (rows.length <= LISTED_ROWS) return rows;
  const near = new Set();
  rows.forEach((row, i) => {
    if (!row.count) return;
    for (let k = Math.max(0, i - NEAR_ROWS); k <= Math.min(rows.length - 1, i + NEAR_ROWS); k++) near.add(k);
  });
  if (near.size <= LISTED_ROWS) return rows.filter((_, i) => near.has(i));
  const most = [...rows].sort((a, b) => b.count - a.count).slice(0, LISTED_ROWS);
  return most.sort((a, b) => a.offset - b.offset);
}

function listingTable(data, listing, faces) {
  const table = element("table", null);
  const heading = table.createTHead().insertRow();
  for (const [text, figure] of [["Offset", 1], ["Samples", 1], ["of kernel", 1], ["Instruction", 0], ["Source line", 0], ["Reasons", 0]]) {
    heading.append(element("th", text, figure ? { scope: "col", class: "figure" } : { scope: "col" }));
  }
  const body = table.createTBody();
  let source = "";
  for (const one of shownRows(listing.rows)) {
    const row = body.insertRow();
    const figures = ["0x" + one.offset.toString(16), one.count ? one.count.toLocaleString("en-US") : "", one.count ? percent(one.count, listing.total) : ""];
    for (const text of figures) {
      const cell = row.insertCell();
      cell.className = "figure";
      cell.textContent = text;
    }
    row.insertCell().append(element("code", one.text || "?"));
    row.insertCell().textContent = one.source === source ? "" : one.source;
    source = one.source;
    const reasons = row.insertCell();
    for (const [kind, count] of [...one.reasons].sort((a, b) => b[1] - a[1])) {
      const bar = element("span", null, { class: "bar-part" });
      bar.style.background = faces.stalls.fills[data.kinds[kind].klass];
      bar.style.width = (60 * count) / listing.total + 2 + "px";
      reasons.append(bar);
    }
    reasons.append(reasonWords(data, one.reasons, one.count));
    if (!one.count) row.className = "cold";
  }
  return table;
}

function showListing(data, kernels, faces) {
  const dialog = byId("listing");
  const body = byId("listing-body");
  byId("listing-title").textContent = data.kernel_names[kernels[0]];
  const found = listings(data, kernels);
  const total = found.reduce((sum, listing) => sum + listing.total, 0);
  byId("listing-note").textContent = `${counted(total, "sample")}; ${launchWords(data, kernels)}; ${certainty(data, kernels)}`;
  body.replaceChildren();
  found.forEach((listing, i) => {
    if (found.length > 1) body.append(element("h3", `Build ${i + 1} of ${found.length}: ${counted(listing.total, "sample")}`));
    const file = data.code_found_in[listing.code];
    if (file) body.append(element("p", `This code was found by the kernel's name in ${file}: it was loaded before the recording.`, { class: "note" }));
    const hidden = listing.rows.length - shownRows(listing.rows).length;
    if (hidden) body.append(element("p", `${counted(hidden, "instruction")} far from any sample are left out.`, { class: "note" }));
    body.append(listingTable(data, listing, faces));
  });
  dialog.showModal();
}
