// A line chart in SVG: as much as this page needs. A library such as uPlot has 50 KB of code, and
// its axes, themes and sizes would take as many lines to set up as are here.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function part(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A number of two or three digits at which an axis may end.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((each) => each * unit >= value) * unit;
}

// `lines`: [{name, values}], as many values as `times` (seconds since the epoch); null: none.
// `show` makes a text of a value. Values begin at 0 unless some are negative or `fit` is set.
function drawChart(figure, title, times, lines, show, fit) {
  const width = Math.max(figure.clientWidth - 20, 200), height = 130, left = 58, bottom = 18;
  const all = lines.flatMap((line) => line.values).filter((v) => v !== null && isFinite(v));
  let low = Math.min(...all, ...(fit ? [] : [0])), high = Math.max(...all);
  if (!all.length) { low = 0; high = 1; }
  if (low >= 0 && !fit) high = roundUp(high);
  if (high === low) high = low + (Math.abs(low) || 1);
  const from = times[0] ?? 0, to = Math.max(times[times.length - 1] ?? 1, from + 1);
  const x = (t) => left + (t - from) / (to - from) * (width - left - 6);
  const y = (v) => 6 + (high - v) / (high - low) * (height - bottom - 12);
  const svg = part("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  for (const v of [low, (low + high) / 2, high]) {
    svg.append(part("line", {class: "grid", x1: left, x2: width - 6, y1: y(v), y2: y(v)}));
    svg.append(part("text", {x: left - 6, y: y(v) + 4, "text-anchor": "end"}, show(v)));
  }
  for (const [t, anchor] of [[from, "start"], [to, "end"]]) {
    const clock = new Date(t * 1000).toLocaleTimeString();
    svg.append(part("text", {x: x(t), y: height - 3, "text-anchor": anchor}, clock));
  }
  lines.forEach((line, index) => {
    let path = "", pen = "M";
    line.values.forEach((v, i) => {
      if (v === null || !isFinite(v)) { pen = "M"; return; }
      path += `${pen}${x(times[i]).toFixed(1)} ${y(v).toFixed(1)}`;
      pen = "L";
    });
    svg.append(part("path", {d: path, class: `c${index % 4}`}));
  });
  const caption = document.createElement("figcaption");
  caption.append(Object.assign(document.createElement("b"), {textContent: title}));
  if (lines.length > 1) {
    lines.forEach((line, index) => caption.append(Object.assign(
      document.createElement("i"), {textContent: line.name, className: `c${index % 4}`})));
  }
  figure.replaceChildren(caption, svg);
}
