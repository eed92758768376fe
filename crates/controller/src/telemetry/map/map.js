// The address space of a pool as a grid: addresses grow to the right and downwards. A view is a prefix,
// cut into cells of a longer prefix; a range that is larger than a cell covers several, smaller ones
// share one, which is then filled as far as it is held. Nothing is kept but the last answers.
'use strict';

const $ = (id) => document.getElementById(id);
const KINDS = {
  block: 'Block', unlisted: 'Block, not listed by its node yet', recall: 'Block, asked back if empty',
  drain: 'Block that drains', quarantine: 'Block at rest: its node is gone', podcidr: 'podCIDR',
  rest: 'podCIDR at rest: its node is gone',
};
const RESTING = new Set(['quarantine', 'rest']);
const LEAVING = new Set(['drain', 'recall', 'unlisted']);
const GUTTER = 112; // for the addresses of rows, as in map.css
const TOP = 6; // for the outline of the first row
const MOST_BITS = 15; // of cells in a view: 256 times 128
const STEP = 4; // bits that one zoom goes down
const LISTED = 200;

const now = { pools: [], sheet: null, family: 'IPv4', view: null, at: null, detail: null, grid: null };

// ---- addresses -----------------------------------------------------------------------------------

const bitsOf = (family) => (family === 'IPv4' ? 32 : 128);

function parseAddress(text) {
  if (!text.includes(':')) {
    return { family: 'IPv4', value: text.split('.').reduce((sum, part) => sum * 256n + BigInt(part), 0n) };
  }
  const [head, tail] = text.split('::').map((half) => (half ? half.split(':') : []));
  const rest = tail ?? [];
  const groups = [...head, ...Array(tail ? 8 - head.length - rest.length : 0).fill('0'), ...rest];
  return { family: 'IPv6', value: groups.reduce((sum, part) => sum * 65536n + BigInt('0x' + part), 0n) };
}

function addressText(family, value) {
  if (family === 'IPv4') return [24n, 16n, 8n, 0n].map((by) => (value >> by) & 255n).join('.');
  const groups = Array.from({ length: 8 }, (_, i) => ((value >> BigInt(112 - 16 * i)) & 65535n).toString(16));
  let best = { at: -1, length: 1 };
  for (let i = 0; i < 8; i++) {
    let length = 0;
    while (groups[i + length] === '0') length++;
    if (length > best.length) best = { at: i, length };
  }
  if (best.at < 0) return groups.join(':');
  return groups.slice(0, best.at).join(':') + '::' + groups.slice(best.at + best.length).join(':');
}

// A prefix: { family, first, len }
function parseCidr(text) {
  const [address, len] = text.split('/');
  const { family, value } = parseAddress(address);
  return cidrOf(family, value, Number(len ?? bitsOf(family)));
}
function cidrOf(family, value, len) {
  const order = BigInt(bitsOf(family) - len);
  return { family, first: (value >> order) << order, len };
}
const sizeOf = (cidr) => 1n << BigInt(bitsOf(cidr.family) - cidr.len);
const lastOf = (cidr) => cidr.first + sizeOf(cidr) - 1n;
const textOf = (cidr) => addressText(cidr.family, cidr.first) + '/' + cidr.len;
const covers = (outer, inner) => outer.len <= inner.len && inner.first >= outer.first && inner.first <= lastOf(outer);
const overlap = (a, b) => covers(a, b) || covers(b, a);
const same = (a, b) => a && b && a.first === b.first && a.len === b.len && a.family === b.family;

// ---- asking --------------------------------------------------------------------------------------

let asked = 0;
async function ask(query) {
  const turn = query.startsWith('find') ? 0 : ++asked;
  for (let tries = 0; ; tries++) {
    const answer = await fetch('/map.json' + (query ? '?' + query : ''));
    if (answer.status === 503 && tries < 5) {
      await new Promise((done) => setTimeout(done, 400 * (tries + 1)));
      continue;
    }
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error ?? answer.statusText);
    return turn && turn !== asked && query.startsWith('range') ? null : body;
  }
}

async function guarded(work) {
  document.documentElement.dataset.state = 'busy';
  try {
    await work();
    $('trouble').hidden = true;
  } catch (error) {
    $('trouble').textContent = error.message + '.';
    $('trouble').hidden = false;
  }
  document.documentElement.dataset.state = 'ready';
}

async function refresh() {
  const overview = await ask('');
  now.pools = overview.pools;
  if (!now.pools.length) {
    now.sheet = null;
    throw new Error('There is no pool yet: kubectl apply an IPPool, and refresh');
  }
  const wanted = now.sheet?.pool.name ?? hash().pool;
  const pool = now.pools.find((it) => it.name === wanted) ?? now.pools[0];
  $('pool').replaceChildren(...now.pools.map((it) => new Option(it.name, it.name, false, it.name === pool.name)));
  await load(pool.name);
}

async function load(name) {
  const body = await ask('pool=' + encodeURIComponent(name));
  const rows = body.rows.map(([text, owner, kind, used, cooling, free]) => ({
    text, ...parseCidr(text), node: body.owners[owner], kind, used, cooling, free,
  }));
  const reserved = body.reserved.map((text) => {
    if (text.includes('/')) return { text, ...parseCidr(text), last: lastOf(parseCidr(text)) };
    const [low, high] = text.split('-').map(parseAddress);
    return { text, family: low.family, first: low.value, last: (high ?? low).value };
  });
  const other = now.sheet?.pool.name !== name;
  now.sheet = { ...body, rows, reserved, clashes: clashes(rows) };
  const wanted = hash();
  const sides = now.sheet.pool.sides.map((it) => it.family);
  if (other || !sides.includes(now.family)) {
    const family = wanted.pool === name && sides.includes(wanted.family) ? wanted.family : sides[0];
    now.family = family ?? 'IPv4';
    now.view = wanted.pool === name && wanted.view ? parseCidr(wanted.view) : null;
    now.at = wanted.pool === name && wanted.at ? parseCidr(wanted.at) : null;
    if (now.at) now.family = now.at.family;
  }
  if (!now.view || now.view.family !== now.family) now.view = home();
  document.documentElement.dataset.rows = rows.length;
  $('asof').textContent = 'as of ' + new Date().toLocaleTimeString() + (body.cut ? ' · cut off' : '');
  await show();
}

// Ranges that share addresses with the one before them. Rows are sorted.
function clashes(rows) {
  const found = new Set();
  let before = null;
  for (const row of rows) {
    if (before && before.family === row.family && row.first <= lastOf(before) && !RESTING.has(row.kind) && !RESTING.has(before.kind)) {
      found.add(row.text + row.node).add(before.text + before.node);
    }
    if (!before || before.family !== row.family || lastOf(row) > lastOf(before)) before = row;
  }
  return found;
}

const side = () => now.sheet.pool.sides.find((it) => it.family === now.family);
const ofFamily = () => now.sheet.rows.filter((it) => it.family === now.family);

// The range that one sees first: a whole range of the pool, or where it is far larger than what is held,
// the part with all that is held.
function home() {
  const cidrs = (side()?.cidrs ?? []).map(parseCidr);
  if (!cidrs.length) return null;
  const rows = ofFamily();
  const full = cidrs.find((it) => rows.some((row) => overlap(it, row))) ?? cidrs[0];
  const inside = rows.filter((row) => covers(full, row));
  if (side().blockSize - full.len <= MOST_BITS || !inside.length) return full;
  let view = cidrOf(full.family, inside[0].first, Math.min(inside[0].len, side().blockSize));
  const last = inside.reduce((most, row) => (lastOf(row) > most ? lastOf(row) : most), 0n);
  while (view.len > full.len && (lastOf(view) < last || side().blockSize - view.len < 8)) {
    view = cidrOf(view.family, view.first, view.len - 1);
  }
  return view;
}

// ---- the picture ---------------------------------------------------------------------------------

function grid() {
  const { view } = now;
  const bits = bitsOf(view.family);
  const rows = ofFamily().filter((row) => overlap(view, row));
  const inner = rows.find((row) => covers(row, view) && bits - view.len <= 12);
  const leaf = rows.reduce((len, row) => Math.max(len, row.len), side()?.blockSize ?? view.len);
  let len = inner ? bits : Math.max(leaf, view.len);
  if (len === view.len) len = Math.min(bits, view.len + 6);
  len = Math.min(len, view.len + MOST_BITS);
  const n = len - view.len;
  const columns = 2 ** Math.ceil(n / 2), lines = 2 ** Math.floor(n / 2);
  const width = Math.max(200, $('frame').clientWidth - GUTTER);
  const tall = Math.max(300, Math.min(620, innerHeight - 330));
  const h = Math.max(3, Math.min(58, Math.floor(tall / lines)));
  const w = Math.min(width / columns, 320);
  const order = BigInt(bits - len);
  const indexOf = (value) => Number((value - view.first) >> order);
  const cell = (index) => cidrOf(view.family, view.first + (BigInt(index) << order), len);
  return { view, len, n, columns, lines, w, h, rows, inner, indexOf, cell, count: 2 ** n, gap: Math.min(w, h) >= 9 ? 1 : 0 };
}

const colours = () => {
  const style = getComputedStyle(document.documentElement), known = {};
  return (name) => (known[name] ??= style.getPropertyValue('--' + name).trim());
};
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mixed = (a, b, part) => {
  const [from, to] = [channels(a), channels(b)];
  return from.map((it, i) => Math.round(it + (to[i] - it) * part));
};
const isLight = ([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b > 140;

// How full a range is, 0 to 1.
function fill(row) {
  const total = row.free === null ? Number(sizeOf(row)) : row.used + row.cooling + row.free;
  return total > 0 ? Math.min(1, (row.used + row.cooling) / total) : 0;
}

function tone(row, c) {
  if (RESTING.has(row.kind)) return channels(c('rest'));
  const [a, b] = row.kind === 'podcidr' ? ['cidr-0', 'cidr-1'] : ['block-0', 'block-1'];
  return mixed(c(a), c(b), fill(row) ** 0.7);
}

const hatches = new Map();
function hatch(context, colour, dense) {
  const key = colour + dense + devicePixelRatio;
  if (!hatches.has(key)) {
    const tile = document.createElement('canvas');
    tile.width = tile.height = dense ? 4 : 7;
    const pen = tile.getContext('2d');
    pen.strokeStyle = colour;
    pen.lineWidth = dense ? 1 : 1.6;
    const s = tile.width;
    for (const d of [-s, 0, s]) { pen.moveTo(d - 1, s + 1); pen.lineTo(d + s + 1, -1); }
    pen.stroke();
    hatches.set(key, context.createPattern(tile, 'repeat'));
  }
  return hatches.get(key);
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

// The cells from one to another as one box a line.
function* boxes(g, from, to) {
  from = Math.max(0, from);
  to = Math.min(g.count - 1, to);
  while (from <= to) {
    const line = Math.floor(from / g.columns);
    const end = Math.min(to, (line + 1) * g.columns - 1);
    const column = from - line * g.columns;
    const x = GUTTER + Math.round(column * g.w), right = GUTTER + Math.round((end - line * g.columns + 1) * g.w);
    yield [x, TOP + line * g.h, Math.max(1, right - x - g.gap), Math.max(1, g.h - g.gap)];
    // Whole lines in between are one box.
    if (column === 0 && end - from + 1 === g.columns) {
      const whole = Math.floor((to - from + 1) / g.columns);
      if (whole > 1) {
        yield [x, TOP + line * g.h, right - x - g.gap, whole * g.h - g.gap];
        from += whole * g.columns;
        continue;
      }
    }
    from = end + 1;
  }
}

let base = null;
function draw() {
  const g = (now.grid = grid());
  const c = colours();
  const canvas = $('map');
  const pen = surface(canvas, $('frame').clientWidth, TOP + g.lines * g.h + 4);
  pen.font = '11px ui-monospace, "DejaVu Sans Mono", monospace';
  pen.textBaseline = 'middle';
  let drawn = 0;
  const paint = (from, to, colour) => {
    pen.fillStyle = colour;
    for (const box of boxes(g, from, to)) { pen.fillRect(...box); drawn++; }
  };
  const part = (range) => {
    const first = range.first > g.view.first ? range.first : g.view.first;
    const end = range.last ?? lastOf(range), most = lastOf(g.view);
    return [g.indexOf(first), g.indexOf(end < most ? end : most)];
  };
  // What may be given at all: cell by cell where there is a gap to be seen.
  for (const cidr of (side()?.cidrs ?? []).map(parseCidr).filter((it) => overlap(it, g.view))) {
    const [from, to] = part(cidr);
    if (!g.gap) paint(from, to, c('free'));
    else for (let i = from; i <= to; i++) paint(i, i, c('free'));
  }
  const shared = new Map();
  for (const row of g.rows) {
    if (row === g.inner) continue;
    const [from, to] = part(row);
    if (row.len > g.len) {
      const sum = shared.get(from) ?? { held: 0, rows: [] };
      sum.held += Number(sizeOf(row)) / Number(sizeOf(g.cell(from)));
      sum.rows.push(row);
      shared.set(from, sum);
      continue;
    }
    const colour = tone(row, c);
    paint(from, to, `rgb(${colour})`);
    if (RESTING.has(row.kind)) paint(from, to, hatch(pen, c('paper'), g.h < 9));
    if (LEAVING.has(row.kind)) edge(pen, boxes(g, from, to), c('leave'), g);
    if (now.sheet.clashes.has(row.text + row.node)) paint(from, to, hatch(pen, c('clash'), true));
    label(pen, g, from, to, row, colour, c);
  }
  for (const [index, { held, rows }] of shared) {
    const [[x, y, w, h]] = boxes(g, index, index);
    const part = Math.min(1, held);
    const colour = mixed(c('block-0'), c('block-1'), rows.reduce((sum, row) => sum + fill(row), 0) / rows.length);
    pen.fillStyle = rows.every((row) => RESTING.has(row.kind)) ? c('rest') : `rgb(${colour})`;
    const tall = h < 8 ? h : Math.max(2, h * part);
    pen.fillRect(x, y + h - tall, w, tall);
    drawn++;
  }
  if (g.inner) drawn += drawAddresses(pen, g, c);
  for (const span of now.sheet.reserved.filter((it) => it.family === g.view.family && it.first <= lastOf(g.view) && it.last >= g.view.first)) {
    const [from, to] = part(span);
    const whole = span.last - span.first + 1n >= sizeOf(g.cell(0));
    if (whole || g.len === bitsOf(g.view.family)) paint(from, to, hatch(pen, c('reserved'), g.h < 9));
    else for (const [x, y] of boxes(g, from, to)) { pen.fillStyle = c('reserved'); pen.fillRect(x, y, Math.min(3, g.w), Math.min(3, g.h)); }
  }
  // The addresses of lines, as many as there is room for.
  pen.fillStyle = c('soft');
  pen.textAlign = 'right';
  const every = Math.max(1, 2 ** Math.ceil(Math.log2(16 / g.h)));
  for (let line = 0; line < g.lines; line += every) {
    const text = addressText(g.view.family, g.cell(line * g.columns).first);
    pen.fillText(text.length > 15 ? '…' + text.slice(-14) : text, GUTTER - 10, TOP + line * g.h + Math.min(g.h, 16) / 2, GUTTER - 12);
  }
  base = document.createElement('canvas');
  base.width = canvas.width;
  base.height = canvas.height;
  base.getContext('2d').drawImage(canvas, 0, 0);
  document.documentElement.dataset.drawn = drawn;
  document.documentElement.dataset.view = textOf(g.view);
  overlay();
}

function label(pen, g, from, to, row, colour, c) {
  const wide = Math.min(to - from + 1, g.columns) * g.w;
  if (g.h < 15 || wide < 32) return;
  const [[x, y, w, h]] = boxes(g, from, to);
  pen.fillStyle = isLight(colour) ? '#10151a' : '#ffffff';
  pen.textAlign = 'left';
  const room = Math.floor((w - 8) / 6.7);
  // The end of a name tells more than its beginning.
  const cut = (text) => (text.length > room ? '…' + text.slice(1 - room) : text);
  pen.fillText(cut(row.node), x + 5, y + (h >= 34 ? h / 2 - 8 : h / 2));
  const used = row.free === null ? row.used + ' used' : `${row.used}/${row.used + row.cooling + row.free}`;
  if (h >= 34) pen.fillText(used.length > room ? row.used : used, x + 5, y + h / 2 + 8);
}

function edge(pen, list, colour, g) {
  pen.fillStyle = colour;
  const thick = g.h >= 9 ? 3 : 1;
  for (const [x, y, w, h] of list) pen.fillRect(x, y + h - thick, w, thick);
}

function drawAddresses(pen, g, c) {
  const used = new Map();
  for (const it of now.detail?.addresses ?? []) used.set(g.indexOf(parseAddress(it.address).value), it);
  for (let i = 0; i < g.count; i++) {
    const it = used.get(i);
    const [[x, y, w, h]] = boxes(g, i, i);
    pen.fillStyle = it ? c(g.inner.kind === 'podcidr' ? 'cidr-1' : RESTING.has(g.inner.kind) ? 'rest' : 'block-1') : c('free');
    pen.fillRect(x, y, w, h);
    if (h < 15 || w < 44) continue;
    pen.textAlign = 'left';
    pen.fillStyle = it ? c('paper') : c('soft');
    const address = addressText(g.view.family, g.cell(i).first);
    const short = address.slice(Math.max(address.lastIndexOf('.'), address.lastIndexOf(':')));
    const text = it ? short + ' ' + (it.pod ? it.pod.split('/').pop() : '') : short;
    const room = Math.floor((w - 8) / 6.7);
    pen.fillText(text.length > room ? text.slice(0, room - 1) + '…' : text, x + 5, y + h / 2);
  }
  return g.count;
}

// What is chosen, and the other ranges of its node.
function overlay() {
  const g = now.grid, c = colours();
  const pen = $('map').getContext('2d');
  pen.save();
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, base.width, base.height);
  pen.drawImage(base, 0, 0);
  pen.restore();
  const outline = (range, width, colour) => {
    if (!overlap(range, g.view)) return;
    const first = range.first > g.view.first ? range.first : g.view.first;
    const last = lastOf(range) < lastOf(g.view) ? lastOf(range) : lastOf(g.view);
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    for (const [x, y, w, h] of boxes(g, g.indexOf(first), g.indexOf(last))) {
      const out = width / 2;
      pen.strokeRect(x - out + 0.5, y - out + 0.5, Math.max(w, 3) + width - 1, Math.max(h, 3) + width - 1);
    }
  };
  const chosen = rowAt(now.at);
  if (chosen && chosen !== g.inner) {
    for (const row of g.rows) if (row.node === chosen.node && row !== chosen) outline(row, 1.5, c('ink'));
  }
  if (now.at && !covers(now.at, g.view)) {
    outline(now.at, 4, c('paper'));
    outline(now.at, 2, c('ink'));
  }
}

// ---- what is chosen ------------------------------------------------------------------------------

// The narrowest range that somebody holds round that one.
function rowAt(cidr) {
  if (!cidr || !now.sheet) return null;
  let best = null;
  for (const row of now.sheet.rows) {
    if (row.family === cidr.family && overlap(row, cidr) && (!best || row.len > best.len)) best = row;
  }
  return best;
}

const reservedAt = (cidr) => now.sheet.reserved.filter((it) => it.family === cidr.family && it.first <= lastOf(cidr) && it.last >= cidr.first);
const inPool = (cidr) => (side()?.cidrs ?? []).some((text) => overlap(parseCidr(text), cidr));

function inWords(cidr) {
  const row = rowAt(cidr);
  const address = now.detail?.addresses.find((it) => cidr.len === bitsOf(cidr.family) && parseAddress(it.address).value === cidr.first);
  if (address) return `${address.address} · ${address.pod ?? address.uid ?? 'in use, pod unknown'}`;
  if (row && covers(row, cidr)) return `${row.text} · ${row.node || 'nobody'} · ${counts(row)}${row.kind === 'block' || row.kind === 'podcidr' ? '' : ' · ' + KINDS[row.kind]}`;
  if (row) {
    const inside = now.sheet.rows.filter((it) => covers(cidr, it));
    return `${textOf(cidr)} · ${inside.length} ranges of ${new Set(inside.map((it) => it.node)).size} nodes`;
  }
  const reserved = reservedAt(cidr);
  if (reserved.length) return `${textOf(cidr)} · reserved: ${reserved.slice(0, 3).map((it) => it.text).join(', ')}`;
  return `${textOf(cidr)} · ${inPool(cidr) ? 'free' : 'not in the pool'}`;
}

const counts = (row) => (row.free === null ? `${row.used} used` : `${row.used} used, ${row.cooling} cooling, ${row.free} free`);

function choose(cidr, speak = true) {
  const row = rowAt(cidr);
  now.at = row && covers(row, cidr) && now.grid && row !== now.grid.inner ? cidrOf(row.family, row.first, row.len) : cidr;
  if (speak) $('say').textContent = inWords(now.at);
  save();
  overlay();
  about();
}

let fetched = null;
async function about() {
  const row = now.at && rowAt(now.at);
  const exact = row && covers(row, now.at) ? row : null;
  const wanted = exact?.text ?? null;
  if (wanted !== fetched) {
    fetched = wanted;
    if (now.detail?.cidr !== wanted && !(now.grid?.inner && now.detail?.cidr === now.grid.inner.text)) now.detail = null;
    if (wanted) {
      const detail = await ask('range=' + encodeURIComponent(wanted)).catch(() => null);
      if (fetched !== wanted) return;
      now.detail = detail;
      if (now.grid?.inner && detail) draw();
    }
  }
  const box = $('about');
  if (!now.at) return box.replaceChildren(make('p', 'hint', 'Choose a cell to see who holds it.'));
  if (!exact) {
    const [head, ...rest] = inWords(now.at).split(' · ');
    return box.replaceChildren(make('h2', 'mono', head), make('p', 'kind', rest.join(' · ')));
  }
  const detail = now.detail?.cidr === exact.text ? now.detail : null;
  const title = make('h2', 'mono', exact.text);
  const parts = [title, make('p', 'kind', KINDS[exact.kind])];
  if (now.sheet.clashes.has(exact.text + exact.node)) parts.push(make('p', 'complaint', 'Shares addresses with another range.'));
  parts.push(bar(exact), make('p', 'kind', counts(exact)));
  const facts = [['Node', exact.node || 'nobody']];
  if (detail?.since) facts.push(['Since', when(detail.since)]);
  if (detail?.until) facts.push(['At rest until', when(detail.until) + ' at the earliest']);
  if (detail?.reserved.length) facts.push(['Reserved', detail.reserved.join(', ')]);
  if (detail?.pool && detail.pool !== now.sheet.pool.name) facts.push(['Pool', detail.pool]);
  const list = make('dl');
  for (const [key, value] of facts) list.append(make('dt', '', key), make('dd', '', value));
  parts.push(list);
  const others = now.sheet.rows.filter((it) => it.node === exact.node && it !== exact);
  if (others.length && exact.node) {
    const links = make('div', 'links');
    for (const it of others.slice(0, 24)) {
      const link = make('button', 'mono', it.text);
      link.type = 'button';
      link.onclick = () => visit(it);
      links.append(link);
    }
    if (others.length > 24) links.append(make('span', 'hint', `and ${others.length - 24} more`));
    parts.push(make('h3', '', `Other ranges of ${exact.node}`), links);
  }
  if (detail?.addresses.length) {
    const table = make('table');
    for (const it of detail.addresses.slice(0, LISTED)) {
      const line = make('tr');
      const who = it.pod ?? it.uid ?? 'pod unknown';
      const whose = make('td', '', who);
      if (it.told === 'agent') whose.append(make('small', '', ' · agent only'));
      line.append(make('td', '', it.address), whose);
      table.append(line);
    }
    const more = detail.addresses.length - LISTED;
    parts.push(make('h3', '', `${detail.addresses.length} addresses in use`), table);
    if (more > 0 || detail.cut) parts.push(make('p', 'hint', `and ${more > 0 ? more : ''} more`));
  }
  box.replaceChildren(...parts);
}

function make(tag, className = '', text = '') {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function bar(row) {
  const total = row.free === null ? Number(sizeOf(row)) : row.used + row.cooling + row.free;
  const box = make('div', 'bar');
  for (const [count, colour] of [[row.used, row.kind === 'podcidr' ? 'cidr-1' : 'block-1'], [row.cooling, 'rest']]) {
    const part = make('i');
    part.style.width = total ? (100 * count) / total + '%' : '0';
    part.style.background = `var(--${colour})`; // changes with the scheme
    box.append(part);
  }
  return box;
}

const when = (text) => new Date(text).toLocaleString();

// ---- round the picture ---------------------------------------------------------------------------

async function show() {
  $('families').replaceChildren(...(now.sheet.pool.sides.length < 2 ? [] : now.sheet.pool.sides.map((it) => {
    const button = make('button', '', it.family);
    button.type = 'button';
    button.setAttribute('aria-pressed', it.family === now.family);
    button.onclick = () => { now.family = it.family; now.view = home(); now.at = null; show(); };
    return button;
  })));
  figures();
  if (!now.view) {
    $('path').replaceChildren(make('span', 'hint', 'This pool has no ranges that can be read.'));
    return;
  }
  path();
  fetched = null;
  draw();
  const { inner } = now.grid;
  if (inner && !(now.at && covers(inner, now.at))) now.at = cidrOf(inner.family, inner.first, inner.len);
  legend();
  listing();
  save();
  await about();
}

function figures() {
  const { pool } = now.sheet, status = side()?.status;
  const figure = (value, name, bad) => {
    const box = make('div', bad ? 'figure bad' : 'figure');
    box.append(make('b', '', String(value)), make('span', '', name));
    return box;
  };
  const unit = pool.allocate === 'Blocks' ? 'blocks' : 'podCIDRs';
  const list = [];
  if (status) {
    const used = figure(status.utilization, 'utilization', parseInt(status.utilization, 10) >= 90);
    const line = make('div', 'bar'), part = make('i');
    part.style.width = status.utilization;
    part.style.background = 'var(--block-1)';
    line.append(part);
    used.append(line);
    list.push(used, figure(short(status.held), unit + ' held'), figure(short(status.free), unit + ' free'));
    if (status.quarantined !== '0') list.push(figure(short(status.quarantined), 'at rest'));
    if (status.addresses) list.push(figure(short(status.addresses.used), 'addresses in use'), figure(short(status.addresses.cooling), 'cooling'));
    if (status.exhaustsAt) {
      const hours = Math.max(0, Math.round((new Date(status.exhaustsAt) - Date.now()) / 3600000));
      const end = figure(hours < 48 ? hours + ' h' : Math.round(hours / 24) + ' days', 'until full, as it grows', hours < 72);
      end.title = when(status.exhaustsAt);
      list.push(end);
    }
  }
  // Before a leader has counted, the rows tell who holds ranges; who waits, nobody.
  list.push(figure(pool.nodes ?? holders(), 'nodes'));
  if (pool.waiting !== null) list.push(figure(pool.waiting, 'nodes wait', pool.waiting > 0));
  for (const text of pool.complaints) list.push(make('p', 'complaint', text));
  $('figures').replaceChildren(...list);
}

const holders = () => new Set(now.sheet.rows.filter((it) => !RESTING.has(it.kind)).map((it) => it.node)).size;

// 18446744073709551616 is 2⁶⁴ to nobody's eye.
function short(text) {
  const value = BigInt(text);
  if (value < 1000000n) return value.toLocaleString('en').replaceAll(',', ' ');
  return '≈ ' + Number(value).toExponential(1).replace('e+', ' · 10^');
}

function path() {
  const steps = [];
  const roots = (side()?.cidrs ?? []).map(parseCidr);
  const root = roots.find((it) => covers(it, now.view)) ?? now.view;
  const nav = $('path');
  const button = (text, work, current) => {
    const it = make('button', 'mono', text);
    it.type = 'button';
    if (current) it.setAttribute('aria-current', 'true');
    it.onclick = work;
    return it;
  };
  for (const it of roots.filter((it) => !same(it, root))) steps.push(button(textOf(it), () => look(it)));
  if (steps.length) steps.push(make('span', 'sep', '│'));
  // Where there are many steps, the first one and the last ones.
  const from = Math.max(root.len, now.view.len - 3 * STEP);
  const lens = from > root.len ? [root.len] : [];
  for (let len = from; len < now.view.len; len += STEP) lens.push(len);
  for (const len of [...new Set([...lens, now.view.len])]) {
    const it = cidrOf(now.view.family, now.view.first, len);
    if (len > root.len) steps.push(make('span', 'sep', len === from && from > root.len + STEP ? '› … ›' : '›'));
    steps.push(button(textOf(it), () => look(it), len === now.view.len));
  }
  const zoom = make('span', 'zoom');
  const [less, more] = [button('−', out), button('+', () => into(now.at))];
  less.title = 'Zoom out (Esc)';
  more.title = 'Zoom in (Enter)';
  zoom.append(less, more);
  nav.replaceChildren(...steps.slice(-40), zoom);
}

function legend() {
  const c = colours();
  const count = (kinds) => ofFamily().filter((it) => kinds.includes(it.kind)).length;
  const entries = [
    ['block-0', 'block-1', ['block', 'unlisted', 'recall', 'drain'], 'blocks, empty to full'],
    ['cidr-0', 'cidr-1', ['podcidr'], 'podCIDRs, empty to full'],
    ['rest', 'rest', ['quarantine', 'rest'], 'at rest, the node is gone'],
    ['block-0', 'block-0', ['recall', 'drain', 'unlisted'], 'leaving, or not listed yet'],
  ];
  const list = [];
  for (const [from, to, kinds, text] of entries) {
    const many = count(kinds);
    if (!many) continue;
    const [item, pen] = key(text, many);
    const slope = pen.createLinearGradient(0, 0, 34, 0);
    slope.addColorStop(0, c(from));
    slope.addColorStop(1, c(to));
    pen.fillStyle = slope;
    pen.fillRect(0, 0, 34, 14);
    if (from === 'rest') { pen.fillStyle = hatch(pen, c('paper'), false); pen.fillRect(0, 0, 34, 14); }
    if (kinds[0] === 'recall') { pen.fillStyle = c('leave'); pen.fillRect(0, 11, 34, 3); }
    list.push(item);
  }
  const [free, pen] = key('free');
  pen.fillStyle = c('free');
  pen.fillRect(0, 0, 34, 14);
  list.push(free);
  if (now.sheet.reserved.some((it) => it.family === now.family)) {
    const [item, pen] = key('reserved');
    pen.fillStyle = c('free');
    pen.fillRect(0, 0, 34, 14);
    pen.fillStyle = hatch(pen, c('reserved'), false);
    pen.fillRect(0, 0, 34, 14);
    list.push(item);
  }
  if (now.sheet.clashes.size) {
    const [item, pen] = key('overlapping', now.sheet.clashes.size);
    pen.fillStyle = c('block-0');
    pen.fillRect(0, 0, 34, 14);
    pen.fillStyle = hatch(pen, c('clash'), true);
    pen.fillRect(0, 0, 34, 14);
    list.push(item);
  }
  $('legend').replaceChildren(...list);
}

function key(text, many) {
  const item = make('li'), canvas = document.createElement('canvas');
  const pen = surface(canvas, 34, 14);
  item.append(canvas, make('span', '', text));
  if (many) item.append(make('b', '', many.toLocaleString('en').replaceAll(',', ' ')));
  return [item, pen];
}

function listing() {
  const box = $('list').querySelector('div');
  if (!$('list').open) return box.replaceChildren();
  const table = make('table');
  const head = make('tr');
  for (const text of ['Range', 'Node', 'State', 'Addresses']) head.append(make('th', '', text));
  table.append(head);
  for (const row of now.grid.rows.slice(0, LISTED)) {
    const line = make('tr');
    for (const text of [row.text, row.node, KINDS[row.kind], counts(row)]) line.append(make('td', '', text));
    table.append(line);
  }
  const more = now.grid.rows.length - LISTED;
  box.replaceChildren(table, ...(more > 0 ? [make('p', 'hint', `and ${more} more: zoom in`)] : []));
}

// ---- moving about --------------------------------------------------------------------------------

function look(cidr) {
  now.view = cidrOf(cidr.family, cidr.first, cidr.len);
  if (now.at && !overlap(now.at, now.view)) now.at = null;
  return show();
}

function into(cidr) {
  const target = cidr && overlap(cidr, now.view) ? cidr : now.grid.cell(0);
  if (now.view.len >= target.len && !same(now.view, target)) return;
  const bits = bitsOf(now.view.family);
  const most = rowAt(target) ? rowAt(target).len : now.grid.len;
  if (now.view.len >= Math.min(most, bits - 2)) return;
  look(cidrOf(target.family, target.first, Math.min(now.view.len + STEP, most)));
}

function out() {
  const roots = (side()?.cidrs ?? []).map(parseCidr);
  const root = roots.find((it) => covers(it, now.view));
  if (!root || now.view.len <= root.len) return;
  look(cidrOf(now.view.family, now.view.first, Math.max(root.len, now.view.len - STEP)));
}

// Shows a range among its neighbours.
function visit(range, at = range) {
  now.family = range.family;
  const root = (side()?.cidrs ?? []).map(parseCidr).find((it) => covers(it, range));
  if (!covers(now.view, range) || now.view.family !== range.family || now.view.len >= range.len) {
    now.view = cidrOf(range.family, range.first, Math.max(root?.len ?? 0, range.len - 10));
  }
  now.at = cidrOf(at.family, at.first, at.len);
  $('say').textContent = inWords(now.at);
  return show();
}

function step(by) {
  const g = now.grid;
  const from = now.at && overlap(now.at, g.view) ? now.at : null;
  if (!from) return choose(g.cell(0));
  const first = g.indexOf(from.first > g.view.first ? from.first : g.view.first);
  const end = g.indexOf(lastOf(from) < lastOf(g.view) ? lastOf(from) : lastOf(g.view));
  const index = by > 0 ? end + by : first + by;
  if (index >= 0 && index < g.count) choose(g.cell(index));
}

function neighbour(by) {
  const row = rowAt(now.at);
  if (!row) return;
  const all = now.sheet.rows.filter((it) => it.node === row.node);
  visit(all[(all.indexOf(row) + by + all.length) % all.length]);
}

function under(event) {
  const g = now.grid, box = $('map').getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - GUTTER) / g.w), line = Math.floor((event.clientY - box.top - TOP) / g.h);
  if (column < 0 || column >= g.columns || line < 0 || line >= g.lines) return null;
  return g.cell(line * g.columns + column);
}

function tip(event) {
  const cidr = now.grid && under(event), box = $('tip');
  box.hidden = !cidr;
  if (!cidr) return;
  box.textContent = inWords(cidr);
  const frame = $('frame').getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  box.style.left = Math.max(0, Math.min(x + 14, frame.width - box.offsetWidth)) + 'px';
  box.style.top = (y > frame.height - 60 ? y - 40 : y + 18) + 'px';
}

const KEYS = {
  ArrowRight: () => step(1), ArrowLeft: () => step(-1),
  ArrowDown: () => step(now.grid.columns), ArrowUp: () => step(-now.grid.columns),
  Enter: () => into(now.at), '+': () => into(now.at), Escape: out, Backspace: out, '-': out,
  ']': () => neighbour(1), '[': () => neighbour(-1),
};

// ---- search --------------------------------------------------------------------------------------

let hits = [], marked = -1, timer = 0;

async function search() {
  const text = $('find').value.trim();
  if (!text) return close();
  const found = await ask('find=' + encodeURIComponent(text)).catch((error) => ({ hits: [], error }));
  if (text !== $('find').value.trim()) return;
  hits = found.hits;
  marked = hits.length ? 0 : -1;
  offer(found.error?.message ?? (found.cut ? 'more: type more of the name' : 'nothing of that name or address'));
}

function offer(otherwise) {
  const list = hits.map((hit, i) => {
    const item = make('li');
    item.id = 'hit-' + i;
    item.setAttribute('role', 'option');
    item.setAttribute('aria-selected', i === marked);
    item.append(make('span', '', hit.name), make('small', '', [hit.what, hit.address ?? hit.cidr, hit.pool].filter((it) => it && it !== hit.name).join(' · ')));
    item.onmousedown = (event) => { event.preventDefault(); go(hit); };
    return item;
  });
  if (!list.length) list.push(make('li', 'none', otherwise));
  $('hits').replaceChildren(...list);
  $('hits').hidden = false;
  $('find').setAttribute('aria-expanded', 'true');
  $('find').setAttribute('aria-activedescendant', marked < 0 ? '' : 'hit-' + marked);
}

function close() {
  $('hits').hidden = true;
  $('find').setAttribute('aria-expanded', 'false');
}

function go(hit) {
  close();
  return guarded(async () => {
    if (hit.pool && hit.pool !== now.sheet?.pool.name) {
      history.replaceState(null, '', '#pool=' + encodeURIComponent(hit.pool));
      $('pool').value = hit.pool;
      await load(hit.pool);
    }
    const address = hit.address && cidrOf(parseAddress(hit.address).family, parseAddress(hit.address).value, bitsOf(parseAddress(hit.address).family));
    const range = hit.cidr ? parseCidr(hit.cidr) : address;
    if (range && hit.pool) await visit(range);
    else if (range) throw new Error(`${hit.name} lies in no pool`);
    else if (hit.what === 'node') throw new Error(`Node ${hit.name} holds nothing`);
    $('map').focus();
  });
}

// ---- state in the address bar, and events --------------------------------------------------------

const hash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
function save() {
  const parts = new URLSearchParams({ pool: now.sheet.pool.name, family: now.family, view: textOf(now.view) });
  if (now.at) parts.set('at', textOf(now.at));
  history.replaceState(null, '', '#' + parts);
}

$('pool').onchange = () => guarded(() => load($('pool').value));
$('refresh').onclick = () => guarded(refresh);
$('list').ontoggle = listing;
$('map').onclick = (event) => { const cidr = under(event); $('tip').hidden = true; if (cidr) choose(cidr); };
$('map').ondblclick = (event) => { const cidr = under(event); if (cidr) into(rowAt(cidr) ?? cidr); };
$('map').onmousemove = tip;
$('map').onmouseleave = () => ($('tip').hidden = true);
$('map').onkeydown = (event) => {
  const work = KEYS[event.key];
  if (!work || !now.grid || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  work();
};
$('find').oninput = () => { clearTimeout(timer); timer = setTimeout(search, 200); };
$('find').onblur = close;
$('find').onkeydown = (event) => {
  if (event.key === 'Escape') { close(); $('map').focus(); }
  if (!hits.length || $('hits').hidden || !['ArrowDown', 'ArrowUp'].includes(event.key)) return;
  event.preventDefault();
  marked = (marked + (event.key === 'ArrowDown' ? 1 : -1) + hits.length) % hits.length;
  offer('');
};
$('search').onsubmit = async (event) => {
  event.preventDefault();
  clearTimeout(timer);
  const at = marked;
  if ($('hits').hidden || at < 0) await search();
  if (hits.length) await go(hits[Math.max(0, at)]);
};
document.addEventListener('keydown', (event) => {
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === '/') { event.preventDefault(); $('find').focus(); $('find').select(); }
  if (event.key === 'r') guarded(refresh);
});
let resized = 0;
const again = () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(() => now.sheet && now.view && (draw(), legend())); };
addEventListener('resize', again);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
addEventListener('hashchange', () => {
  const wanted = hash();
  if (!wanted.view || !now.sheet || wanted.view === textOf(now.view)) return;
  now.sheet = wanted.pool === now.sheet.pool.name ? now.sheet : null;
  now.view = parseCidr(wanted.view);
  now.at = wanted.at ? parseCidr(wanted.at) : null;
  now.family = now.view.family;
  guarded(now.sheet ? show : refresh);
});
guarded(refresh);
