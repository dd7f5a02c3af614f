"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "path", "text", "g", "title", "line", "defs", "marker"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const show = (id, visible) => { $(id).hidden = !visible; };
const frames = data.frames;
let now = Math.max(0, frames.length - 1);

// Pages that the evidence names, by themselves or by a slot, are outlined.
const named = { device: new Set(), host: new Set() };
for (const [, tier, what, list] of data.evidence.matchAll(/(host )?(page|slot)s? \[?([\d, ]+)/g)) {
  for (const number of list.match(/\d+/g) || []) {
    const page = what === "page" ? Number(number) : Math.floor(number / data.page_size);
    named[tier ? "host" : "device"].add(page);
  }
}

function cells(id, frame, before) {
  const found = frame[id];
  show(`${id}-part`, Boolean(found));
  if (!found) return;
  const kinds = new Set();
  const old = new Map((before && before[id] || []).map((cell) => [cell.page, cell.says]));
  $(id).replaceChildren(...found.map((cell) => {
    kinds.add(cell.kind);
    const changed = before && old.get(cell.page) !== cell.says ? " changed" : "";
    const wrong = now === frames.length - 1 && named[id].has(cell.page) ? " named" : "";
    return make("span", { class: `cell ${cell.kind}${changed}${wrong}`, title: cell.says },
      String(cell.page));
  }));
  const legend = make("p", { class: "legend" });
  for (const kind of kinds) {
    legend.append(make("b", { class: `cell ${kind}`, style: "padding:0;min-width:0" }), kind);
  }
  $(id).append(legend);
}

// The tree: leaves one under the other, parents in the middle of their children.
function tree(frame) {
  show("tree-part", Boolean(frame.tree));
  if (!frame.tree) return;
  const nodes = [{ parent: null, key: [], label: "root" }, ...frame.tree];
  const children = nodes.map(() => []);
  frame.tree.forEach((node, i) => children[node.parent + 1].push(i + 1));
  const lines = nodes.map((node, i) => i === 0 ? ["root"] : [
    (node.space === null ? "" : `${node.space}: `) + node.key.join(" "),
    node.device ? `device ${node.device.join(" ")}` : "",
    node.host ? `host ${node.host.join(" ")}` : "",
    node.lock ? `lock ${node.lock}` : "",
  ].filter(Boolean));
  const width = lines.map((part) => 16 + 7.4 * Math.max(...part.map((line) => line.length)));
  const height = lines.map((part) => 12 + 15 * part.length);
  const place = [];
  let bottom = 6, right = 0;
  (function put(i, x) {
    const next = x + width[i] + 34;
    right = Math.max(right, next);
    if (!children[i].length) {
      place[i] = { x, y: bottom };
      bottom += height[i] + 10;
    } else {
      const top = bottom;
      children[i].forEach((child) => put(child, next));
      place[i] = { x, y: Math.max(top, (top + bottom - 10 - height[i]) / 2) };
      bottom = Math.max(bottom, place[i].y + height[i] + 10);
    }
  })(0, 6);
  const svg = make("svg", { width: right, height: bottom, role: "img", "aria-label": "the tree" });
  nodes.forEach((node, i) => children[i].forEach((child) => {
    const a = { x: place[i].x + width[i], y: place[i].y + height[i] / 2 };
    const b = { x: place[child].x, y: place[child].y + height[child] / 2 };
    const middle = (a.x + b.x) / 2;
    svg.append(make("path", { class: "link", d: `M${a.x} ${a.y} C${middle} ${a.y} ${middle} ${b.y} ${b.x} ${b.y}` }));
  }));
  nodes.forEach((node, i) => {
    const tier = node.device && node.host ? "both" : node.device ? "device" : node.host ? "host" : "";
    const { x, y } = place[i];
    svg.append(make("rect", { class: `box ${tier}${node.lock ? " locked" : ""}`, x, y, rx: 7,
      width: width[i], height: height[i] }));
    lines[i].forEach((line, row) => svg.append(
      make("text", { x: x + 8, y: y + 17 + 15 * row, class: row ? "soft" : "" }, line)));
  });
  $("tree").replaceChildren(svg);
}

function requests(frame) {
  const found = frame.requests || [];
  show("requests-part", found.length > 0);
  const head = make("tr", {}, ...["request", "tokens", "computed", "protected", "slots"].map(
    (name) => make("th", { scope: "col" }, name)));
  $("requests").replaceChildren(head, ...found.map((one) => make("tr", {}, ...[
    one.name, one.tokens.join(" "), one.computed, one.protected, one.slots.join(" "),
  ].map((value) => make("td", {}, String(value))))));
}

// Launches in the order of their issue; a row a stream. What was issued later is not drawn.
function timeline() {
  const found = data.timeline;
  const until = frames.length - 1 - now;
  const last = found ? Math.max(0, ...found.spans.map((span) => span.step)) : 0;
  const spans = found ? found.spans.filter((span) => span.step <= last - until || until === 0) : [];
  show("timeline-part", spans.length > 0);
  $("timeline").replaceChildren();
  if (!spans.length) return;
  const tracks = [...new Map(found.spans.map((span) => [span.track, span.actor]))];
  const names = [...new Set(tracks.map(([, name]) => name))];
  const row = new Map(tracks.map(([track, name]) => [track, names.indexOf(name)]));
  const left = 6;
  const place = new Map();
  let x = left;
  for (const span of spans) {
    const width = 14 + 7.4 * span.name.length;
    place.set(`${span.track}/${span.number}`, { x, width, y: 10 + 44 * row.get(span.track), span });
    x += width + 14;
  }
  const svg = make("svg", { width: x + 10, height: 44 * names.length + 16, role: "img",
    "aria-label": "launches by stream, in the order of their issue" });
  svg.append(make("defs", {}, make("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4,
    markerWidth: 7, markerHeight: 7, orient: "auto" },
    make("path", { d: "M0 0 L8 4 L0 8 Z", fill: "context-stroke" }))));
  names.forEach((name, i) => svg.append(
    make("line", { class: "link", x1: 0, x2: x, y1: 25 + 44 * i, y2: 25 + 44 * i })));
  $("names").replaceChildren(...names.map((name) => make("span", { title: name },
    name.replace(/^(stream|host thread) /, "").replaceAll("'", ""))));
  const arrow = (a, b, kind, says) => {
    if (!a || !b) return;
    const from = { x: a.x + a.width, y: a.y + 15 }, to = { x: b.x, y: b.y + 15 };
    const line = make("path", { class: kind, "marker-end": "url(#head)",
      d: `M${from.x} ${from.y} C${from.x + 24} ${from.y} ${to.x - 24} ${to.y} ${to.x} ${to.y}` });
    line.append(make("title", {}, says));
    svg.append(line);
  };
  for (const edge of found.edges) {
    arrow(place.get(`${edge.on}/${edge.number}`), place.get(`${edge.track}/${edge.after + 1}`),
      "wait", "waits for it");
  }
  const current = until === 0 ? last : last - until;
  for (const { x: at, width, y, span } of place.values()) {
    const kind = `span${span.ran === null ? "" : " ran"}${span.step === current ? " now" : ""}`;
    const box = make("rect", { class: kind, x: at, y, width, height: 30, rx: 5 });
    box.append(make("title", {}, `${span.name}, number ${span.number} of ${span.actor}`));
    svg.append(box, make("text", { x: at + 7, y: y + 19 }, span.name));
  }
  if (found.missing && until === 0) {
    arrow(place.get(found.missing.from.join("/")), place.get(found.missing.to.join("/")),
      "missing", found.missing.says);
  }
  $("timeline").replaceChildren(svg);
  const first = found.missing && until === 0 && place.get(found.missing.from.join("/"));
  $("timeline").scrollLeft = first ? Math.max(0, first.x - 40) : x;
  $("timeline-hint").textContent = found.missing && until === 0
    ? `Dashed: ${found.missing.says}.` : "Filled: has run. Arrows: waits.";
}

function go(step) {
  now = Math.min(Math.max(step, 0), Math.max(0, frames.length - 1));
  const frame = frames[now] || { text: "", step: "" };
  $("slider").value = now;
  $("at").textContent = frames.length ? `${now} of ${frames.length - 1}: ${frame.step}` : "";
  const lines = [...$("program").children];
  const shift = lines.length - frames.length;
  lines.forEach((line, i) => {
    line.className = i - shift === now ? "now" : i - shift > now ? "later" : "";
    if (i === lines.length - 1 && data.rule) line.classList.add("last");
  });
  cells("device", frame, frames[now - 1]);
  cells("host", frame, frames[now - 1]);
  $("flight").replaceChildren(...(frame.flight || []).map((one) => make("li", {}, `in flight: ${one}`)));
  tree(frame);
  requests(frame);
  timeline();
  $("text").textContent = frame.text;
  show("text-part", Boolean(frame.text));
}

function copy() {
  const text = data.program.join("\n") + "\n";
  const done = () => { $("copy").textContent = "copied"; };
  if (navigator.clipboard && window.isSecureContext) {
    navigator.clipboard.writeText(text).then(done);
    return;
  }
  const area = make("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  done();
}

$("subtitle").textContent = data.subtitle;
$("rule").textContent = data.rule || "no violation";
$("evidence").textContent = data.evidence;
$("sentence").textContent = data.sentence ? `The rule: ${data.sentence}.` : "";
show("sentence", Boolean(data.sentence));
$("program").replaceChildren(...data.program.map((line, i) => {
  const item = make("li", {}, line);
  item.addEventListener("click", () => go(i - (data.program.length - frames.length)));
  return item;
}));
show("program-part", data.program.length > 0);
$("notes").replaceChildren(...data.notes.map((line) => make("li", {}, line)));
show("notes-part", data.notes.length > 0);
$("slider").max = Math.max(0, frames.length - 1);
show("steps", frames.length > 1);
$("slider").addEventListener("input", (event) => go(Number(event.target.value)));
$("back").addEventListener("click", () => go(now - 1));
$("forth").addEventListener("click", () => go(now + 1));
$("copy").addEventListener("click", copy);
// A link to a step: report.html#3
const linked = () => { if (/^#\d+$/.test(location.hash)) go(Number(location.hash.slice(1))); };
window.addEventListener("hashchange", linked);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: frames.length - 1 };
  if (event.key in keys) { go(keys[event.key]); event.preventDefault(); }
  if (event.key === "c") copy();
});
go(now);
linked();
