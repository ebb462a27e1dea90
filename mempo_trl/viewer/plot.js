// R_M, P_mem and P_full along the turns.

/** An SVG plot, or null where no turn has any of them. `onPick(turn)` is called with the number of a clicked turn. */
function rewardPlot(turns, onPick) {
  const series = { R_M: [], P_mem: [], P_full: [] };
  turns.forEach((turn, i) => {
    for (const [name, points] of Object.entries(series)) if (typeof turn[name] === "number") points.push([i, turn[name]]);
  });
  const values = Object.values(series).flat().map(([, value]) => value);
  if (!values.length) return null;
  const [width, height, left, bottom, top] = [Math.max(260, Math.min(680, 76 + turns.length * 56)), 150, 44, 20, 10];
  // Small probabilities, as before training, get a larger scale; the ticks say which.
  const round = (size) => [0.05, 0.1, 0.25, 0.5, 1].find((end) => size <= end) ?? size;
  const high = round(Math.max(...values, 0));
  const low = Math.min(...values) < 0 ? -round(-Math.min(...values)) : 0;
  const slot = (width - left - 8) / turns.length;
  const x = (i) => left + slot * (i + 0.5);
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);

  const parts = [];
  for (const value of [...new Set([low, 0, high / 2, high])]) {
    parts.push(svg("line", { class: value === 0 ? "axis" : "grid", x1: left, x2: width - 8, y1: y(value), y2: y(value) }));
    parts.push(svg("text", { class: "tick", x: left - 6, y: y(value) + 3.5, "text-anchor": "end" }, figure(value, high < 0.5 ? 3 : 2)));
  }
  for (const [i, value] of series.R_M) {
    parts.push(svg("rect", {
      class: value < 0 ? "negative" : "positive", x: x(i) - Math.min(9, slot / 4), width: Math.min(18, slot / 2),
      y: Math.min(y(0), y(value)), height: Math.max(1, Math.abs(y(value) - y(0))), rx: 2,
    }));
  }
  for (const name of ["P_full", "P_mem"]) {
    const points = series[name].map(([i, value]) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
    parts.push(svg("polyline", { class: `line ${name}`, points: points.join(" ") }));
    for (const point of points) {
      const [cx, cy] = point.split(",");
      parts.push(svg("circle", { class: `dot ${name}`, cx, cy, r: 3 }));
    }
  }
  turns.forEach((turn, i) => {
    parts.push(svg("text", { class: "tick", x: x(i), y: height - 5, "text-anchor": "middle" }, String(i + 1)));
    const words = Object.keys(series).map((name) => `${name} ${figure(turn[name], 3)}`).join(", ");
    const area = { class: "area", x: x(i) - slot / 2, y: 0, width: slot, height, onclick: () => onPick(i + 1) };
    parts.push(svg("rect", area, svg("title", {}, `Turn ${i + 1}: ${words}`)));
  });
  const label = turns.map((turn, i) => `turn ${i + 1}: R_M ${figure(turn.R_M)}`).join(", ");
  const key = (name, words) => el("span", {}, svg("svg", { width: 18, height: 10 }, keyOf(name)), words);
  return el(
    "figure",
    { class: "plot" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, parts),
    el("figcaption", {}, key("R_M", "R_M"), key("P_mem", "P_mem"), key("P_full", "P_full"), el("span", { class: "quiet" }, "by turn")),
  );
}

function keyOf(name) {
  if (name === "R_M") {
    return [svg("rect", { class: "positive", x: 2, y: 0, width: 6, height: 10, rx: 1 }), svg("rect", { class: "negative", x: 10, y: 3, width: 6, height: 7, rx: 1 })];
  }
  return [svg("line", { class: `line ${name}`, x1: 0, x2: 18, y1: 5, y2: 5 }), svg("circle", { class: `dot ${name}`, cx: 9, cy: 5, r: 3 })];
}
