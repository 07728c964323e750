"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const SHOWN = 200; // rows of a table at a time: a browser lays out no more at once without being felt
const dark = matchMedia("(prefers-color-scheme: dark)");
const COLORS = ["#3f51b5", "#ef8f00", "#2e9d57", "#c2185b", "#0097a7", "#7e57c2", "#8d6e63", "#546e7a"];

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return unit ? `${n.toFixed(2)} ${units[unit]}` : `${n} B`;
}

// Plotly reads some tags and entities in texts.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function look() {
  const style = getComputedStyle(document.documentElement);
  const color = style.getPropertyValue("--fg"), line = style.getPropertyValue("--line");
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color, size: 13 },
    margin: { t: 40, r: 20, b: 40, l: 60 }, colorway: COLORS, xaxis: { ...axis }, yaxis: { ...axis },
    legend: { orientation: "h", y: 1, yanchor: "bottom" }, hoverlabel: { font: { color: "#111" }, bgcolor: "#fff" } };
}

const charts = [];
function chart(parent, label, traces, layout, height) {
  const place = element("div", undefined, { class: "chart", role: "img", "aria-label": label });
  parent.append(place);
  const draw = () => {
    const base = look();
    const own = layout();
    Plotly.react(place, traces(), { ...base, ...own, height, xaxis: { ...base.xaxis, ...own.xaxis },
      yaxis: { ...base.yaxis, ...own.yaxis } }, { displaylogo: false, responsive: true, displayModeBar: false });
  };
  charts.push(draw);
}

function ticks(most) { // of bytes, in powers of two
  const unit = 2 ** Math.floor(Math.log2(Math.max(most, 8) / 4));
  const values = Array.from({ length: 9 }, (_, i) => i * unit).filter((value) => value <= most * 1.05);
  return { tickvals: values, ticktext: values.map(bytes) };
}

function limited(limit, vertical) {
  if (limit === null) return {};
  const line = { color: "#d32f2f", width: 2, dash: "dash" };
  const at = vertical ? { x0: limit, x1: limit, y0: 0, y1: 1, yref: "paper" } : { y0: limit, y1: limit, x0: 0, x1: 1, xref: "paper" };
  const where = vertical ? { x: limit, y: 1, yref: "paper" } : { x: 1, y: limit, xref: "paper" };
  return { shapes: [{ type: "line", ...at, line }],
    annotations: [{ ...where, text: `a device has ${bytes(limit)}`, showarrow: false, yanchor: "bottom", xanchor: "right", font: { color: "#d32f2f" } }] };
}

function asTable(parent, columns, rows) { // what a chart shows, for those who do not see it
  const details = element("details");
  details.append(element("summary", "as a table"));
  const table = element("table");
  const head = table.createTHead().insertRow();
  columns.forEach((name) => head.append(element("th", name, { scope: "col" })));
  const body = table.createTBody();
  rows.slice(0, SHOWN).forEach((row) => { const tr = body.insertRow(); row.forEach((cell) => tr.append(element("td", cell))); });
  details.append(table);
  if (rows.length > SHOWN) details.append(element("p", `and ${(rows.length - SHOWN).toLocaleString("en")} more`));
  parent.append(details);
}

const draw = {
  text(parent, section) { section.lines.forEach((line) => parent.append(element("p", line))); },

  bars(parent, section) {
    const bars = Object.entries(section.bars).map(([name, parts]) => [name, new Map(Object.entries(parts))]);
    const kinds = [...new Set(bars.flatMap(([, parts]) => [...parts.keys()]))];
    const most = Math.max(section.limit ?? 0, ...bars.map(([, parts]) => [...parts.values()].reduce((a, b) => a + b, 0)));
    const places = bars.map((_, i) => i); // numbers: a name could be one that an object has anyway
    chart(parent, section.title, () => kinds.map((kind) => ({ type: "bar", orientation: "h", name: plain(kind), y: places,
      x: bars.map(([, parts]) => parts.get(kind) ?? 0), hovertext: bars.map(([, parts]) => bytes(parts.get(kind) ?? 0)),
      hovertemplate: "%{hovertext} %{fullData.name}<extra></extra>" })),
    () => ({ barmode: "stack", ...limited(section.limit, true), xaxis: { range: [0, most * 1.15], ...ticks(most * 1.1) },
      yaxis: { autorange: "reversed", tickvals: places, ticktext: bars.map(([name]) => plain(name)) } }), 130 + 45 * bars.length);
    asTable(parent, ["", ...kinds], bars.map(([name, parts]) => [name, ...kinds.map((kind) => bytes(parts.get(kind) ?? 0))]));
  },

  lines(parent, section) {
    const top = Math.max(...Object.values(section.lines).map((line) => line.reduce((a, b) => Math.max(a, b), 0)));
    const limit = section.limit !== null && section.limit < 4 * top ? section.limit : null; // else the lines would be flat
    const most = Math.max(limit ?? 0, top);
    const steps = section.steps.map(plain);
    chart(parent, section.title, () => Object.entries(section.lines).map(([name, line]) => ({ type: line.length > 5000 ? "scattergl" : "scatter",
      mode: "lines", line: { shape: "hv" }, name: plain(name), x: line.map((_, i) => i), y: line, text: steps.map((step, i) => `${step}: ${bytes(line[i])}`),
      hovertemplate: "%{text}<extra>%{fullData.name}</extra>" })),
    () => ({ ...limited(limit, false), xaxis: { title: { text: "step" } }, yaxis: { range: [0, most * 1.1], ...ticks(most) } }), 320);
    const names = Object.keys(section.lines);
    asTable(parent, ["step", ...names], section.steps.map((step, i) => [step, ...names.map((name) => bytes(section.lines[name][i]))]));
  },

  spans(parent, section) {
    const places = section.spans.map((_, i) => i);
    chart(parent, section.title, () => [{ type: "bar", orientation: "h", y: places, base: section.spans.map((span) => span[1]),
      x: section.spans.map((span) => span[2] - span[1]), hovertemplate: "%{x:.2f} s<extra></extra>" }],
    () => ({ xaxis: { title: { text: "seconds" } }, yaxis: { autorange: "reversed", tickvals: places,
      ticktext: section.spans.map(([name]) => plain(name)) } }), 120 + 26 * section.spans.length);
    asTable(parent, ["", "from", "to"], section.spans.map(([name, from, to]) => [name, `${from.toFixed(2)} s`, `${to.toFixed(2)} s`]));
  },

  treemap(parent, section) {
    const nodes = new Map([["", { label: "all", parent: null, value: 0 }]]);
    for (const [path, size] of Object.entries(section.sizes)) {
      const parts = path.split("/");
      nodes.get("").value += size;
      for (let depth = 1; depth <= parts.length; depth++) {
        const id = parts.slice(0, depth).join("/"), up = parts.slice(0, depth - 1).join("/");
        if (!nodes.has(id)) nodes.set(id, { label: parts[depth - 1], parent: up, value: 0 });
        nodes.get(id).value += size;
      }
    }
    const all = [...nodes.entries()];
    const number = new Map(all.map(([id], i) => [id, String(i)]));
    chart(parent, section.title, () => [{ type: "treemap", branchvalues: "total", ids: all.map((_, i) => String(i)),
      labels: all.map(([, node]) => plain(node.label)), parents: all.map(([, node]) => number.get(node.parent) ?? ""),
      values: all.map(([, node]) => node.value), text: all.map(([, node]) => bytes(node.value)), maxdepth: 3,
      hovertext: all.map(([id]) => plain(id)), hovertemplate: "%{hovertext}<br>%{text}<extra></extra>", textinfo: "label+text" }], () => ({ margin: { t: 30, r: 5, b: 5, l: 5 } }), 460);
    const largest = all.filter(([id]) => id).sort((a, b) => b[1].value - a[1].value);
    asTable(parent, ["module", "bytes"], largest.map(([id, node]) => [id, bytes(node.value)]));
  },

  grid(parent, section) {
    const count = element("p");
    const input = element("input", undefined, { type: "search", placeholder: "part of a path, or a regular expression" });
    const label = element("label", "Filter ");
    label.append(input);
    const scroll = element("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": section.title });
    const table = element("table");
    const head = table.createTHead().insertRow();
    let order = null, down = false;
    section.columns.forEach((name, column) => {
      const th = element("th", undefined, { scope: "col", "aria-sort": "none" });
      const button = element("button", name, { title: "sort" });
      button.addEventListener("click", () => {
        down = order === column ? !down : false;
        order = column;
        head.querySelectorAll("th").forEach((each) => each.setAttribute("aria-sort", "none"));
        th.setAttribute("aria-sort", down ? "descending" : "ascending");
        show();
      });
      th.append(button);
      head.append(th);
    });
    const body = table.createTBody();
    const key = (cell) => cell?.nbytes ?? (cell?.placed !== undefined ? cell.placed : cell);
    const show = () => {
      let wanted = (row) => true;
      if (input.value) {
        let pattern = null;
        try { pattern = new RegExp(input.value, "i"); } catch { /* no regular expression: a part of the text */ }
        const part = input.value.toLowerCase();
        wanted = (row) => row.some((cell) => typeof cell === "string" && (cell.toLowerCase().includes(part) || pattern?.test(cell)));
      }
      const rows = section.rows.filter(wanted);
      if (order !== null) rows.sort((a, b) => { const [x, y] = [key(a[order]), key(b[order])]; return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
      body.replaceChildren(...rows.slice(0, SHOWN).map((row) => {
        const tr = element("tr");
        row.forEach((cell) => {
          if (typeof cell === "string") tr.append(element("td", cell));
          else if (cell.nbytes !== undefined) tr.append(element("td", bytes(cell.nbytes), { class: "n" }));
          else { const td = element("td"); td.append(placed(section.placed[cell.placed])); tr.append(td); }
        });
        return tr;
      }));
      const more = rows.length > SHOWN ? `, the first ${SHOWN} shown` : "";
      count.textContent = `${rows.length.toLocaleString("en")} of ${section.rows.length.toLocaleString("en")} rows${more}`;
    };
    input.addEventListener("input", show);
    count.setAttribute("aria-live", "polite");
    scroll.append(table);
    parent.append(label, count, scroll);
    show();
  },
};

// A shape as a rectangle, cut where it is split; equal colours lie on the same devices.
function placed({ shape, axes, mesh }) {
  const cuts = axes.map((names) => names.reduce((all, name) => all * (mesh[name] ?? 1), 1));
  const text = axes.some((names) => names.length) ? axes.map((names) => names.join("·") || "–").join(", ") : "replicated";
  const box = element("div", undefined, { title: `[${shape.join(", ")}] split (${text})` });
  const split = cuts.map((cut, dim) => [cut, dim]).filter(([cut]) => cut > 1);
  const [columns, rows] = split.length ? [split.at(-1), split.length > 1 ? split[0] : [1, -1]] : [[1, -1], [1, -1]];
  const vertical = shape.length > 1 && split.length === 1 && columns[1] < shape.length - 1;
  const [wide, high] = vertical ? [1, columns[0]] : [columns[0], rows[0]];
  const [w, h] = [Math.min(wide, 16), Math.min(high, 16)];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  Object.entries({ class: "placed", width: 64, height: 32, viewBox: "0 0 64 32", role: "img", "aria-label": `split (${text})` })
    .forEach(([name, value]) => svg.setAttribute(name, value));
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const hue = (360 * (y * w + x)) / (w * h);
    Object.entries({ x: (64 * x) / w, y: (32 * y) / h, width: 64 / w, height: 32 / h, stroke: "#8888", "stroke-width": 0.5,
      fill: w * h > 1 ? `hsl(${hue} 60% 60%)` : "#9e9e9e" }).forEach(([name, value]) => rect.setAttribute(name, value));
    svg.append(rect);
  }
  box.append(svg, element("code", text));
  return box;
}

main.append(element("h1", data.title));
for (const section of data.sections) {
  const place = element("section");
  if (section.title) place.append(element("h2", section.title));
  main.append(place);
  draw[section.kind](place, section);
}
const drawCharts = () => charts.forEach((each) => each());
dark.addEventListener("change", drawCharts);
// Texts and tables are painted first; Plotly, which stands below, takes a moment.
addEventListener("load", () => requestAnimationFrame(() => setTimeout(() => {
  drawCharts();
  document.documentElement.dataset.ready = String(performance.now());
})));
