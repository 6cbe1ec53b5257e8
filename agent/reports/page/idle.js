// SPDX-License-Identifier: Apache-2.0
// Threads that slept at one location for nearly all of their time, as idle.py finds them: they stand
// folded in one box beside the flame graph of wall time.
"use strict";

const LEAST_ASLEEP = 0.98; // as in idle.py
const LEAST_LIFE = 0.5;

// By thread, whether it is idle; null for none. `rows` are of `tree`.
function idleThreads(tree, rows) {
  const { row_node: node, row_thread: thread, row_kind: kind, row_ns: ns } = rows;
  const charged = chargedNodes(tree, rows.rank);
  const total = new Float64Array(rows.threads.length);
  const most = new Float64Array(rows.threads.length);
  const slept = new Map();
  for (let r = 0; r < node.length; r++) {
    total[thread[r]] += ns[r];
    if (rows.kinds[kind[r]].klass !== 1) continue;
    const key = thread[r] * tree.n + charged[node[r]];
    slept.set(key, (slept.get(key) || 0) + ns[r]);
  }
  for (const [key, sum] of slept) {
    const at = Math.floor(key / tree.n);
    most[at] = Math.max(most[at], sum);
  }
  const longest = total.reduce((a, b) => Math.max(a, b), 0);
  const isIdle = Array.from(total, (all, i) => all > 0 && all >= LEAST_LIFE * longest && most[i] >= LEAST_ASLEEP * all);
  const isSome = isIdle.includes(true) && isIdle.some((idle, i) => !idle && total[i] > 0);
  return isSome ? { isIdle, count: isIdle.filter(Boolean).length, ns: total.reduce((sum, all, i) => sum + (isIdle[i] ? all : 0), 0) } : null;
}

// The box, which is a button: it folds and unfolds.
function showIdle(page) {
  const { idle, state } = page;
  const box = byId("idle");
  box.hidden = !idle;
  if (!idle) return;
  box.textContent = `[idle: ${counted(idle.count, "thread")}]`;
  box.setAttribute("aria-pressed", String(state.idle));
  box.title = `${duration(idle.ns)}, asleep at one location for nearly all of it; click to ${state.idle ? "fold them" : "have them in the flame graph"}`;
}
