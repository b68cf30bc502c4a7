"use strict";
// Draws the report in #report. No library, no network; what comes from the program is only ever set as text.

const report = JSON.parse(document.getElementById("report").textContent);
const root = document.getElementById("root");
const PHASES = ["forward", "backward", "optimizer", "unassigned"];
const colour = phase => `var(--${PHASES.includes(phase) ? phase : "unassigned"})`;

// ---- small things ----

function node(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function shape(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const title = text => shape("title", {}, text);
function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (n >= size) return (n / size).toFixed(n >= 100 * size ? 0 : 1) + " " + unit;
  return n + " B";
}
function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s >= 1) return s.toFixed(2) + " s";
  if (s >= 1e-3) return (s * 1e3).toFixed(2) + " ms";
  return (s * 1e6).toFixed(1) + " µs";
}
const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const section = (name, note, ...children) => node("section", {}, node("h2", {}, name), ...(note ? [node("p", { class: "note" }, note)] : []), ...children);
const card = (value, what) => node("div", { class: "card" }, node("b", {}, value), node("span", {}, what));
const badge = phase => node("span", { class: "phase", style: `background:${colour(phase)}` }, phase);
function legend(phases) {
  const one = phase => node("span", {}, node("i", { style: `background:${colour(phase)}` }), phase);
  return node("div", { class: "legend" }, ...phases.map(one));
}
// The operations of a kernel in the program's words, equal ones counted.
function words(kernel) {
  const counts = new Map();
  for (const fused of kernel.fused) {
    const name = fused.operation || fused.op;
    counts.set(name, (counts.get(name) || 0) + 1);
  }
  return [...counts].map(([name, times]) => times > 1 ? `${name} ×${times}` : name).join(", ");
}
const place = fused => [fused.gradient_of && `gradient of ${fused.gradient_of} at`, fused.location].filter(Boolean).join(" ");
const places = kernel => [...new Set(kernel.fused.map(place).filter(Boolean))].join(", ");

// ---- tables: a click on a heading sorts ----

// columns: [heading, value of a row (number or text), shown form (text or element)]
function table(id, columns, rows, bars = {}) {
  const head = node("tr"), body = node("tbody");
  const numeric = columns.map(([, value]) => rows.length > 0 && rows.every(row => typeof value(row) !== "string"));
  const most = columns.map(([, value], at) => bars[at] ? Math.max(1e-12, ...rows.map(row => value(row) || 0)) : 0);
  const lines = rows.map(row => {
    const line = node("tr");
    columns.forEach(([, value, shown], at) => {
      const cell = node("td", numeric[at] ? { class: "number" } : {});
      cell.append(shown ? shown(row) : String(value(row)));
      if (bars[at]) cell.append(node("div", { class: "bar", style: `width:${100 * (value(row) || 0) / most[at]}%` }));
      line.append(cell);
    });
    return { row, line, text: line.textContent.toLowerCase() };
  });
  let sorted = -1, down = true;
  columns.forEach(([heading, value], at) => {
    const cell = node("th", { scope: "col", ...(numeric[at] ? { class: "number" } : {}) }, heading);
    cell.addEventListener("click", () => {
      down = sorted === at ? !down : numeric[at];
      sorted = at;
      [...head.children].forEach(other => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      lines.sort((a, b) => {
        const [x, y] = [value(a.row), value(b.row)];
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        return sign * (x < y ? -1 : x > y ? 1 : 0);
      });
      body.append(...lines.map(it => it.line));
    });
    head.append(cell);
  });
  body.append(...lines.map(it => it.line));
  const filter = node("input", { type: "search", placeholder: "Filter…", "aria-label": "Filter rows" });
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    for (const it of lines) it.line.style.display = it.text.includes(wanted) ? "" : "none";
  });
  const scroll = node("div", { class: "scroll" }, node("table", { id }, node("thead", {}, head), body));
  return rows.length > 15 ? node("div", {}, node("div", { class: "tools" }, filter), scroll) : scroll;
}

// ---- what needs attention ----

function findings() {
  const list = [];
  if (report.replay && report.replay.obstacle) {
    const what = node("b", {}, "Recorded at every call, which costs host time");
    list.push(node("div", { class: "finding bad" }, what, node("div", { class: "remedy" }, report.replay.obstacle)));
  }
  for (const it of report.breaks) {
    const what = node("b", {}, `Graph break, ${count(it.times, "time")}: ${it.reason}`);
    const where = node("span", { class: "mono" }, [it.operation && `result of ${it.operation}`, it.location && `at ${it.location}`].filter(Boolean).join(" "));
    list.push(node("div", { class: "finding bad" }, what, where, node("div", { class: "remedy" }, it.remedy)));
  }
  for (const it of report.compiles.filter(it => !it.expected)) {
    const change = it.before !== null ? `: ${it.before} became ${it.after}` : "";
    const what = node("b", {}, `Recompiled segment ${it.segment} as step ${it.step} in ${seconds(it.seconds)}; it ran ${count(it.runs, "time")} since`);
    list.push(node("div", { class: "finding warn" }, what, node("span", { class: "mono" }, it.guard + change), node("div", { class: "remedy" }, it.remedy || "")));
  }
  for (const step of report.steps) for (const it of step.externs) {
    const what = node("b", {}, `${it.name} runs outside the compiled code of step ${step.number}, ${count(it.count, "time")} a run`);
    list.push(node("div", { class: "finding warn" }, what, node("div", { class: "remedy" }, "nothing, if the profile does not show it; else express it with other tensor operations")));
  }
  for (const step of report.steps) for (const it of step.exchanges || []) {
    const what = node("b", {}, `${it.name}: step ${step.number} waits for the other ranks, ${count(it.count, "time")} a run`);
    list.push(node("div", { class: "finding warn" }, what, node("div", { class: "remedy" }, "backend cpu, or cuda with NCCL, joins them to buckets that travel beside the backward pass")));
  }
  if (!list.length) list.push(node("div", { class: "finding good" }, node("b", {}, "Nothing: one graph a call, and it never changed.")));
  return section("What needs attention", "", ...list);
}

// ---- memory ----

function memory(step) {
  const { buffers, in_use, arena_bytes } = step.memory, kernels = step.kernels;
  const W = 1200, H = 300, L = 70, B = 26, n = Math.max(1, in_use.length), top = Math.max(1, arena_bytes);
  const x = at => L + at * (W - L) / n, y = at => H - B - at * (H - B - 8) / top;
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, width: "100%", id: "memory" });
  for (let i = 0; i <= 4; i++) {
    const at = top * i / 4;
    svg.append(shape("g", { class: "axis" }, shape("line", { x1: L, x2: W, y1: y(at), y2: y(at) }), shape("text", { x: L - 8, y: y(at) + 4, "text-anchor": "end" }, bytes(Math.round(at)))));
  }
  svg.append(shape("g", { class: "axis" }, shape("text", { x: L, y: H - 6 }, "kernel 0"), shape("text", { x: W, y: H - 6, "text-anchor": "end" }, `kernel ${n - 1}`)));
  const writer = new Map();
  kernels.forEach(kernel => kernel.writes.forEach(at => writer.has(at) || writer.set(at, kernel)));
  buffers.forEach((buffer, at) => {
    if (buffer.offset === null || !buffer.bytes) return;
    const made = writer.get(at);
    const says = `${buffer.name} ${buffer.ty}\n${bytes(buffer.bytes)} at ${buffer.offset}\nkernels ${buffer.first} to ${buffer.last}` + (made ? `\nmade by ${made.name}: ${words(made)}` : "");
    svg.append(shape("rect", { class: "buffer", x: x(buffer.first), y: y(buffer.offset + buffer.bytes), width: Math.max(.8, x(buffer.last + 1) - x(buffer.first)),
      height: Math.max(.6, y(buffer.offset) - y(buffer.offset + buffer.bytes)), fill: colour(made ? made.phase : "unassigned") }, title(says)));
  });
  const line = in_use.map((value, at) => `${x(at)},${y(value)} ${x(at + 1)},${y(value)}`).join(" ");
  svg.append(shape("polyline", { points: line, fill: "none", stroke: "var(--text)", "stroke-width": 1.3 }));
  const note = `Arena of ${bytes(arena_bytes)} beside ${bytes(step.memory.input_bytes)} of arguments and ${bytes(step.memory.output_bytes)} of new outputs. ` +
    "Each block is a buffer: left to right the kernels during which it is alive, bottom to top its place. The line is what is in use.";
  return section("Memory over the step", note, legend(step.phases.map(it => it.phase)), svg);
}

// ---- graph: phases are columns, kernels boxes, neighbours grouped where there are many ----

const WIDTH = 300, GAP = 130, LINE = 15, SPACE = 10, GROUP = 12;

function graph(step) {
  const kernels = step.kernels, view = node("div", { id: "graph-view" });
  const used = PHASES.filter(phase => kernels.some(kernel => kernel.phase === phase));
  const open = new Set();
  const groups = [];
  for (const phase of used) {
    const own = kernels.filter(kernel => kernel.phase === phase), size = own.length > 2 * GROUP ? GROUP : 1;
    for (let at = 0; at < own.length; at += size) groups.push({ phase, kernels: own.slice(at, at + size), key: `group ${phase} ${at}` });
  }
  const clip = (text, length) => text.length > length ? text.slice(0, length - 1) + "…" : text;
  const cost = list => {
    const time = list.reduce((sum, kernel) => sum + (kernel.seconds || 0), 0);
    return (time ? seconds(time) + ", " : "") + bytes(list.reduce((sum, kernel) => sum + kernel.bytes, 0));
  };
  function boxes() {
    const list = [];
    for (const group of groups) {
      const single = group.kernels.length === 1;
      if (!single && !open.has(group.key)) {
        const [first, last] = [group.kernels[0], group.kernels[group.kernels.length - 1]];
        const kinds = new Map();
        for (const kernel of group.kernels) { const kind = kernel.name.replace(/_\d+$/, ""); kinds.set(kind, (kinds.get(kind) || 0) + 1); }
        list.push({ key: group.key, phase: group.phase, kernels: group.kernels, head: `kernels ${first.number}–${last.number}`,
          lines: [[...kinds].map(([kind, times]) => `${times} ${kind}`).join(", "), cost(group.kernels)], says: "Click to open" });
        continue;
      }
      for (const kernel of group.kernels) {
        const key = `kernel ${kernel.number}`, shown = open.has(key);
        const lines = shown ? kernel.fused.map(fused => `${fused.op} ${fused.ty}` + (fused.operation ? `  ${fused.operation}` : "") + (place(fused) && ` ${place(fused)}`)) : [words(kernel)];
        list.push({ key, phase: kernel.phase, kernels: [kernel], head: `${kernel.number}  ${kernel.name}`, lines: [cost([kernel]), ...lines],
          says: `${kernel.name}\n${words(kernel)}\n${places(kernel)}`, group: single ? null : group.key });
      }
    }
    return list;
  }
  // Forward runs down, backward up beside it, so that kept tensors run across; the optimizer follows to the right.
  function place(list) {
    const column = new Map(used.map((phase, at) => [phase, at])), heights = used.map(() => 0);
    for (const box of list) {
      box.height = 24 + box.lines.length * LINE;
      box.x = 20 + column.get(box.phase) * (WIDTH + GAP);
      box.y = 40 + heights[column.get(box.phase)];
      heights[column.get(box.phase)] += box.height + SPACE;
    }
    const turn = Math.max(0, ...used.map((phase, at) => phase === "forward" || phase === "backward" ? heights[at] : 0));
    for (const box of list) if (box.phase === "backward" && used.includes("forward")) box.y = 40 + turn - (box.y - 40) - box.height - SPACE;
    return { width: 20 + used.length * (WIDTH + GAP), height: Math.max(...heights, 0) + 60 };
  }
  let frame = null;
  function draw() {
    const list = boxes(), size = place(list);
    const svg = shape("svg", { id: "graph", width: "100%", height: "100%" }), world = shape("g");
    const owner = new Map();
    for (const box of list) for (const kernel of box.kernels) owner.set(kernel.number, box);
    const writers = new Map(), edges = new Map();
    for (const kernel of kernels) {
      for (const at of kernel.reads) for (const from of writers.get(at) || []) {
        const [a, b] = [owner.get(from), owner.get(kernel.number)];
        if (a === b) continue;
        const key = a.key + "→" + b.key, edge = edges.get(key) || { a, b, buffers: new Set() };
        edge.buffers.add(at);
        edges.set(key, edge);
      }
      for (const at of kernel.writes) writers.set(at, [...(writers.get(at) || []), kernel.number]);
    }
    const drawn = [];
    for (const { a, b, buffers } of edges.values()) {
      const total = [...buffers].reduce((sum, at) => sum + (step.memory ? step.memory.buffers[at].bytes : 0), 0);
      let path;
      if (a.x === b.x) {
        const [y1, y2] = [a.y + a.height / 2, b.y + b.height / 2], out = a.x + WIDTH + 12 + Math.min(90, Math.abs(y2 - y1) / 12);
        path = `M${a.x + WIDTH},${y1} C${out},${y1} ${out},${y2} ${b.x + WIDTH},${y2}`;
      } else {
        const right = b.x > a.x, x1 = right ? a.x + WIDTH : a.x, x2 = right ? b.x : b.x + WIDTH, mid = (x1 + x2) / 2;
        path = `M${x1},${a.y + a.height / 2} C${mid},${a.y + a.height / 2} ${mid},${b.y + b.height / 2} ${x2},${b.y + b.height / 2}`;
      }
      const edge = shape("path", { class: "edge", d: path, "stroke-width": Math.min(7, 1 + Math.log10(1 + total / 1e4)) }, title(`${count(buffers.size, "buffer")}, ${bytes(total)}`));
      drawn.push({ edge, a, b });
      world.append(edge);
    }
    used.forEach((phase, at) => world.append(shape("text", { class: "head", x: 20 + at * (WIDTH + GAP), y: 24, style: `fill:${colour(phase)}` }, phase)));
    for (const box of list) {
      const g = shape("g", { class: "box", "data-key": box.key, transform: `translate(${box.x},${box.y})` }, title(box.says));
      g.append(shape("rect", { class: "frame", width: WIDTH, height: box.height, rx: 6, stroke: colour(box.phase) }));
      g.append(shape("rect", { width: 5, height: box.height, rx: 2, fill: colour(box.phase) }));
      g.append(shape("text", { x: 14, y: 16, style: "font-weight:600" }, clip(box.head, 40)));
      box.lines.forEach((line, at) => g.append(shape("text", { class: at ? "" : "small", x: 14, y: 16 + (at + 1) * LINE }, clip(line, 43))));
      g.addEventListener("mouseenter", () => drawn.forEach(({ edge, a, b }) => edge.classList.toggle("near", a === box || b === box)));
      g.addEventListener("click", () => {
        if (frame && frame.moved) return;
        if (open.has(box.key)) open.delete(box.key); else open.add(box.key);
        draw();
      });
      g.addEventListener("dblclick", () => { if (box.group) { open.delete(box.group); draw(); } });
      world.append(g);
    }
    svg.append(world);
    view.replaceChildren(svg);
    if (!frame) frame = { x: 0, y: 0, zoom: Math.min(1, 1200 / size.width, Math.max(.45, 630 / size.height)), moved: false };
    const move = () => world.setAttribute("transform", `translate(${frame.x},${frame.y}) scale(${frame.zoom})`);
    move();
    svg.addEventListener("wheel", event => {
      event.preventDefault();
      const factor = Math.exp(-event.deltaY / 500), box = svg.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      frame.x = px - (px - frame.x) * factor; frame.y = py - (py - frame.y) * factor; frame.zoom *= factor;
      move();
    }, { passive: false });
    svg.addEventListener("pointerdown", event => {
      const from = { x: event.clientX - frame.x, y: event.clientY - frame.y };
      frame.moved = false;
      const drag = event => {
        if (Math.hypot(event.movementX, event.movementY) > 1) frame.moved = true;
        frame.x = event.clientX - from.x; frame.y = event.clientY - from.y;
        move();
      };
      addEventListener("pointermove", drag);
      addEventListener("pointerup", () => removeEventListener("pointermove", drag), { once: true });
    });
    frame.fit = () => { frame.zoom = Math.min(1200 / size.width, 620 / size.height); frame.x = frame.y = 0; move(); };
  }
  draw();
  const button = (name, action) => { const it = node("button", {}, name); it.addEventListener("click", action); return it; };
  const tools = node("div", { class: "tools" },
    button("Open all groups", () => { groups.forEach(group => open.add(group.key)); draw(); }),
    button("Close all", () => { open.clear(); draw(); }),
    button("Whole graph", () => frame.fit()),
    button("Actual size", () => { frame.zoom = 1; frame.x = frame.y = 0; draw(); }));
  return section("Graph", "Boxes are kernels or groups of them: click to open, double-click a kernel to close its group. Lines are buffers from the kernel that writes to those that read; point at a box to see its own. Drag to move, wheel to zoom.", tools, view);
}

// ---- one step ----

function stages(step) {
  const whole = step.stages.reduce((sum, stage) => sum + stage.seconds, 0) || 1;
  const colours = ["#5b7fd1", "#8a63c9", "#c15b9a", "#d07152", "#c59a36", "#6fa04c", "#3f9f8f", "#4f8db8"];
  const part = (stage, at) => node("div", { style: `width:${100 * stage.seconds / whole}%;background:${colours[at % colours.length]}`, title: `${stage.name}: ${seconds(stage.seconds)}` },
    stage.seconds / whole > .07 ? `${stage.name} ${seconds(stage.seconds)}` : "");
  return section("Compile time", `${seconds(whole)} in all${step.from_cache ? "; the executable came from the disk cache" : ""}. Every stage: ` +
    step.stages.map(stage => `${stage.name} ${seconds(stage.seconds)}`).join(", "), node("div", { class: "stages" }, ...step.stages.map(part)));
}

function kernelTable(step) {
  const measured = step.kernels.some(kernel => kernel.seconds !== null);
  const columns = [
    ["#", it => it.number], ["kernel", it => it.name, it => node("code", {}, it.name)], ["phase", it => it.phase, it => badge(it.phase)],
    ...(measured ? [["time", it => it.seconds, it => seconds(it.seconds)], ["of machine", it => it.machine_share, it => it.machine_share === null ? "–" : `${(100 * it.machine_share).toFixed(0)} % of ${it.limit}`]] : []),
    ["bytes", it => it.bytes, it => bytes(it.bytes)], ["MFLOP", it => it.flops / 1e6, it => (it.flops / 1e6).toFixed(3)],
    ["fuses", it => it.fused.length], ["operations", it => words(it)], ["your lines", it => places(it), it => node("code", {}, places(it))]];
  const note = measured ? "Mean time of a run, and the share of what the machine can do at most: arithmetic, or the rate of caches or memory for as many bytes, whichever binds." : "Run kiln explain --measure for times.";
  return section("Kernels", note, table("kernels", columns, step.kernels, measured ? { 3: true } : { 3: true, 4: true }));
}

function step(step) {
  const mean = step.runs ? step.run_seconds / step.runs : null, parts = [];
  parts.push(node("div", { class: "cards" },
    card(seconds(mean), `a run, mean of ${step.runs}`), card(seconds(step.compile_seconds), "to compile"), card(String(step.operations), "Burn operations"),
    card(String(step.kernels.length || step.nodes), step.kernels.length ? "kernels" : "nodes, one by one"),
    card(step.memory ? bytes(step.memory.arena_bytes) : "–", "arena"), card(`${step.in_place} of ${step.outputs}`, "outputs in place")));
  parts.push(section("Phases", "", table("phases", [["phase", it => it.phase, it => badge(it.phase)], ["nodes", it => it.nodes], ["kernels", it => it.kernels],
    ["bytes", it => it.bytes, it => bytes(it.bytes)], ["GFLOP", it => it.flops / 1e9, it => (it.flops / 1e9).toFixed(3)]], step.phases)));
  if (step.memory) parts.push(memory(step));
  if (step.kernels.length) parts.push(graph(step), kernelTable(step));
  if (step.saved.length) parts.push(section("Kept for the backward pass", `${count(step.saved.length, "tensor")}, ${bytes(step.saved.reduce((sum, it) => sum + it.bytes, 0))}.`,
    table("saved", [["tensor", it => `${it.name} ${it.ty}`], ["bytes", it => it.bytes, it => bytes(it.bytes)], ["made by", it => it.origin], ["needed by", it => it.users.join(", ")]], step.saved, { 1: true })));
  if (step.recomputed.length) parts.push(section("Computed again in the backward pass", "", table("recomputed", [["operation", it => it.op], ["times", it => it.count], ["bytes not kept", it => it.bytes, it => bytes(it.bytes)]], step.recomputed)));
  parts.push(stages(step));
  const guards = node("details", {}, node("summary", {}, `Guards: ${count(step.guards.inputs.length, "input")}, ${count(step.guards.operations, "operation")}, ${count(step.guards.outputs, "result")} that stay alive`));
  guards.append(table("guards", [["input", it => it[0]], ["type and shape", it => it[1]]], step.guards.inputs.map((ty, at) => [at, ty])));
  parts.push(node("section", {}, guards));
  if (step.details) parts.push(section("What the executor says", "", node("pre", { class: "mono" }, step.details)));
  return parts;
}

// ---- the page ----

root.append(node("h1", {}, `Region “${report.region}”`), node("p", { class: "note" },
  `${count(report.calls, "call")}, ${count(report.steps.length, "compiled step")}, ${count(report.breaks.length, "graph break")}, ${count(report.compiles.filter(it => !it.expected).length, "recompile")}` +
  (report.machine ? `; machine: ${(report.machine.bytes_per_second / 1e9).toFixed(1)} GB/s from memory, ${(report.machine.flops_per_second / 1e9).toFixed(0)} GFLOP/s ${report.machine.gpu ? `on ${report.machine.gpu}` : `with ${count(report.machine.threads, "thread")}`}` : "")));
root.append(findings());
const tabs = node("div", { class: "tabs", role: "tablist" }), body = node("div");
function show(at) {
  [...tabs.children].forEach((tab, other) => tab.setAttribute("aria-selected", other === at));
  body.replaceChildren(...step(report.steps[at]));
}
report.steps.forEach((it, at) => {
  const tab = node("button", { role: "tab" }, `Step ${it.number}: segment ${it.segment} on ${it.backend}${it.provisional ? ", once" : ""}, ${count(it.runs, "run")}`);
  tab.addEventListener("click", () => show(at));
  tabs.append(tab);
});
root.append(tabs, body);
if (report.steps.length) {
  const busiest = report.steps.reduce((best, it, at) => it.kernels.length >= report.steps[best].kernels.length && it.runs >= report.steps[best].runs ? at : best, 0);
  show(busiest);
}
if (report.compiles.length) root.append(section("Every compilation", "", table("compiles", [["step", it => it.step], ["segment", it => it.segment], ["backend", it => it.backend],
  ["guard that failed", it => it.guard || ""], ["before", it => it.before || ""], ["after", it => it.after || ""], ["what to do", it => it.remedy || ""], ["sizes", it => (it.notes || []).join("; ")], ["seconds", it => it.seconds, it => seconds(it.seconds)], ["runs", it => it.runs]], report.compiles)));
document.documentElement.dataset.ready = "yes";
