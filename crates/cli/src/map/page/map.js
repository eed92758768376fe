// Draws a part of a pool as a grid, in which addresses grow to the right and downwards, and lets the user move in
// it. The cells and their descriptions come from `kubectl cadastre`. Only the last answer is kept.
'use strict';

const $ = (id) => document.getElementById(id);
const KINDS = {
  block: { words: 'Blocks, empty to full', from: 'block-0', to: 'block-1' },
  changing: { words: 'Blocks that leave, or are not listed yet', from: 'block-0', to: 'block-1', edge: true },
  podCidr: { words: 'podCIDRs, empty to full', from: 'cidr-0', to: 'cidr-1' },
  quarantine: { words: 'In quarantine: the node is gone', from: 'rest', to: 'rest', hatch: 'paper' },
  address: { words: 'In use', from: 'block-1', to: 'block-1' },
  reserved: { words: 'Reserved', from: 'free', to: 'free', hatch: 'reserved' },
};
const GUTTER = 112; // the width for the addresses of lines, as in map.css
const TOP = 6; // room for the outline of a cell in the first line
const LISTED = 200;

let now = null; // the last answer to `view`
let chosen = null; // the description of the chosen cell
let grid = null; // the size of the grid on the screen

// ---- requests ------------------------------------------------------------------------------------

async function ask(what, query) {
  const answer = await fetch(what + '?' + encodeURIComponent(JSON.stringify(query)));
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

// Requests run one after the other, so that a key pressed twice moves twice.
let queue = Promise.resolve(), waiting = 0;
function turn(work) {
  waiting++;
  document.documentElement.dataset.state = 'busy';
  queue = queue.then(work).then(() => ($('trouble').hidden = true), trouble).then(() => {
    if (!--waiting) document.documentElement.dataset.state = 'ready';
  });
  return queue;
}

function trouble(error) {
  $('trouble').textContent = error.message + '.';
  $('trouble').hidden = false;
}

// The place in view, with some values replaced.
function here(other) {
  const place = { pool: now?.pool, view: now?.picture?.view, at: chosen?.cidr, ...other };
  return Object.fromEntries(Object.entries(place).filter(([, value]) => value));
}
const look = (place) => turn(async () => show(await ask('view', place())));
const move = (other) => look(() => here(other));
const visit = (at) => move({ at });
const choose = (cell) => turn(async () => mark(await ask('cell', spot(cell()))));

function spot(cell) {
  const { view, cellSize } = now.picture;
  return { pool: now.pool, view, cellSize, cell };
}

function mark(about) {
  chosen = about;
  overlay();
  aside();
  save();
}

// ---- the picture ---------------------------------------------------------------------------------

const colours = () => {
  const style = getComputedStyle(document.documentElement), known = {};
  return (name) => (known[name] ??= style.getPropertyValue('--' + name).trim());
};
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mixed = (a, b, part) => channels(a).map((from, i) => Math.round(from + (channels(b)[i] - from) * part));
const isLight = ([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b > 140;
const tone = (cell, c) => mixed(c(KINDS[cell.kind].from), c(KINDS[cell.kind].to), (cell.fill / 1000) ** 0.7);

function hatch(pen, colour, dense) {
  const tile = document.createElement('canvas');
  const size = (tile.width = tile.height = dense ? 4 : 7);
  const lines = tile.getContext('2d');
  lines.strokeStyle = colour;
  lines.lineWidth = dense ? 1 : 1.6;
  for (const from of [-size, 0, size]) { lines.moveTo(from - 1, size + 1); lines.lineTo(from + size + 1, -1); }
  lines.stroke();
  return pen.createPattern(tile, 'repeat');
}

function surface(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + 'px';
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  return pen;
}

function measure() {
  const { columns, lines } = now.picture;
  const width = Math.max(200, $('frame').clientWidth - GUTTER);
  const tall = Math.max(300, Math.min(620, innerHeight - 330));
  const h = Math.max(3, Math.min(58, Math.floor(tall / lines.length)));
  const w = Math.min(width / columns, 320);
  return { columns, w, h, count: columns * lines.length, gap: Math.min(w, h) >= 9 ? 1 : 0 };
}

// Adjacent cells as boxes, one for each line that they touch.
function* boxes({ at, count }) {
  const { columns, w, h, gap } = grid;
  for (const end = at + count; at < end; ) {
    const line = Math.floor(at / columns), column = at % columns;
    const next = Math.min(end, (line + 1) * columns);
    const x = GUTTER + Math.round(column * w), right = GUTTER + Math.round((column + next - at) * w);
    yield [x, TOP + line * h, Math.max(1, right - x - gap), Math.max(1, h - gap)];
    at = next;
  }
}

function draw() {
  grid = measure();
  const { cells, lines } = now.picture, { h, w } = grid;
  const c = colours();
  const pen = surface($('map'), $('frame').clientWidth, TOP + lines.length * h + 4);
  const hatches = {};
  const hatched = (name, dense = h < 9) => (hatches[name] ??= hatch(pen, c(name), dense));
  const paint = (cell, colour) => {
    pen.fillStyle = colour;
    for (const box of boxes(cell)) pen.fillRect(...box);
  };
  pen.font = '11px ui-monospace, "DejaVu Sans Mono", monospace';
  pen.textBaseline = 'middle';
  // Free cells are painted one by one only if there are gaps between them.
  const by = grid.gap ? 1 : grid.columns;
  for (let at = 0; at < grid.count; at += by) paint({ at, count: by }, c('free'));
  for (const cell of cells) {
    const { edge, hatch } = KINDS[cell.kind], colour = tone(cell, c);
    const part = (cell.allocated + cell.quarantined) / 1000;
    for (const [x, y, width, height] of boxes(cell)) {
      const tall = height < 8 ? height : Math.max(2, height * Math.min(1, part));
      pen.fillStyle = `rgb(${colour})`;
      if (part) pen.fillRect(x, y + height - tall, width, tall);
      pen.fillStyle = c('reserved');
      if (cell.reserved && cell.reserved < 1000) pen.fillRect(x, y, Math.min(3, w), Math.min(3, h));
      pen.fillStyle = c('leave');
      if (edge) pen.fillRect(x, y + height - (h >= 9 ? 3 : 1), width, h >= 9 ? 3 : 1);
    }
    if (hatch && part) paint(cell, hatched(hatch));
    if (cell.reserved >= 1000) paint(cell, hatched('reserved'));
    if (cell.overlaps) paint(cell, hatched('clash', true));
    if (part) label(pen, cell, colour);
  }
  // Addresses of lines, as many as fit.
  pen.fillStyle = c('soft');
  pen.textAlign = 'right';
  const every = Math.max(1, 2 ** Math.ceil(Math.log2(16 / h)));
  for (let line = 0; line < lines.length; line += every) {
    const text = lines[line].length > 15 ? '…' + lines[line].slice(-14) : lines[line];
    pen.fillText(text, GUTTER - 10, TOP + line * h + Math.min(h, 16) / 2, GUTTER - 12);
  }
  overlay();
}

function label(pen, cell, colour) {
  const [[x, y, w, h]] = boxes(cell);
  if (grid.h < 15 || w < 32) return;
  const room = Math.floor((w - 8) / 6.7), two = h >= 34;
  const lines = [cell.owners.length > 1 ? cell.owners.length + ' nodes' : cell.owners[0] ?? ''];
  if (cell.kind === 'address') {
    const address = cell.cidr.split('/')[0];
    lines.push(address.slice(Math.max(address.lastIndexOf('.'), address.lastIndexOf(':'))));
    lines[0] = lines[0].split('/').pop();
  } else if (cell.owners.length) lines.push(Math.round(cell.fill / 10) + ' %');
  pen.fillStyle = isLight(colour) ? '#10151a' : '#ffffff';
  pen.textAlign = 'left';
  // A name that is too long keeps its end, which tells more than its beginning.
  lines.slice(0, two ? 2 : 1).forEach((text, i) => {
    pen.fillText(text.length > room ? '…' + text.slice(1 - room) : text, x + 5, y + h / 2 + (two ? 16 * i - 8 : 0));
  });
}

// Outlines the chosen cell and the other ranges of its node.
function overlay() {
  const c = colours(), pen = surface($('marks'), $('map').clientWidth, $('map').clientHeight);
  const outline = (cell, width, colour) => {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    for (const [x, y, w, h] of boxes(cell)) {
      pen.strokeRect(x - width / 2 + 0.5, y - width / 2 + 0.5, Math.max(w, 3) + width - 1, Math.max(h, 3) + width - 1);
    }
  };
  if (!chosen || chosen.count >= grid.count) return;
  for (const cell of now.picture.cells) {
    if (chosen.node && cell.owners.includes(chosen.node) && cell.at !== chosen.at) outline(cell, 1.5, c('ink'));
  }
  outline(chosen, 4, c('paper'));
  outline(chosen, 2, c('ink'));
}

// ---- round the picture ---------------------------------------------------------------------------

function make(tag, className = '', text = '', ...inside) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  element.append(...inside);
  return element;
}

function button(className, text, work) {
  const element = make('button', className, text);
  element.type = 'button';
  element.onclick = work;
  return element;
}

function bar(shares) {
  const box = make('div', 'bar');
  ['block-1', 'rest'].forEach((colour, i) => {
    const part = make('i');
    part.style.width = shares[i] / 10 + '%';
    part.style.background = `var(--${colour})`; // changes with the colour scheme
    box.append(part);
  });
  return box;
}

function table(rows) {
  const body = make('table');
  for (const row of rows) body.append(make('tr', '', '', ...row.map((text) => make('td', '', text))));
  return body;
}

function show(answer) {
  now = answer;
  const { picture } = now;
  chosen = picture?.chosen ?? null;
  $('pool').replaceChildren(...now.pools.map((it) => new Option(it, it, false, it === now.pool)));
  $('families').replaceChildren(...(now.families.length < 2 ? [] : now.families.map(([family, view]) => {
    const it = button('', family, () => move({ view, at: null }));
    it.setAttribute('aria-pressed', family === picture?.family);
    return it;
  })));
  $('figures').replaceChildren(...now.figures.map(([name, value, bad]) => {
    const box = make('div', bad ? 'figure bad' : 'figure', '', make('b', '', value), make('span', '', name));
    if (value.endsWith('%')) box.append(bar([10 * parseInt(value, 10), 0]));
    return box;
  }), ...now.troubles.map((text) => make('p', 'complaint', text)));
  $('asof').textContent = 'as of ' + new Date(now.asOf).toLocaleTimeString();
  $('space').hidden = !picture;
  if (picture) {
    draw();
    path();
    legend();
    listing();
    save();
    document.documentElement.dataset.view = picture.view;
  }
  aside();
}

function path() {
  const { roots, path, view } = now.picture;
  const step = (cidr) => {
    const it = button('mono', cidr, () => move({ view: cidr, at: null }));
    if (cidr === view) it.setAttribute('aria-current', 'true');
    return it;
  };
  const others = roots.filter((it) => it !== path[0]).slice(0, 32);
  const steps = path.flatMap((cidr, i) => [...(i ? [make('span', 'sep', '›')] : []), step(cidr)]);
  if (others.length) steps.unshift(...others.map(step), make('span', 'sep', '│'));
  const less = button('', '−', farther), more = button('', '+', closer);
  less.title = 'Zoom out (Esc)';
  more.title = 'Zoom in (Enter)';
  $('path').replaceChildren(...steps, make('span', 'zoom', '', less, more));
}

function legend() {
  const c = colours(), { cells } = now.picture;
  const key = (words, number, { from = 'free', to = from, hatch: over, edge }) => {
    const canvas = make('canvas'), pen = surface(canvas, 34, 14);
    const slope = pen.createLinearGradient(0, 0, 34, 0);
    slope.addColorStop(0, c(from));
    slope.addColorStop(1, c(to));
    const layers = [[slope, 0], ...(over ? [[hatch(pen, c(over), over === 'clash'), 0]] : []), ...(edge ? [[c('leave'), 11]] : [])];
    for (const [style, top] of layers) { pen.fillStyle = style; pen.fillRect(0, top, 34, 14); }
    return make('li', '', '', canvas, make('span', '', words), make('b', '', number));
  };
  const all = now.picture.legend.map(([kind, number]) => key(KINDS[kind].words, number, KINDS[kind]));
  all.push(key('Free', '', {}));
  if (cells.some((it) => it.reserved)) all.push(key('Reserved', '', KINDS.reserved));
  if (cells.some((it) => it.overlaps)) all.push(key('Allocated to several nodes', '', { from: 'block-0', hatch: 'clash' }));
  $('legend').replaceChildren(...all);
}

function listing() {
  const { cells } = now.picture;
  const rows = cells.slice(0, LISTED).map((it) => [it.cidr, it.owners.join(', '), KINDS[it.kind].words.split(',')[0], it.fill / 10 + '%']);
  const head = make('tr', '', '', ...['Range', 'Node', 'State', 'In use'].map((text) => make('th', '', text)));
  const body = table($('list').open ? rows : []);
  body.prepend(head);
  const more = cells.length - LISTED;
  $('list').lastElementChild.replaceChildren(body, make('p', 'hint', more > 0 ? `and ${more} more: zoom in` : ''));
}

function aside() {
  $('say').textContent = chosen ? chosen.cidr + ' · ' + chosen.words : '';
  if (!chosen) return $('about').replaceChildren(make('p', 'hint', 'Choose a cell to see which node has it.'));
  const parts = [make('h2', 'mono', chosen.cidr), make('p', 'kind', chosen.words)];
  if (chosen.bar) parts.push(bar(chosen.bar));
  parts.push(make('dl', '', '', ...chosen.facts.flatMap(([name, value]) => [make('dt', '', name), make('dd', '', value)])));
  const others = chosen.ranges.filter((it) => it !== chosen.cidr);
  if (others.length) {
    const links = others.slice(0, 24).map((it) => button('mono', it, () => visit(it)));
    if (others.length > 24) links.push(make('span', 'hint', `and ${others.length - 24} more`));
    parts.push(make('h3', '', 'Other ranges of ' + chosen.node), make('div', 'links', '', ...links));
  }
  if (chosen.addresses.length) {
    parts.push(make('h3', '', `${chosen.addresses.length + chosen.more} addresses in use`), table(chosen.addresses));
    if (chosen.more) parts.push(make('p', 'hint', `and ${chosen.more} more`));
  }
  $('about').replaceChildren(...parts);
}

// ---- moving about --------------------------------------------------------------------------------

const closer = () => move({ closer: true });
const farther = () => look(() => here({ view: now.picture.path.at(-2) ?? now.picture.view }));

function step(by) {
  choose(() => {
    if (!chosen) return 0;
    const at = (by > 0 ? chosen.at + chosen.count - 1 : chosen.at) + by;
    return at >= 0 && at < grid.count ? at : chosen.at;
  });
}

function neighbour(by) {
  const all = chosen?.ranges ?? [];
  if (all.length) visit(all[(all.indexOf(chosen.cidr) + by + all.length) % all.length]);
}

function under(event) {
  const box = $('map').getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - GUTTER) / grid.w), line = Math.floor((event.clientY - box.top - TOP) / grid.h);
  const at = line * grid.columns + column;
  return column < 0 || column >= grid.columns || line < 0 || at >= grid.count ? null : at;
}

let pointed = null; // the cell under the pointer
async function tip(event) {
  const at = under(event), box = $('tip');
  const frame = $('frame').getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  const put = () => {
    box.style.left = Math.max(0, Math.min(x + 14, frame.width - box.offsetWidth)) + 'px';
    box.style.top = (y > frame.height - 60 ? y - 40 : y + 18) + 'px';
  };
  if (at === pointed) return put();
  pointed = at;
  box.hidden = true;
  await new Promise((done) => setTimeout(done, 40)); // no requests while the pointer passes
  if (at !== pointed) return;
  const about = at === null ? null : await ask('cell', spot(at)).catch(() => null);
  if (!about || at !== pointed) return;
  box.textContent = about.cidr + ' · ' + about.words;
  box.hidden = false;
  put();
}
const leave = () => { pointed = null; $('tip').hidden = true; };

const KEYS = {
  ArrowRight: () => step(1), ArrowLeft: () => step(-1),
  ArrowDown: () => step(grid.columns), ArrowUp: () => step(-grid.columns),
  Enter: closer, '+': closer, Escape: farther, Backspace: farther, '-': farther,
  ']': () => neighbour(1), '[': () => neighbour(-1),
};

// ---- search --------------------------------------------------------------------------------------

let hits = [], timer = 0;

async function search() {
  const text = $('find').value.trim();
  const found = text ? await ask('find', text) : [];
  if (text !== $('find').value.trim()) return;
  hits = found.map((hit) => ({ ...hit, text: hit.what === 'node' && hit.at ? `${hit.name} ${hit.at}` : hit.name }));
  $('hits').replaceChildren(...hits.map(({ text, what, at, pool }) => new Option([what, at, pool].filter((it) => it).join(' · '), text)));
}

function picked() {
  const text = $('find').value;
  return hits.find((hit) => hit.text === text);
}

function go(hit) {
  return turn(async () => {
    if (!hit) throw new Error('Nothing found with this name or address');
    const { name, pool, at } = hit;
    if (!pool) throw new Error(name + (at ? ' lies in no pool' : ' has no range'));
    show(await ask('view', pool === now.pool ? here({ at }) : { pool, at }));
    $('map').focus();
  });
}

// ---- state in the address bar, and events --------------------------------------------------------

const hash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const save = () => history.replaceState(null, '', '#' + new URLSearchParams(here()));

$('pool').onchange = () => look(() => ({ pool: $('pool').value }));
$('refresh').onclick = () => move({ fresh: true });
$('list').ontoggle = listing;
$('map').onclick = (event) => { const at = under(event); leave(); if (at !== null) choose(() => at); };
$('map').ondblclick = (event) => {
  const at = under(event), cell = now.picture.cells.find((it) => it.at <= at && at < it.at + it.count);
  if (cell && cell.kind !== 'address') move({ view: cell.cidr, at: null });
};
$('map').onmousemove = tip;
$('map').onmouseleave = leave;
$('map').onkeydown = (event) => {
  const work = KEYS[event.key];
  if (!work || !grid || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  work();
};
$('find').oninput = (event) => {
  clearTimeout(timer);
  // Picking an entry of the list also causes an input event.
  if (picked() && (!event.inputType || event.inputType === 'insertReplacementText')) go(picked());
  else timer = setTimeout(() => search().catch(trouble), 200);
};
$('find').onkeydown = (event) => { if (event.key === 'Escape') $('map').focus(); };
$('search').onsubmit = async (event) => {
  event.preventDefault();
  clearTimeout(timer);
  if (!picked()) await search().catch(trouble);
  go(picked() ?? hits[0]);
};
document.addEventListener('keydown', (event) => {
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === '/') { event.preventDefault(); $('find').focus(); $('find').select(); }
  if (event.key === 'r') move({ fresh: true });
});
let resized = 0;
const again = () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => { if (now?.picture) { draw(); legend(); } });
};
addEventListener('resize', again);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
addEventListener('hashchange', () => look(hash));
look(hash);
