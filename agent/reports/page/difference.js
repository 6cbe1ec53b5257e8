// SPDX-License-Identifier: Apache-2.0
// Differential flame graphs: colours and figures of frames by how their share has changed. Class 0
// of their trees is the time of new, class 1 that of base. Nothing here touches the document.
"use strict";

const NEW = 0;
const BASE = 1;

// What colours need: {grew, shrank, neutral, least} of the settings, both wholes, and the change
// that has the strongest colour, as in difference.py.
function differenceScale(settings, tree) {
  const scale = { ...settings, whole: timesAt(tree, 0), most: settings.least };
  for (let i = 1; i < tree.n; i++) scale.most = Math.max(scale.most, Math.abs(changeOf(scale, timesAt(tree, i))));
  return scale;
}

// How a share of all time has changed, -1 to 1.
function changeOf({ whole }, times) {
  return times[NEW] / Math.max(1, whole[NEW]) - times[BASE] / Math.max(1, whole[BASE]);
}

function changeFace(scale, change) {
  return mixed(scale.neutral, change > 0 ? scale.grew : scale.shrank, Math.min(1, Math.abs(change) / scale.most));
}

function points(change) {
  return (change < 0 ? "" : "+") + (100 * change).toFixed(2) + " points";
}

function differenceFacts(scale, times) {
  const side = (k) => `${duration(times[k])}, ${percent(times[k], scale.whole[k])} of all`;
  return [["new", side(NEW)], ["base", side(BASE)], ["change", points(changeOf(scale, times))]];
}

// Times of each label, by side; nested frames of one function count once.
function sidesByLabel(tree) {
  const sides = tree.klass.map((total) => totalsByLabel({ ...tree, total }).total);
  return (label) => sides.map((times) => times[label]);
}
