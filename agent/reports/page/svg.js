// SPDX-License-Identifier: Apache-2.0
// What a flame graph in SVG does in a browser: the window's width, zoom, search, and an address that
// keeps both.
// Frames are read back from the drawing, which is whole without this script.
"use strict";
(function () {
  const EDGE_PX = 10;
  const CHAR_PX = 7.25;
  const TEXT_PAD_PX = 3;
  const SLACK_PX = 0.001; // coordinates have four decimals
  const svg = document.documentElement;
  const [drawnPx, heightPx] = [Number(svg.getAttribute("width")), Number(svg.getAttribute("height"))];
  let graphPx = drawnPx - 2 * EDGE_PX;
  let scale = 1; // pixels of the window by one of the drawing
  const byId = (id) => document.getElementById(id);
  const number = (element, name) => Number(element.getAttribute(name));

  const frames = Array.from(byId("frames").children, (group) => {
    const [rect, off] = group.querySelectorAll("rect");
    const tip = group.querySelector("title").textContent;
    const x = number(rect, "x");
    return {
      group, rect, off, tip,
      text: group.querySelector("text"),
      name: tip.slice(0, tip.lastIndexOf(" (")),
      x, y: number(rect, "y"), width: number(rect, "width"),
      offShare: off ? number(off, "width") / number(rect, "width") : 0,
    };
  });
  const whole = frames[0];
  const rises = frames.length > 1 && frames[1].y < whole.y;
  const centred = svg.querySelectorAll(".title, .subtitle");
  // With their distance from the right edge.
  const atRight = ["case", "search", "matched"].map((id) => [byId(id), drawnPx - number(byId(id), "x")]);
  let zoomed = whole;
  let pattern = null; // text of the search, null without one
  let matchCase = false;

  function shortened(name, columns) {
    if (name.length <= columns) return name;
    return columns < 3 ? "" : name.slice(0, columns - 2) + "..";
  }

  function place(frame, x, width) {
    frame.rect.setAttribute("x", x);
    frame.rect.setAttribute("width", width);
    if (frame.off) {
      const offWidth = frame.offShare * width;
      frame.off.setAttribute("x", x + width - offWidth);
      frame.off.setAttribute("width", offWidth);
    }
    frame.text.setAttribute("x", x + TEXT_PAD_PX);
    const columns = Math.floor((width - 2 * TEXT_PAD_PX) / CHAR_PX);
    frame.text.textContent = shortened(frame.name, columns);
  }

  // In a wider window frames are wider; in a narrower one all is smaller.
  function fit() {
    svg.setAttribute("width", "100%");
    const windowPx = svg.getBoundingClientRect().width;
    if (!(windowPx > 0)) return;
    const widthPx = Math.max(drawnPx, windowPx);
    graphPx = widthPx - 2 * EDGE_PX;
    scale = windowPx / widthPx;
    svg.setAttribute("viewBox", `0 0 ${widthPx} ${heightPx}`);
    svg.setAttribute("height", heightPx * scale);
    for (const text of centred) text.setAttribute("x", widthPx / 2);
    for (const [text, fromRight] of atRight) text.setAttribute("x", widthPx - fromRight);
    keepHead();
  }

  // The title and its buttons stay in sight.
  function keepHead() {
    byId("head").setAttribute("transform", `translate(0 ${window.scrollY / scale})`);
  }

  // The roots are the widest frames, and at the bottom; of a tall drawing nothing else is seen first.
  function reveal() {
    if (rises) window.scrollTo(0, (zoomed.y - whole.y + heightPx) * scale - window.innerHeight);
  }

  function zoom(target) {
    zoomed = target;
    const end = target.x + target.width;
    const stretch = target.width > 0 ? graphPx / target.width : 1;
    for (const frame of frames) {
      const below = rises ? frame.y > target.y : frame.y < target.y;
      const inside = frame.x >= target.x - SLACK_PX && frame.x + frame.width <= end + SLACK_PX;
      const around = frame.x <= target.x + SLACK_PX && frame.x + frame.width >= end - SLACK_PX;
      const isPath = below && around;
      frame.shown = isPath || (inside && !below);
      frame.group.style.display = frame.shown ? "" : "none";
      frame.group.classList.toggle("path", isPath && frame !== target);
      if (isPath) place(frame, EDGE_PX, graphPx);
      else if (frame.shown) place(frame, EDGE_PX + (frame.x - target.x) * stretch, frame.width * stretch);
    }
    byId("reset").style.display = target === whole ? "none" : "";
    search(pattern);
  }

  // The widest matches only: what lies within a match is part of it already.
  function matchedPx(hits) {
    hits.sort((a, b) => a.x - b.x || b.width - a.width);
    let covered = -Infinity;
    let sum = 0;
    for (const hit of hits) {
      if (hit.x < covered - SLACK_PX) continue;
      sum += hit.width;
      covered = hit.x + hit.width;
    }
    return sum;
  }

  function search(text) {
    pattern = text || null;
    let wanted = null;
    let problem = "";
    try {
      wanted = pattern && new RegExp(pattern, matchCase ? "" : "i");
    } catch (error) {
      problem = "Not a regular expression: " + pattern;
    }
    const hits = [];
    for (const frame of frames) {
      const hit = Boolean(wanted) && frame !== whole && wanted.test(frame.name);
      frame.group.classList.toggle("hit", hit);
      const within = frame.shown && !frame.group.classList.contains("path");
      if (hit && within) hits.push(frame);
      else if (hit && frame.shown) hits.push({ x: zoomed.x, width: zoomed.width });
    }
    const share = zoomed.width > 0 ? (100 * matchedPx(hits)) / zoomed.width : 0;
    byId("matched").textContent = wanted ? "Matched: " + share.toFixed(1) + "%" : problem || " ";
    byId("search").classList.toggle("on", Boolean(pattern));
    byId("search").lastChild.textContent = pattern ? "Clear" : "Search";
    byId("case").classList.toggle("on", matchCase);
    remember();
  }

  function ask() {
    if (pattern) return search(null);
    const text = window.prompt("Search for (regular expression" + (matchCase ? ", case matters):" : "):"), "");
    if (text !== null) search(text);
  }

  function toggleCase() {
    matchCase = !matchCase;
    search(pattern);
  }

  function remember() {
    const state = new URLSearchParams();
    if (zoomed !== whole) {
      state.set("x", zoomed.x.toFixed(4));
      state.set("y", String(zoomed.y));
    }
    if (pattern) state.set("s", pattern);
    if (pattern && matchCase) state.set("case", "1");
    const text = state.toString();
    try {
      history.replaceState(null, "", text ? "#" + text : location.pathname + location.search);
    } catch (error) {
      // A flame graph inside another page may not change the address; it works without.
      if (error.name !== "SecurityError") throw error;
    }
  }

  function recall() {
    const state = new URLSearchParams(location.hash.slice(1) || location.search.slice(1));
    pattern = state.get("s");
    matchCase = state.get("case") === "1";
    const x = Number(state.get("x"));
    const y = Number(state.get("y"));
    const found = state.has("x") && frames.find((f) => f.y === y && Math.abs(f.x - x) < SLACK_PX);
    zoom(found || whole);
  }

  function onPress(element, action) {
    element.addEventListener("click", action);
    element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") action();
    });
  }

  for (const frame of frames) {
    frame.group.addEventListener("click", () => zoom(frame));
    frame.group.addEventListener("mouseover", () => {
      byId("details").textContent = shortened(frame.tip, Math.floor(graphPx / CHAR_PX) - 20);
    });
    frame.group.addEventListener("mouseout", () => { byId("details").textContent = " "; });
  }
  onPress(byId("reset"), () => zoom(whole));
  onPress(byId("search"), ask);
  onPress(byId("case"), toggleCase);
  byId("search").style.display = byId("case").style.display = "";
  window.addEventListener("hashchange", recall);
  window.addEventListener("scroll", keepHead, { passive: true });
  window.addEventListener("resize", () => { fit(); zoom(zoomed); });
  window.addEventListener("keydown", (event) => {
    const key = event.key.toLowerCase();
    const control = event.ctrlKey || event.metaKey;
    if (key === "f3" || (control && key === "f")) ask();
    else if (control && key === "i") toggleCase();
    else if (key === "escape") { pattern = null; zoom(whole); }
    else return;
    event.preventDefault();
  });
  fit();
  recall();
  reveal();
})();
