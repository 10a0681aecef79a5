// The step in time, on a canvas: a row for each class of devices of each stage, a lane for each stream.
const T = DATA.timeline;
const PICO = 1e12;
const WAYS = ['forward', 'backward', 'backward, values', 'backward, weights'];
const WAY_COLOURS = ['--forward', '--backward', '--halves', '--weights'];
const view = { from: 0, to: T.end };
const STRIDE = 5;  // numbers of a task in a pattern: kind, class, lane, start, duration
const byStage = new Map();
let canvas, details, layout, painting = false, picked = null;

for (const row of T.rows) if (!byStage.has(row.stage)) byStage.set(row.stage, { strips: [], latest: [], sends: [] });
for (const strip of T.strips) byStage.get(strip[0]).strips.push(strip);
for (const send of T.sends) byStage.get(send[0]).sends.push(send);
for (const stage of byStage.values()) {
  stage.strips.sort((a, b) => a[1] - b[1]);
  stage.sends.sort((a, b) => a[2] - b[2]);
  let latest = 0;
  stage.latest = stage.strips.map((strip) => (latest = Math.max(latest, strip[3])));
}
// Of each pattern, how busy each class's lane is: what is drawn where tasks are narrower than a pixel.
const shares = T.patterns.map((pattern) => {
  const found = {};
  for (let i = 0; i < pattern.length; i += STRIDE) {
    const key = pattern[i + 1] + '/' + pattern[i + 2];
    const lane = (found[key] = found[key] || { total: 0, parts: {} });
    const part = T.kinds[pattern[i]].part;
    lane.total += pattern[i + 4];
    lane.parts[part] = (lane.parts[part] || 0) + pattern[i + 4];
  }
  return found;
});

function measure() {
  const width = canvas.clientWidth;
  const narrow = width < 640, many = T.rows.length > 6;
  const gutter = narrow ? 74 : 168;
  let top = 26;
  const rows = T.rows.map((row) => {
    const lanes = row.lanes.map((lane) => ({ ...lane, height: lane.lane === 0 ? (many ? 16 : 30) : many ? 6 : 14 }));
    if (byStage.get(row.stage).sends.length && row.class === 0) lanes.push({ lane: -1, name: 'sends', height: 5 });
    let at = top;
    for (const lane of lanes) { lane.top = at; at += lane.height + 1; }
    const height = Math.max(at - top, many ? 18 : 32);
    const placed = { ...row, lanes, top, height };
    top += height + (many ? 5 : 12);
    return placed;
  });
  layout = { width, gutter, narrow, many, rows, height: top };
  canvas.style.height = top + 'px';
  const scale = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(top * scale);
  canvas.getContext('2d').setTransform(scale, 0, 0, scale, 0, 0);
}
const toX = (time) => layout.gutter + (time - view.from) / (view.to - view.from) * (layout.width - layout.gutter);
const toTime = (x) => view.from + (x - layout.gutter) / (layout.width - layout.gutter) * (view.to - view.from);

function paint() {
  painting = false;
  if (!canvas.clientWidth) return;
  measure();
  const context = canvas.getContext('2d');
  const colours = new Map();
  const colour = (name) => colours.get(name) || (colours.set(name, pigment(name)), colours.get(name));
  context.clearRect(0, 0, layout.width, layout.height);
  context.font = '12px system-ui, sans-serif';
  context.textBaseline = 'middle';
  paintAxis(context, colour);
  for (const row of layout.rows) {
    context.save();
    context.beginPath();
    context.rect(layout.gutter, row.top - 1, layout.width - layout.gutter, row.height + 2);
    context.clip();
    for (const lane of row.lanes) { context.fillStyle = colour('--well'); context.fillRect(layout.gutter, lane.top, layout.width, lane.height); }
    const stage = byStage.get(row.stage);
    const first = firstFrom(stage.latest, view.from);
    let last = first;
    while (last < stage.strips.length && stage.strips[last][1] <= view.to) last += 1;
    const crowded = T.pipelined && last - first > (layout.width - layout.gutter) / 4;
    if (crowded) paintCrowd(context, colour, row, stage.strips, first, last);
    else for (let i = first; i < last; i += 1) paintStrip(context, colour, row, stage.strips[i]);
    paintSends(context, colour, row, stage.sends);
    context.restore();
    paintLabel(context, colour, row);
  }
  canvas.dataset.from = view.from;
  canvas.dataset.to = view.to;
}
function firstFrom(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
  return low;
}
function paintStrip(context, colour, row, strip) {
  const [, start, number, end, microBatch, way] = strip;
  const x = toX(start), width = toX(end) - x;
  const inTurn = T.pipelined && microBatch >= 0;
  if (inTurn) {
    const lane = row.lanes[0];
    context.fillStyle = colour(WAY_COLOURS[way]);
    context.fillRect(x, lane.top, Math.max(width - (width > 3 ? 1 : 0), 0.6), lane.height);
  }
  if (width >= (inTurn ? 60 : 6)) paintTasks(context, colour, row, strip);
  else paintShares(context, colour, row, strip, x, Math.max(width, 0.6), inTurn);
  if (inTurn && width >= 26) {
    context.fillStyle = colour('--card');
    context.fillRect(x + 2, row.lanes[0].top + 2, context.measureText(microBatch).width + 6, 12);
    context.fillStyle = colour('--ink');
    context.fillText(microBatch, x + 5, row.lanes[0].top + 8.5);
  }
}
// Passes narrower than a few pixels: of each column of pixels, how much of its time is of which way.
function paintCrowd(context, colour, row, strips, first, last) {
  const columns = Math.ceil(layout.width - layout.gutter), step = 2, bins = WAYS.map(() => new Float64Array(Math.ceil(columns / step) + 1));
  for (let i = first; i < last; i += 1) {
    const [, start, , end, microBatch, way] = strips[i];
    if (microBatch < 0) { paintStrip(context, colour, row, strips[i]); continue; }
    paintShares(context, colour, row, strips[i], toX(start), Math.max(toX(end) - toX(start), 0.6), true);
    const from = Math.max(0, (toX(start) - layout.gutter) / step), to = Math.min(bins[0].length - 1, (toX(end) - layout.gutter) / step);
    for (let bin = Math.floor(from); bin < to; bin += 1) bins[way][bin] += Math.min(to, bin + 1) - Math.max(from, bin);
  }
  const lane = row.lanes[0];
  for (let bin = 0; bin < bins[0].length; bin += 1) {
    let top = lane.top;
    WAYS.forEach((_, way) => {
      const height = Math.min(bins[way][bin], 1) * lane.height;
      if (height <= 0) return;
      context.fillStyle = colour(WAY_COLOURS[way]);
      context.fillRect(layout.gutter + bin * step, top, step, height);
      top += height;
    });
  }
}
function paintTasks(context, colour, row, strip) {
  const pattern = T.patterns[strip[2]];
  for (let i = 0; i < pattern.length; i += STRIDE) {
    if (pattern[i + 1] !== row.class) continue;
    const x = toX(strip[1] + pattern[i + 3]), width = toX(strip[1] + pattern[i + 3] + pattern[i + 4]) - x;
    if (x > layout.width || x + width < layout.gutter) continue;
    const lane = row.lanes.find((one) => one.lane === pattern[i + 2]);
    const kind = T.kinds[pattern[i]], tint = colour(taskColour(kind.part, strip));
    context.fillStyle = tint;
    context.fillRect(x, lane.top, Math.max(width - (width > 4 ? 1 : 0), 0.5), lane.height);
    const left = Math.max(x, layout.gutter), room = Math.min(x + width, layout.width) - left;
    if (room > 30 && lane.height > 12 && context.measureText(kind.name).width + 8 < room) {
      context.fillStyle = onColour(tint);
      context.fillText(kind.name, left + 4, lane.top + lane.height / 2 + 0.5);
    }
  }
}
// Compute has the colour of its way; all else that of what it is.
const taskColour = (part, strip) => (part === 'compute' && strip[4] >= 0 ? WAY_COLOURS[strip[5]] : partColour(part));
// Black or white, whichever can be read on a colour.
function onColour(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.25 ? '#10131a' : '#ffffff';
}
function paintShares(context, colour, row, strip, x, width, inTurn) {
  for (const [key, lane] of Object.entries(shares[strip[2]])) {
    const [kind, number] = key.split('/').map(Number);
    if (kind !== row.class || (inTurn && number === 0)) continue;
    const place = row.lanes.find((one) => one.lane === number);
    const largest = Object.entries(lane.parts).reduce((a, b) => (b[1] > a[1] ? b : a))[0];
    context.globalAlpha = number === 0 ? 1 : Math.max(0.15, Math.min(1, lane.total / (strip[3] - strip[1])));
    context.fillStyle = colour(taskColour(largest, strip));
    context.fillRect(x, place.top, width, place.height);
    context.globalAlpha = 1;
  }
}
function paintSends(context, colour, row, sends) {
  const lane = row.lanes.find((one) => one.lane === -1);
  if (!lane) return;
  context.fillStyle = colour('--sends');
  for (const [, , start, end] of sends) {
    if (end < view.from || start > view.to) continue;
    const x = toX(start);
    context.fillRect(x, lane.top, Math.max(toX(end) - x, 0.6), lane.height);
  }
}
function paintAxis(context, colour) {
  const span = view.to - view.from, fits = Math.max(2, Math.floor((layout.width - layout.gutter) / 110));
  const raw = span / fits, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= raw);
  context.fillStyle = colour('--soft');
  context.strokeStyle = colour('--line');
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    const x = Math.round(toX(at)) + 0.5;
    context.beginPath(); context.moveTo(x, 18); context.lineTo(x, layout.height); context.stroke();
    const text = tickText(at, step), width = context.measureText(text).width;
    if (x + 3 + width < layout.width) context.fillText(text, x + 3, 9);
  }
}
function tickText(at, step) {
  const [unit, size] = [['s', 1e12], ['ms', 1e9], ['µs', 1e6], ['ns', 1e3]].find(([, one]) => view.to >= one) || ['ps', 1];
  return (at / size).toFixed(Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9))) + ' ' + unit;
}
function paintLabel(context, colour, row) {
  context.fillStyle = colour('--ink');
  const stages = byStage.size > 1;
  const name = stages ? (layout.narrow ? 'S' + row.stage : 'stage ' + row.stage) : layout.narrow ? 'devices' : `${row.count} × ${row.device}`;
  const mixed = T.rows.length > byStage.size;
  const text = stages && mixed && !layout.narrow ? `${name}, ${row.device}` : name;
  const lane = row.lanes[0];
  context.save();
  context.beginPath(); context.rect(0, row.top, layout.gutter - 6, row.height); context.clip();
  context.fillText(text, 0, row.top + (lane ? lane.height : row.height) / 2);
  context.fillStyle = colour('--soft');
  if (!layout.many) for (const other of row.lanes.slice(1)) if (other.height > 11) context.fillText(layout.narrow ? other.name : 'along ' + other.name, 0, other.top + other.height / 2 + 0.5);
  context.restore();
}
const repaint = () => { if (!painting) { painting = true; requestAnimationFrame(paint); } };

function setView(from, to) {
  const span = Math.min(T.end, Math.max(to - from, T.end * 1e-8, 1000));
  view.from = Math.max(0, Math.min(from, T.end - span));
  view.to = view.from + span;
  repaint();
}
function zoom(factor, x) {
  const at = x === undefined ? (view.from + view.to) / 2 : toTime(x);
  setView(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
const move = (share) => setView(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

function findAt(x, y) {
  const row = layout.rows.find((one) => y >= one.top && y <= one.top + one.height);
  if (!row || x < layout.gutter) return null;
  const lane = row.lanes.find((one) => y >= one.top - 1 && y <= one.top + one.height), time = toTime(x), stage = byStage.get(row.stage);
  if (lane && lane.lane === -1) {
    const send = stage.sends.find((one) => one[2] <= time && time <= one[3]);
    return send ? `Send to stage ${send[1]}, micro-batch ${send[4]}\n${seconds((send[3] - send[2]) / PICO)}` : null;
  }
  const slack = (view.to - view.from) / layout.width;
  let strip = null, task = null;
  for (let i = firstFrom(stage.latest, time - slack); i < stage.strips.length && stage.strips[i][1] <= time + slack; i += 1) {
    if (stage.strips[i][3] < time - slack) continue;
    strip = strip || stage.strips[i];
    const pattern = T.patterns[stage.strips[i][2]];
    for (let j = 0; lane && j < pattern.length; j += STRIDE) {
      const start = stage.strips[i][1] + pattern[j + 3];
      if (pattern[j + 1] === row.class && pattern[j + 2] === lane.lane && start <= time + slack && time - slack <= start + pattern[j + 4] && (!task || pattern[j + 4] > task[1])) task = [T.kinds[pattern[j]], pattern[j + 4], start, stage.strips[i]];
    }
  }
  return describe(row, task ? task[3] : strip, task);
}
function describe(row, strip, task) {
  if (!strip) return null;
  const lines = [];
  if (task) {
    lines.push(`${task[0].name}: ${seconds(task[1] / PICO)}`, `${partText(task[0].part)}, from ${seconds(task[2] / PICO)}`);
    if (task[0].bytes) lines.push(`${bytes(task[0].bytes)}${task[0].algorithm ? ', ' + task[0].algorithm : ''}`);
    if (task[0].source) lines.push('priced by: ' + task[0].source);
  }
  const stage = byStage.size > 1 ? `, stage ${row.stage}` : '';
  if (strip[4] < 0) lines.push('once a step' + stage);
  else if (T.pipelined || RUNNING.micro_batches > 1) lines.push(`${WAYS[strip[5]]}, micro-batch ${strip[4]}${strip[6] > 0 ? ', chunk ' + strip[6] : ''}${stage}`);
  else lines.push(WAYS[strip[5]]);
  if (T.pipelined && strip[4] >= 0 && !task) lines.push(seconds((strip[3] - strip[1]) / PICO));
  return lines.join('\n');
}
function listen() {
  let held = null;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener('wheel', (event) => {
    if (!(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.004))), at(event)[0]);
  }, { passive: false });
  canvas.addEventListener('pointerdown', (event) => { held = { x: event.clientX, from: view.from, to: view.to, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener('pointermove', (event) => {
    if (held) {
      const by = (held.x - event.clientX) / (layout.width - layout.gutter) * (held.to - held.from);
      held.moved = held.moved || Math.abs(held.x - event.clientX) > 3;
      setView(held.from + by, held.to + by);
    } else showTip(findAt(...at(event)), event);
  });
  canvas.addEventListener('pointerup', (event) => { if (held && !held.moved) { picked = findAt(...at(event)); details.textContent = picked ? picked.replaceAll('\n', ' · ') : ''; } held = null; });
  canvas.addEventListener('pointercancel', () => { held = null; });
  canvas.addEventListener('pointerleave', () => showTip('', null));
  canvas.addEventListener('dblclick', (event) => zoom(0.4, at(event)[0]));
  canvas.addEventListener('keydown', (event) => {
    const act = { '+': () => zoom(0.6), '=': () => zoom(0.6), '-': () => zoom(1 / 0.6), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => setView(0, T.end) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  addEventListener('resize', repaint);
  addEventListener('repaint', repaint);
}
function timelineSection() {
  const lateSeconds = SIMULATED.step_s - T.end / PICO;
  const goesOn = lateSeconds < -0.001 * SIMULATED.step_s; // longer than a step takes
  const label = `Timeline of one step, ${seconds(goesOn ? SIMULATED.step_s : T.end / PICO)}, of ${plural(T.rows.length, 'class of devices', 'classes of devices')}. Plus and minus zoom, arrows move, 0 shows the whole step.`;
  canvas = el('canvas', { id: 'gantt', tabindex: '0', role: 'img', 'aria-label': label });
  details = el('p', { id: 'picked', class: 'small', 'aria-live': 'polite' }, 'Click a task to keep what it is here.');
  const parts = [...new Set(T.kinds.map((kind) => kind.part))].filter((part) => part !== 'compute');
  const ways = [...new Set(T.strips.filter((strip) => strip[4] >= 0).map((strip) => strip[5]))].sort();
  const keys = ways.map((way) => [WAYS[way], WAY_COLOURS[way]]);
  const late = lateSeconds > 0.001 * SIMULATED.step_s ? ` Stragglers add ${seconds(lateSeconds)} on average and are not drawn.` : '';
  const note = goesOn ? ` No step empties the pipeline: each stage ends one every ${seconds(SIMULATED.step_s)}, and is at the one before, or the next, where nothing is drawn before or behind this one.` : late;
  const node = section('timeline', 'The step in time', `One device of each class stands for all of it. Drag to move; Ctrl + wheel, a double click or + and − zoom.${note}`,
    el('div', { class: 'tools' },
      el('button', { id: 'zoom-in', onclick: () => zoom(0.5) }, 'Zoom in'), el('button', { id: 'zoom-out', onclick: () => zoom(2) }, 'Zoom out'),
      el('button', { onclick: () => move(-0.4), 'aria-label': 'Earlier' }, '←'), el('button', { onclick: () => move(0.4), 'aria-label': 'Later' }, '→'),
      el('button', { id: 'zoom-all', onclick: () => setView(0, T.end) }, 'Whole step')),
    canvas,
    el('ul', { class: 'keys' }, [...keys, ...parts.map((part) => [FIXED[part] ? partText(part) : 'collectives along ' + part, partColour(part)]),
      ...(T.sends.length ? [['sends between stages', '--sends']] : [])].map(([name, colour]) => el('li', {}, swatch(colour), name))),
    details);
  listen();
  repaint();
  return node;
}
