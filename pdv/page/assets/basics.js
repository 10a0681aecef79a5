// The data, elements made as text, and numbers as people read them. Nothing here, or elsewhere, parses markup.
const DATA = JSON.parse(document.getElementById('data').textContent);
const PLAN = DATA.plan;
const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') Object.entries(value).forEach(([key, to]) => node.style.setProperty(key, to));
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function digits(value, count = 3) {
  if (value === 0) return '0';
  const large = Math.abs(value) >= 10 ** (count - 1);
  return large ? value.toFixed(0) : String(Number(value.toPrecision(count)));
}
function seconds(value) {
  if (value < 0) return '−' + seconds(-value);
  for (const [unit, size] of [['s', 1], ['ms', 1e-3], ['µs', 1e-6]]) {
    if (value >= size || unit === 'µs') return digits(value / size) + ' ' + unit;
  }
}
const signed = (value) => (value > 0 ? '+' : '') + seconds(value);
function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let place = 0;
  while (Math.abs(value) >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return digits(value, 4) + ' ' + units[place];
}
function count(value) {
  for (const [unit, size] of [['T', 1e12], ['B', 1e9], ['M', 1e6], ['k', 1e3]]) {
    if (value >= size) return digits(value / size, 4) + ' ' + unit;
  }
  return digits(value, 4);
}
const rate = (value) => (value >= 1e9 && value < 1e12 ? digits(value / 1e9, 4) + ' G' : count(value));  // of bytes or operations
const percent = (part) => (part > 0 && part < 0.0005 ? '< 0.1' : (100 * part).toFixed(1)) + ' %';
const plural = (number, one, many) => number + ' ' + (number === 1 ? one : many || one + 's');
// A number with what it was read from: tests compare both with plan.json.
const num = (text, value, source) => el('span', { class: 'num', 'data-v': value, 'data-from': source }, text);

const WORDS = { host: 'host gaps', bubble: 'pipeline bubble', pipeline: 'exposed sends between stages', tied: 'sums between stages',
  waiting: 'waiting for other devices', compute: 'compute', recomputation: 'recomputation', optimizer: 'optimizer' };
const partText = (name) => WORDS[name] || 'exposed communication, ' + name;
const FIXED = { compute: '--compute', recomputation: '--recomputation', optimizer: '--optimizer', host: '--host', waiting: '--waiting',
  bubble: '--bubble', pipeline: '--sends', tied: '--sends', communication: '--axis0' };
const AXES = PLAN.mesh.map((axis) => axis.name);
function partColour(name) {
  if (FIXED[name]) return FIXED[name];
  const place = AXES.indexOf(name);
  return place < 0 ? '--axis2' : ['--axis0', '--axis1', '--axis2'][place % 3];
}
const HOLDERS = { weights: '--weights', gradients: '--compute', optimizer: '--optimizer', inputs: '--host', activations: '--axis1',
  'activation gradients': '--axis0', temporaries: '--axis2', collectives: '--sends', pipeline: '--recomputation', loss: '--waiting' };
const holderColour = (kind) => HOLDERS[kind] || '--host';
const swatch = (colour) => el('span', { class: 'swatch', 'aria-hidden': 'true', style: { background: `var(${colour})` } });
const pigment = (colour) => getComputedStyle(document.documentElement).getPropertyValue(colour).trim();

// parts: [name, amount, colour]; what is left of `whole` stays empty.
function stacked(parts, whole, label, thin) {
  const pieces = parts.filter((part) => part[1] > 0).map(([, amount, colour]) =>
    el('span', { style: { width: 100 * amount / whole + '%', background: `var(${colour})` } }));
  return el('div', { class: thin ? 'bar thin' : 'bar', role: 'img', 'aria-label': label }, pieces);
}
function table(heads, rows, numeric = []) {
  const cell = (name, content, place) => el(name, { class: numeric.includes(place) && 'n', scope: name === 'th' && 'col' }, content);
  return el('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Table: ' + heads.join(', ') }, el('table', {},
    el('thead', {}, el('tr', {}, heads.map((head, place) => cell('th', head, place)))),
    el('tbody', {}, rows.map((row) => el('tr', {}, row.map((content, place) => cell('td', content, place)))))));
}
const rowsOf = (...rows) => el('div', { class: 'rows' }, rows);
const sections = [];
function section(id, title, lead, ...content) {
  sections.push([id, title]);
  return el('section', { id, 'aria-labelledby': id + '-title' }, el('h2', { id: id + '-title' }, title), lead && el('p', { class: 'lead' }, lead), content);
}
const missing = (what, command) => el('p', { class: 'missing' }, what + ' ', el('code', {}, command), ' adds it to this page.');

const tip = document.getElementById('tip');
function showTip(text, event) {
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + 'px';
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + 'px';
}
