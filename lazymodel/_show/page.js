"use strict";
const main = document.querySelector("main");
const SHOWN = 200; // rows that a table shows more of at a time: a browser lays out no more without being felt
const dark = matchMedia("(prefers-color-scheme: dark)");
const COLORS = 8; // of the style: --c0, --c1, …
const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const color = (i) => styled(`--c${i % COLORS}`);

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

async function unpacked(id) { // what the file has compressed
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
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
  const line = styled("--line");
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: styled("--fg"), size: 13 },
    margin: { t: 40, r: 10, b: 40, l: 60 }, colorway: Array.from({ length: COLORS }, (_, i) => color(i)), xaxis: { ...axis }, yaxis: { ...axis },
    legend: { orientation: "h", y: 1, yanchor: "bottom", traceorder: "normal" }, hoverlabel: { font: { color: "#111" }, bgcolor: "#fff" } };
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
  return { tickvals: values, ticktext: values.map((value) => bytes(value).replace(".00 ", " ")) };
}

function limited(limit) {
  if (limit === null) return {};
  const color = styled("--limit");
  return { shapes: [{ type: "line", y0: limit, y1: limit, x0: 0, x1: 1, xref: "paper", line: { color, width: 2, dash: "dash" } }],
    annotations: [{ x: 0, y: limit, xref: "paper", text: `a device has ${bytes(limit)}`, showarrow: false, yanchor: "bottom", xanchor: "left", font: { color } }] };
}

function asTable(parent, caption, columns, rows) { // what a chart shows, for those who do not see it
  const details = element("details");
  details.append(element("summary", "as a table"));
  const table = element("table");
  table.createCaption().textContent = caption;
  const head = table.createTHead().insertRow();
  columns.forEach((name, i) => head.append(element("th", name, { scope: "col", class: i ? "n" : "" })));
  const body = table.createTBody();
  rows.slice(0, SHOWN).forEach((row) => { const tr = body.insertRow(); row.forEach((cell, i) => tr.append(i ? element("td", cell, { class: "n" }) : element("th", cell, { scope: "row" }))); });
  const scroll = element("div", undefined, { class: "scroll" });
  scroll.append(table);
  details.append(scroll);
  if (rows.length > SHOWN) details.append(element("p", `and ${(rows.length - SHOWN).toLocaleString("en")} more`));
  parent.append(details);
}

const draw = {
  verdict(parent, section) {
    const banner = element("div", undefined, { class: `verdict ${section.good === null ? "" : section.good ? "fits" : "short"}` });
    banner.append(element("p", section.answer, { class: "answer" }), ...section.lines.map((line) => element("p", line)));
    parent.append(banner);
  },

  text(parent, section) { section.lines.forEach((line) => parent.append(element("p", line))); },

  bars(parent, section) { // elements: they fit any width, and print
    const bars = Object.entries(section.bars).map(([name, parts]) => [name, Object.entries(parts)]);
    const kinds = [...new Set(bars.flatMap(([, parts]) => parts.map(([kind]) => kind)))];
    const totals = bars.map(([, parts]) => parts.reduce((sum, [, size]) => sum + size, 0));
    const most = Math.max(section.limit ?? 0, ...totals) || 1;
    const filled = (kind) => `background: var(--c${kinds.indexOf(kind) % COLORS})`;
    bars.forEach(([name, parts], i) => {
      const bar = element("div", undefined, { class: "bar", role: "img", "aria-label": `${name}: ${bytes(totals[i])}` });
      const table = element("table", undefined, { class: "legend" });
      const row = (mark, label, size) => {
        const tr = table.insertRow(), th = element("th", undefined, { scope: "row" });
        th.append(element("i", undefined, mark), label);
        tr.append(th, element("td", bytes(size), { class: "n" }));
      };
      table.createCaption().textContent = `${section.title}: ${name}`;
      for (const [kind, size] of parts) {
        bar.append(element("span", undefined, { style: `width: ${(100 * size) / most}%; ${filled(kind)}`, title: `${kind}: ${bytes(size)}` }));
        row({ style: filled(kind) }, kind, size);
      }
      row({}, name, totals[i]);
      if (section.limit !== null) {
        bar.append(element("em", undefined, { style: `left: ${(100 * section.limit) / most}%` }));
        row({ class: "limit" }, "a device has", section.limit);
      }
      parent.append(bar, table);
    });
  },

  lines(parent, section) {
    const top = Math.max(...Object.values(section.lines).map((line) => line.reduce((a, b) => Math.max(a, b), 0)));
    const limit = section.limit !== null && section.limit < 4 * top ? section.limit : null; // else the lines would be flat
    const most = Math.max(limit ?? 0, top);
    const steps = section.steps.map(plain);
    chart(parent, section.title, () => Object.entries(section.lines).map(([name, line]) => ({ type: line.length > 5000 ? "scattergl" : "scatter",
      mode: "lines", line: { shape: "hv" }, name: plain(name), x: line.map((_, i) => i), y: line, text: steps.map((step, i) => `${step}: ${bytes(line[i])}`),
      hovertemplate: "%{text}<extra>%{fullData.name}</extra>" })),
    () => ({ ...limited(limit), xaxis: { title: { text: "step" } }, yaxis: { range: [0, most * 1.1], ...ticks(most) } }), 320);
    const names = Object.keys(section.lines);
    asTable(parent, section.title, ["step", ...names], section.steps.map((step, i) => [step, ...names.map((name) => bytes(section.lines[name][i]))]));
  },

  spans(parent, section) {
    const places = section.spans.map((_, i) => i);
    const pieces = section.spans.flatMap(([, each], i) => each.map(([from, to]) => [i, from, to]));
    chart(parent, section.title, () => [{ type: "bar", orientation: "h", y: pieces.map(([i]) => i), base: pieces.map(([, from]) => from),
      x: pieces.map(([, from, to]) => to - from), hovertemplate: "%{x:.2f} s<extra></extra>", marker: { color: color(0) } }],
    () => ({ barmode: "overlay", xaxis: { title: { text: section.axis } }, yaxis: { autorange: "reversed", tickvals: places,
      ticktext: section.spans.map(([name]) => plain(name)) } }), 120 + 26 * section.spans.length);
    asTable(parent, section.title, ["", "from", "to"], pieces.map(([i, from, to]) => [section.spans[i][0], `${from.toFixed(2)} s`, `${to.toFixed(2)} s`]));
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
    const kinds = new Map(); // modules that differ in numbers only are of one colour
    const colored = ([id]) => {
      const kind = id.split("/").slice(0, 2).join("/").replace(/\d+/g, "#");
      if (!kinds.has(kind)) kinds.set(kind, kinds.size);
      return id ? color(kinds.get(kind) - 1) : "rgba(0,0,0,0)"; // the first one is the whole
    };
    chart(parent, section.title, () => [{ type: "treemap", branchvalues: "total", ids: all.map((_, i) => String(i)),
      labels: all.map(([, node]) => plain(node.label)), parents: all.map(([, node]) => number.get(node.parent) ?? ""),
      values: all.map(([, node]) => node.value), text: all.map(([, node]) => bytes(node.value)), maxdepth: 3,
      hovertext: all.map(([id]) => plain(id)), hovertemplate: "%{hovertext}<br>%{text}<extra></extra>", textinfo: "label+text",
      marker: { colors: all.map(colored), line: { width: 1, color: styled("--bg") } },
      textfont: { color: all.map(([id]) => styled(id ? "--on" : "--fg")) } }], () => ({ margin: { t: 30, r: 5, b: 5, l: 5 } }), 460);
    const largest = all.filter(([id]) => id).sort((a, b) => b[1].value - a[1].value);
    asTable(parent, section.title, ["module", "bytes"], largest.map(([id, node]) => [id, bytes(node.value)]));
  },

  grid(parent, section) {
    const count = element("p", undefined, { role: "status" });
    let shown = SHOWN;
    const input = element("input", undefined, { type: "search", placeholder: "part of a name, or a regular expression",
      "aria-label": `Filter: ${section.title}` });
    const label = element("label", "Filter ");
    label.append(input);
    const scroll = element("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": section.title });
    const table = element("table");
    table.createCaption().textContent = section.title;
    const head = table.createTHead().insertRow();
    const number = (cell) => cell.nbytes !== undefined || cell.share !== undefined || cell === "" || /^[\d,.]+$/.test(cell);
    const side = section.columns.map((_, i) => (i && section.rows.every((row) => number(row[i])) ? "n" : ""));
    let order = null, down = false;
    section.columns.forEach((name, column) => {
      const th = element("th", undefined, { scope: "col", "aria-sort": "none", class: side[column] });
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
    const key = (cell) => cell.nbytes ?? cell.share ?? (cell.placed && JSON.stringify(cell.placed)) ?? (/^[\d,]+$/.test(cell) ? Number(cell.replaceAll(",", "")) : cell);
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
      body.replaceChildren(...rows.slice(0, shown).map((row) => {
        const tr = element("tr");
        row.forEach((cell, i) => {
          if (typeof cell === "string") tr.append(i ? element("td", cell, { class: side[i] }) : element("th", cell, { scope: "row" }));
          else if (cell.share !== undefined) {
            const fits = cell.share <= 1, part = cell.share < 10 ? `${Math.ceil(cell.share * 100)} %` : `${Math.ceil(cell.share)} ×`;
            tr.append(element("td", `${fits ? "✓" : "✗"} ${part}`, { class: `n ${fits ? "fits" : "short"}` }));
          }
          else if (cell.nbytes !== undefined) tr.append(element("td", bytes(cell.nbytes), { class: "n" }));
          else { const td = element("td"); td.append(placed(cell.placed)); tr.append(td); }
        });
        return tr;
      }));
      more.hidden = rows.length <= shown;
      const part = rows.length > shown ? `, the first ${shown.toLocaleString("en")} shown` : "";
      count.textContent = `${rows.length.toLocaleString("en")} of ${section.rows.length.toLocaleString("en")} rows${part}`;
    };
    const more = element("button", `Show ${SHOWN} more`, { class: "more" });
    more.addEventListener("click", () => { shown += SHOWN; show(); });
    input.addEventListener("input", () => { shown = SHOWN; show(); });
    scroll.append(table);
    parent.append(label, count, scroll, more);
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

async function show() {
  const data = JSON.parse(await unpacked("data"));
  main.append(element("h1", data.title));
  const contents = element("nav", undefined, { "aria-label": "Contents" });
  data.sections.forEach((section, i) => {
    const place = element("section", undefined, section.title ? { "aria-labelledby": `part-${i}` } : {});
    if (section.title) {
      place.append(element("h2", section.title, { id: `part-${i}` }));
      contents.append(element("a", section.title, { href: `#part-${i}` }), " ");
    }
    main.append(place);
    draw[section.kind](place, section);
    if (!i) main.append(contents); // the answer comes first
  });
  // Texts and tables are painted first; Plotly takes a moment.
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  if (charts.length) document.head.append(element("script", await unpacked("plotly")));
  const drawCharts = () => charts.forEach((each) => each());
  drawCharts();
  [dark, matchMedia("print")].forEach((media) => media.addEventListener("change", drawCharts));
  document.documentElement.dataset.ready = String(performance.now());
}
show();
