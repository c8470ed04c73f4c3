// What the page of a graph does: shows the rows in sight, draws, filters, finds. All texts of the graph are set as
// text, never as markup. Nothing is done more than once per op, and drawing only per row in sight.
#include "serried/graph/text/page.h"

namespace serried::graph {

const std::string_view kPageScript = R"js('use strict';
(() => {
const graph = JSON.parse(document.getElementById('graph').textContent);
const {nodes, values, live} = graph;
const ROW = 26, MAX_LANES = 6, MAX_LINKS = 60;
const $ = id => document.getElementById(id);
const list = $('list'), find = $('find'), strip = $('strip'), links = $('links');
const count = number => number.toLocaleString('en');
const hue = phase => `var(--${phase})`;
let colours = {};
let rows = [];         // nodes that are shown
let places = [];       // of each node among them, or -1
let matches = [];      // nodes
let is_match = new Set();
let at_match = -1, chosen = -1, hovered = -1, texts = null, is_asked = false;

function bytes(n) {
  if (n < 1024) return `${n} B`;
  const units = ['KiB', 'MiB', 'GiB', 'TiB'];
  let unit = -1;
  while (n >= 1024 && unit < 3) { n /= 1024; ++unit; }
  return `${n.toFixed(1)} ${units[unit]}`;
}

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// Who wrote each operand last, and who uses what each node gives.
const makers = [], users = nodes.map(() => []);
{
  const writer = new Map();
  nodes.forEach((node, i) => {
    makers.push(node.in.map(id => writer.has(id) ? writer.get(id) : -1));
    for (const from of new Set(makers[i])) if (from >= 0) users[from].push(i);
    for (const id of node.out) writer.set(id, i);
  });
}

// Collectives on their way, each in a lane of its own while there are lanes.
const flights = [], flight_of_wait = new Map();
{
  const ends = [];
  nodes.forEach((node, i) => {
    if (node.until === undefined) return;
    let lane = ends.findIndex(end => end < i);
    if (lane < 0) lane = Math.min(ends.length, MAX_LANES - 1);
    ends[lane] = Math.max(ends[lane] ?? 0, node.until);
    flights.push({from: i, to: node.until, lane});
    flight_of_wait.set(node.until, i);
  });
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const phases = ['forward', 'backward', 'collective', 'optimizer', 'other'];
  for (const name of [...phases, 'faint', 'line', 'accent', 'memory', 'ink', 'tick']) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

function prepare(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const pen = canvas.getContext('2d');
  pen.scale(scale, scale);
  return pen;
}

function showFacts() {
  const {memory} = graph;
  const fact = (name, value, remark) => {
    const text = make('dd', '', value);
    if (remark) text.append(' ', make('small', '', remark));
    return make('div', '', make('dt', '', name), text);
  };
  const total = memory.reduce((sum, part) => sum + part.bytes, 0);
  const parts = memory.filter(part => part.bytes > 0).map(part => `${part.what} ${bytes(part.bytes)}`).join('\n');
  const all = fact('Memory', bytes(total));
  all.title = parts;
  const facts = [fact('Ops', count(nodes.length)), fact('Collectives', count(graph.collectives)),
                 fact('Given to collectives', bytes(graph.given)), all];
  if (nodes.length > 0 && live[graph.peak] > 0) {
    const peak = make('button', 'link', bytes(live[graph.peak]));
    peak.addEventListener('click', () => choose(graph.peak));
    facts.push(fact('Computed values at their peak', peak, `in op ${count(graph.peak)}`));
  }
  $('facts').append(...facts);
}

const is_hidden = new Set();

function showPhases() {
  for (const {phase, ops, written} of graph.phases) {
    const box = make('input');
    box.type = 'checkbox';
    box.checked = true;
    box.addEventListener('change', () => {
      box.checked ? is_hidden.delete(phase) : is_hidden.add(phase);
      filter();
    });
    const sizes = phase === 'collective' ? `${bytes(graph.given)} given` : `${bytes(written)} written`;
    const label = make('label', '', box, make('b', '', phase), make('small', '', `${count(ops)} ops · ${sizes}`));
    label.style.setProperty('--hue', hue(phase));
    label.title = `Show or hide: ${phase}`;
    $('phases').append(label);
  }
}

function filter() {
  const top = rows[Math.floor(list.scrollTop / ROW)];
  rows = [];
  places = nodes.map((node, i) => is_hidden.has(node.phase) ? -1 : rows.push(i) - 1);
  $('space').style.height = `${rows.length * ROW}px`;
  if (top !== undefined) {
    const next = rows.find(i => i >= top);
    if (next !== undefined) list.scrollTop = places[next] * ROW;
  }
  search(false);
  draw();
}

// "%7 f32[3, 2]"
const nameOf = id => `${values[id].name} ${values[id].shape}`;

// "%7 f32[3, 2], %8 f32[2] +3"
function given(node) {
  const tensors = node.out.filter(id => values[id].kind !== 'work');
  const shown = tensors.slice(0, 3).map(nameOf);
  return shown.join(', ') + (tensors.length > 3 ? ` +${tensors.length - 3}` : '');
}

function rowOf(i) {
  const node = nodes[i];
  const row = make('div', 'row', make('i'), make('span', 'no', count(i)), make('span', 'op mono', node.op),
                   make('span', 'what mono', given(node)),
                   make('span', 'bytes', node.written > 0 ? bytes(node.written) : ''),
                   make('span', 'given', node.given === undefined ? '' : `${bytes(node.given)} · ${node.group}`));
  row.style.setProperty('--hue', hue(node.phase));
  row.dataset.op = i;
  row.title = node.line.slice(0, 1000);
  if (is_match.has(i)) row.classList.add(i === matches[at_match] ? 'now' : 'hit');
  if (i === chosen) row.classList.add('chosen');
  return row;
}

function sight() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW));
  return [first, Math.min(rows.length, first + Math.ceil(list.clientHeight / ROW) + 1)];
}

function drawRows() {
  const [first, end] = sight();
  const shown = [];
  for (let k = first; k < end; ++k) shown.push(rowOf(rows[k]));
  $('rows').style.top = `${first * ROW}px`;
  if (rows.length === 0) {
    shown.push(make('div', 'empty', nodes.length === 0 ? 'This graph has no ops.' : 'All phases are hidden.'));
  }
  $('rows').replaceChildren(...shown);
}

const middle = place => place * ROW + ROW / 2 - list.scrollTop;

function drawArc(pen, width, from, to) {
  if (places[from] < 0 || places[to] < 0) return;
  const y1 = middle(places[from]), y2 = middle(places[to]);
  const bend = width - Math.min(width - 4, 10 + 9 * Math.sqrt(Math.abs(places[to] - places[from])));
  pen.beginPath();
  pen.moveTo(width, y1);
  pen.bezierCurveTo(bend, y1, bend, y2, width, y2);
  pen.stroke();
}

function drawFlights(pen, width, first, end) {
  pen.lineCap = 'round';
  for (const {from, to, lane} of flights) {
    if (places[from] < 0 || places[to] < first || places[from] >= end) continue;
    const x = 8 + lane * 7, y1 = middle(places[from]), y2 = middle(places[to]);
    pen.globalAlpha = .35;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(width, y1); pen.lineTo(x, y1); pen.moveTo(x, y2); pen.lineTo(width, y2);
    pen.stroke();
    pen.globalAlpha = .9;
    pen.lineWidth = 4;
    pen.beginPath();
    pen.moveTo(x, y1); pen.lineTo(x, y2);
    pen.stroke();
  }
  pen.globalAlpha = 1;
}

// From what operands come and where results go: faint for all in sight, strong for one.
function drawLinks() {
  const width = links.clientWidth, height = list.clientHeight;
  links.style.height = '0';
  const pen = prepare(links, width, height);
  links.style.height = `${height}px`;
  links.style.marginBottom = `-${height}px`;
  const [first, end] = sight();
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1.2;
  for (let k = first; k < end; ++k) {
    for (const from of makers[rows[k]].slice(0, MAX_LINKS)) if (from >= 0) drawArc(pen, width, from, rows[k]);
  }
  pen.strokeStyle = colours.collective;
  drawFlights(pen, width, first, end);
  const shown = hovered >= 0 ? hovered : chosen;
  if (shown < 0) return;
  pen.strokeStyle = colours.accent;
  pen.lineWidth = 1.8;
  for (const from of makers[shown]) if (from >= 0) drawArc(pen, width, from, shown);
  for (const to of users[shown]) drawArc(pen, width, shown, to);
}

function drawMemory(pen, width, top, bottom) {
  const most = live[graph.peak];
  if (!most) return;
  pen.fillStyle = colours.memory;
  pen.beginPath();
  pen.moveTo(0, bottom);
  const columns = Math.min(width, nodes.length);
  for (let c = 0; c < columns; ++c) {
    let height = 0;
    const end = Math.max(Math.floor(c * nodes.length / columns) + 1, Math.floor((c + 1) * nodes.length / columns));
    for (let i = Math.floor(c * nodes.length / columns); i < end; ++i) height = Math.max(height, live[i]);
    const y = bottom - (bottom - top) * height / most;
    pen.lineTo(c * width / columns, y);
    pen.lineTo((c + 1) * width / columns, y);
  }
  pen.lineTo(width, bottom);
  pen.fill();
  const x = (graph.peak + .5) * width / nodes.length;
  pen.fillStyle = colours.faint;
  pen.font = '11px system-ui, sans-serif';
  const text = `${bytes(most)} of computed values`, room = pen.measureText(text).width;
  pen.beginPath(); pen.arc(x, top, 2.5, 0, 7); pen.fill();
  pen.fillText(text, x + room + 8 < width ? x + 7 : x - room - 7, top + 4);
}

// The whole graph from left to right: phases, collectives on their way, memory, matches, what is in sight.
function drawStrip() {
  const width = strip.clientWidth, height = strip.clientHeight;
  const pen = prepare(strip, width, height);
  if (nodes.length === 0) return;
  const step = width / nodes.length, gap = step > 6 ? 1 : 0;
  nodes.forEach((node, i) => {
    pen.globalAlpha = is_hidden.has(node.phase) ? .15 : 1;
    pen.fillStyle = colours[node.phase];
    pen.fillRect(i * step, 4, Math.max(1, step - gap), 14);
  });
  pen.globalAlpha = 1;
  pen.fillStyle = colours.collective;
  for (const {from, to, lane} of flights) {
    pen.fillRect(from * step, 22 + lane * 4, Math.max(2, (to - from + 1) * step - gap), 3);
  }
  const lanes = flights.reduce((most, flight) => Math.max(most, flight.lane + 1), 0);
  drawMemory(pen, width, 30 + lanes * 4, height - 1);
  pen.fillStyle = colours.tick;
  for (const i of matches) pen.fillRect(i * step, 0, Math.max(2, step - gap), 3);
  const [first, end] = sight();
  if (end <= first) return;
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 1;
  const left = rows[first] * step, right = (rows[end - 1] + 1) * step;
  pen.strokeRect(left + .5, 1.5, Math.max(3, right - left - 1), height - 3);
}

function draw() {
  if (is_asked) return;
  is_asked = true;
  requestAnimationFrame(() => {
    is_asked = false;
    drawRows();
    drawLinks();
    drawStrip();
  });
}

function reveal(i) {
  if (places[i] < 0) return;
  const y = places[i] * ROW - list.scrollTop;
  if (y < ROW || y > list.clientHeight - 2 * ROW) list.scrollTop += y - list.clientHeight / 2;
}

function remember() {
  const state = new URLSearchParams();
  if (chosen >= 0) state.set('op', chosen);
  if (find.value) state.set('find', find.value);
  history.replaceState(null, '', `#${state}`);
}

function choose(i) {
  chosen = i;
  showDetails();
  reveal(i);
  remember();
  draw();
}

function linkTo(i) {
  const link = make('button', 'link mono', `${count(i)} ${nodes[i].op}`);
  link.addEventListener('click', () => choose(i));
  return link;
}

function linksTo(ids, shown = 12) {
  const parts = ids.slice(0, shown).flatMap((id, k) => k > 0 ? [', ', linkTo(id)] : [linkTo(id)]);
  return ids.length > shown ? [...parts, ` and ${count(ids.length - shown)} more`] : parts;
}

function valueItem(id, ...where) {
  const value = values[id];
  const size = value.kind === 'work' ? '' : bytes(value.bytes);
  return make('li', '', make('span', 'size', size), make('span', 'mono', nameOf(id)),
              make('div', 'where', ...where));
}

function section(title, items) {
  if (items.length === 0) return [];
  const shown = items.slice(0, MAX_LINKS);
  if (items.length > shown.length) shown.push(make('li', 'where', `and ${count(items.length - shown.length)} more`));
  return [make('h3', '', title), make('ul', '', ...shown)];
}

function communication(i) {
  const node = nodes[i], parts = [];
  if (node.given !== undefined) {
    const verb = node.op === 'recv' ? 'Gets' : 'Gives';
    parts.push(make('p', '', `${verb} ${bytes(node.given)} over the group ${node.group}.`));
  }
  if (node.until !== undefined) {
    const between = node.until - i - 1, ops = between === 1 ? 'op' : 'ops';
    parts.push(make('p', '', `On its way during ${count(between)} ${ops}, until `, linkTo(node.until), '.'));
  }
  if (flight_of_wait.has(i)) parts.push(make('p', '', 'Waits for ', linkTo(flight_of_wait.get(i)), '.'));
  return parts;
}

function showKeys() {
  const key = name => make('kbd', '', name);
  $('details').replaceChildren(
      make('h2', '', 'Choose an op'), make('p', '', 'to see what it takes, what it gives, and to whom.'),
      make('p', '', key('/'), ' find, ', key('Enter'), ' next, ', key('Shift+Enter'), ' previous'),
      make('p', '', key('↑'), ' ', key('↓'), ' the op before and after'));
}

function showDetails() {
  const node = nodes[chosen];
  const badge = make('span', 'badge', node.phase + (node.during ? ` in ${node.during}` : ''));
  badge.style.setProperty('--hue', hue(node.phase));
  const takes = node.in.map((id, k) => {
    const from = makers[chosen][k];
    return from >= 0 ? valueItem(id, 'from ', linkTo(from)) : valueItem(id, values[id].kind);
  });
  const gives = node.out.map(id => {
    const readers = users[chosen].filter(to => nodes[to].in.includes(id));
    if (readers.length === 0) return valueItem(id, values[id].role ?? values[id].kind);
    return valueItem(id, 'to ', ...linksTo(readers));
  });
  $('details').replaceChildren(
      make('h2', '', node.op), badge,
      make('p', '', `Op ${count(chosen)}, ${node.name}. ${bytes(live[chosen])} of computed values live.`),
      ...communication(chosen), make('code', '', node.line), ...section('Takes', takes), ...section('Gives', gives));
  $('details').scrollTop = 0;
}

// All words of the search in what is known of an op.
function search(jumps = true) {
  const words = find.value.toLowerCase().split(/\s+/).filter(word => word !== '');
  if (words.length > 0) {
    texts ??= nodes.map(node => {
      const tensors = [...node.in, ...node.out].slice(0, 200).map(nameOf);
      return [node.op, node.name, node.phase, node.line, node.group ?? '', ...tensors].join(' ').toLowerCase();
    });
  }
  matches = words.length === 0 ? [] : rows.filter(i => words.every(word => texts[i].includes(word)));
  is_match = new Set(matches);
  const [first] = sight();
  at_match = matches.length === 0 ? -1 : Math.max(0, matches.findIndex(i => places[i] >= first));
  if (jumps && at_match >= 0) reveal(matches[at_match]);
  showCount();
}

function showCount() {
  const found = matches.length === 0 ? 'none' : `${count(at_match + 1)} of ${count(matches.length)}`;
  $('count').value = find.value.trim() === '' ? '' : found;
  $('next').disabled = $('previous').disabled = matches.length === 0;
}

function go(by) {
  if (matches.length === 0) return;
  at_match = (at_match + by + matches.length) % matches.length;
  showCount();
  choose(matches[at_match]);
}

function move(by) {
  if (rows.length === 0) return;
  const place = chosen >= 0 && places[chosen] >= 0 ? places[chosen] + by : sight()[0];
  choose(rows[Math.min(rows.length - 1, Math.max(0, place))]);
}

function opOf(event) {
  const row = event.target instanceof Element ? event.target.closest('.row') : null;
  return row ? Number(row.dataset.op) : -1;
}

function opAt(event) {
  const x = (event.clientX - strip.getBoundingClientRect().left) / strip.clientWidth;
  return Math.min(nodes.length - 1, Math.max(0, Math.floor(x * nodes.length)));
}

function scrollTo(event) {
  if (rows.length === 0) return;
  const i = opAt(event), near = rows.find(k => k >= i) ?? rows[rows.length - 1];
  list.scrollTop = places[near] * ROW - list.clientHeight / 2;
}

function listen() {
  list.addEventListener('scroll', draw);
  list.addEventListener('click', event => { if (opOf(event) >= 0) choose(opOf(event)); });
  list.addEventListener('mousemove', event => { if (opOf(event) !== hovered) { hovered = opOf(event); drawLinks(); } });
  list.addEventListener('mouseleave', () => { hovered = -1; drawLinks(); });
  strip.addEventListener('pointerdown', event => { strip.setPointerCapture(event.pointerId); scrollTo(event); });
  strip.addEventListener('pointermove', event => {
    if (nodes.length === 0) return;
    const i = opAt(event);
    strip.title = `${count(i)} ${nodes[i].op}, ${nodes[i].phase}, ${bytes(live[i])} live`;
    if (event.buttons === 1) scrollTo(event);
  });
  find.addEventListener('input', () => { search(); remember(); draw(); });
  $('next').addEventListener('click', () => go(1));
  $('previous').addEventListener('click', () => go(-1));
  find.addEventListener('keydown', event => {
    if (event.key === 'Enter') go(event.shiftKey ? -1 : 1);
    if (event.key === 'Escape') { find.value = ''; search(); remember(); draw(); list.focus(); }
  });
  document.addEventListener('keydown', event => {
    if (event.target === find || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === '/') { event.preventDefault(); find.focus(); find.select(); }
    const by = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (by !== undefined) { event.preventDefault(); move(by); }
  });
  window.addEventListener('resize', draw);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readColours(); draw(); });
}

readColours();
showFacts();
showPhases();
if (nodes.length === 0) strip.hidden = true;
listen();
const state = new URLSearchParams(location.hash.slice(1));
find.value = state.get('find') ?? '';
filter();
if (find.value !== '') search();
if (state.has('op') && nodes[Number(state.get('op'))]) choose(Number(state.get('op'))); else showKeys();
})();
)js";

}  // namespace serried::graph
