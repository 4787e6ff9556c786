// Asks for the state once a second, and shows it. Texts of the job are only ever set as text.
"use strict";

const SHOWN_S = 600, MOST_METRICS = 8;
let points = [], job = "", at = 0, failures = 0;

const id = (name) => document.getElementById(name);
function made(tag, text, className) {
  return Object.assign(document.createElement(tag),
                       {textContent: text ?? "", className: className ?? ""});
}

const number = (v, digits = 3) => v === null || v === undefined ? "–" : Number(v.toPrecision(digits)).toString();
function time(s) {
  if (s === null || s === undefined) return "–";
  return s < 1e-3 ? `${number(s * 1e6)} µs` : s < 1 ? `${number(s * 1e3)} ms` : `${number(s)} s`;
}
function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(count) < 1000) return `${number(count)} ${unit}`;
    count /= 1000;
  }
  return `${number(count)} TB`;
}
const share = (v) => v === null || v === undefined ? "–" : `${Math.round(v * 100)} %`;

// `columns`: [title, how to make a text of a row, whether it is a text].
function table(where, columns, rows, named) {
  const head = made("tr");
  for (const [title, , isText] of columns) head.append(made("th", title, isText ? "text" : ""));
  const lines = rows.map((row) => {
    const line = made("tr", "", named && named(row) ? "named" : "");
    for (const [, show, isText] of columns) line.append(made("td", show(row), isText ? "text" : ""));
    return line;
  });
  id(where).replaceChildren(head, ...lines);
}

function showFindings(state, problems) {
  const cards = state.findings.map((each) => {
    const card = made("div", "", `finding ${each.kind}`);
    card.append(made("b", each.kind), each.text);
    if (each.stack) card.append(made("pre", each.stack));
    return card;
  });
  for (const text of problems) {
    const card = made("div", "", "finding link");
    card.append(made("b", "not seen"), text);
    cards.push(card);
  }
  if (!cards.length) cards.push(made("p", "Nothing unusual: all ranks arrive together.", "fine"));
  id("findings").replaceChildren(...cards);
}

function showTiles(state) {
  const between = state.between_hosts_bytes_per_s;
  const facts = [
    ["step time", time(state.step_s)],
    ["steps / s", number(state.steps_per_s)],
    ["samples / s", number(state.samples_per_s)],
    ["batches / s", number(state.batches_per_s)],
    ["batches in a step", number(state.steps_per_s ? state.batches_per_s / state.steps_per_s : null)],
    ["tensors in a batch", number(state.batches_per_s ? state.tensors_per_s / state.batches_per_s : null)],
    ["overlap with backward", share(state.overlap)],
    ["within hosts", `${bytes(state.shared_memory_bytes_per_s)}/s`],
    ["between hosts", `${bytes(between)}/s`],
  ];
  if (state.metrics.step !== null) facts.unshift(["step of the script", String(state.metrics.step)]);
  id("tiles").replaceChildren(...facts.map(([name, text]) => {
    const tile = made("div", "", "tile");
    tile.append(made("span", name), made("strong", text));
    return tile;
  }));
}

function showCharts(state) {
  const times = points.map((p) => p.at);
  const of = (name) => points.map((p) => p[name] ?? null);
  const charts = [
    ["A step", [
      {name: "step", values: of("step_s")}, {name: "waiting for others", values: of("waited_s")},
      {name: "batches", values: of("batch_s")}, {name: "latest rank late by", values: of("late_s")},
    ], time],
    ["Bytes per second", [
      {name: "within hosts", values: of("shared_memory_bytes_per_s")},
      {name: "between hosts", values: of("between_hosts_bytes_per_s")},
      {name: "TCP links", values: of("links_bytes_per_s")},
      {name: "other", values: of("other_bytes_per_s")},
    ], (v) => `${bytes(v)}/s`],
  ];
  if (points.some((p) => p.samples_per_s !== null)) {
    charts.push(["Samples per second", [{name: "samples", values: of("samples_per_s")}], number]);
  }
  const names = Object.keys(state.metrics.values).filter((name) => name !== "samples");
  for (const name of names.slice(0, MOST_METRICS)) {
    charts.push([name, [{name, values: points.map((p) => p.values[name] ?? null)}], number, true]);
  }
  const area = id("charts");
  while (area.children.length < charts.length) area.append(document.createElement("figure"));
  while (area.children.length > charts.length) area.lastChild.remove();
  charts.forEach(([title, lines, show, fit], i) =>
    drawChart(area.children[i], title, times, lines, show, fit));
}

function showTables(state, notes) {
  const named = new Set(state.findings.flatMap((each) => ["host", "log"].includes(each.kind) ? [] : each.ranks));
  table("ranks", [
    ["rank", (r) => r.rank], ["host", (r) => r.host, true], ["late", (r) => time(r.late_s)],
    ["waits", (r) => time(r.waited_s)], ["batches", (r) => time(r.batch_s)],
    ["core", (r) => share(r.core_share)], ["queue", (r) => share(r.queued_share)],
    ["process", (r) => `${r.pid} ${r.state}`], ["now", (r) => r.doing, true],
  ], state.ranks, (r) => named.has(r.rank));
  id("of-links").hidden = !state.links.length;
  table("links", [
    ["from", (l) => `${l.rank} (${l.host})`, true], ["to", (l) => `${l.peer} (${l.peer_host})`, true],
    ["now", (l) => `${bytes(l.bytes_per_s)}/s`], ["busy", (l) => share(l.busy_share)],
    ["speed", (l) => `${bytes(l.speed)}/s`], ["round trip", (l) => time(l.rtt_s)],
    ["sent again / s", (l) => number(l.retransmits_per_s)],
  ], [...state.links].sort((a, b) => b.bytes_per_s - a.bytes_per_s).slice(0, 64));
  table("hosts", [
    ["host", (h) => h.host, true], ["cores", (h) => h.cores], ["steal", (h) => share(h.steal_share)],
    ["cpu pressure", (h) => share(h.cpu_pressure)], ["io pressure", (h) => share(h.io_pressure)],
    ["memory pressure", (h) => share(h.memory_pressure)],
  ], state.hosts);
  id("notes").replaceChildren(...[...notes].reverse().map((each) =>
    made("li", `${new Date(each.at * 1000).toLocaleTimeString()}  ${each.text}`)));
}

function showJobs(told) {
  id("choice").hidden = told.jobs.length < 2;
  const select = id("job");
  if (told.jobs.join() !== [...select.options].map((each) => each.value).join()) {
    select.replaceChildren(...told.jobs.map((name) => new Option(name, name)));
  }
  if (told.state) select.value = told.state.job;
}

function show(told) {
  showJobs(told);
  const state = told.state;
  if (!state) {
    id("status").textContent = "no rank is running yet";
    return;
  }
  if (state.job !== job) { points = []; job = state.job; }
  const newest = points.length ? points[points.length - 1].at : 0;
  points.push(...told.points.filter((p) => p.at > newest));
  points = points.filter((p) => p.at > state.at - SHOWN_S);
  at = state.at;
  id("members").textContent = `job ${state.job}: ${state.ranks.length} of ${state.size} ranks`;
  id("command").textContent = state.command;
  document.title = (state.findings.some((f) => f.kind === "hang") ? "hang – " : "") + "hororing";
  showFindings(state, told.problems);
  showTiles(state);
  showCharts(state);
  showTables(state, told.notes);
}

async function ask() {
  const since = points.length ? points[points.length - 1].at : 0;
  try {
    const answer = await fetch(`state?job=${encodeURIComponent(job)}&since=${since}`);
    if (!answer.ok) throw new Error(await answer.text());
    show(await answer.json());
    failures = 0;
  } catch (error) {
    failures += 1;
    console.error(error);
  }
  id("status").className = failures > 2 ? "old" : "";
  if (failures > 2) id("status").textContent = "the page's server does not answer";
  else if (at) id("status").textContent = `${new Date(at * 1000).toLocaleTimeString()}`;
  setTimeout(ask, 1000);
}

id("job").addEventListener("change", (event) => { points = []; job = event.target.value; });
ask();
