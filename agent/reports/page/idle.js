// SPDX-License-Identifier: Apache-2.0
// Threads that slept at one location for nearly all of their time, as idle.py finds them: they stand
// folded in one box beside the flame graph of wall time.
"use strict";

const LEAST_ASLEEP = 0.95; // as in idle.py
const LEAST_OF_ALL = 0.5;
const LEAST_LIFE = 0.5;

// By thread, whether it is idle; null for none. `rows` are of `tree`.
function idleThreads(tree, rows) {
  const { row_node: node, row_thread: thread, row_kind: kind, row_ns: ns } = rows;
  // All of Python's own library is one location.
  const charged = chargedNodes(tree, rows.rank).map((at) => (rows.rank[tree.label[at]] === RANK_STANDARD ? 0 : at));
  const total = new Float64Array(rows.threads.length);
  const queued = new Float64Array(rows.threads.length);
  // Where a thread slept for more than half of its time, by majority vote (Boyer and Moore, 1981): no
  // other location can be one of nearly all its time.
  const chosen = new Int32Array(rows.threads.length).fill(-1);
  const lead = new Float64Array(rows.threads.length);
  const isAsleep = rows.kinds.map(({ klass }) => klass === 1);
  const isQueued = rows.kinds.map(({ klass }) => klass === 2 || klass === 3); // waits for a CPU
  for (let r = 0; r < node.length; r++) {
    const who = thread[r];
    total[who] += ns[r];
    if (isQueued[kind[r]]) queued[who] += ns[r];
    if (!isAsleep[kind[r]]) continue;
    if (charged[node[r]] === chosen[who]) lead[who] += ns[r];
    else if (lead[who] >= ns[r]) lead[who] -= ns[r];
    else {
      chosen[who] = charged[node[r]];
      lead[who] = ns[r] - lead[who];
    }
  }
  const most = new Float64Array(rows.threads.length);
  for (let r = 0; r < node.length; r++) {
    if (isAsleep[kind[r]] && charged[node[r]] === chosen[thread[r]]) most[thread[r]] += ns[r];
  }
  const longest = total.reduce((a, b) => Math.max(a, b), 0);
  const least = (i) => Math.max(LEAST_ASLEEP * (total[i] - queued[i]), LEAST_OF_ALL * total[i]);
  const isIdle = Array.from(total, (all, i) => all > 0 && all >= LEAST_LIFE * longest && most[i] >= least(i));
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
