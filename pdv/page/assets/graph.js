// The parallel graph, equal blocks once: a click opens a block, a click on an operator says why it is cut so.
const G = DATA.graph;
const OPERATORS = new Map(PLAN.operators.map((entry) => [entry.number, entry]));
const WHY = new Map();
if (DATA.why) for (const entry of DATA.why.operators) for (const number of entry.numbers) WHY.set(number, entry);
const MOVES = { partition: 'a slice is taken; backward gathers', combine: 'all-gather; backward takes a slice', replicate: 'nothing moves; backward sums (all-reduce)',
  reduce: 'all-reduce; backward moves nothing', all_gather: 'all-gather; backward is a reduce-scatter', reduce_scatter: 'reduce-scatter; backward gathers',
  reduce_replicate: 'all-reduce; backward sums as well', all_to_all: 'all-to-all, both ways' };
const isMove = (node) => node.axis !== undefined;
const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + '…' : text);
const timeOf = (node) => node.forward_s + node.backward_s;

function graphSection() {
  const panel = el('div', { id: 'why', class: 'stick', 'aria-live': 'polite' }, el('p', { class: 'small' }, 'Click an operator or a collective in a block.'));
  const most = Math.max(...G.map((one) => one.count * one.nodes.reduce((sum, node) => sum + timeOf(node), 0)));
  const blocks = el('div', { id: 'blocks' }, G.map((one) => blockOf(one, panel, most)));
  const largest = G.reduce((a, b) => (b.count * b.nodes.length > a.count * a.nodes.length ? b : a), G[0]);
  if (largest && largest.nodes.length) queueMicrotask(() => blocks.children[G.indexOf(largest)].querySelector('button').click());
  const each = RUNNING.micro_batches > 1 ? ' Times are of one micro-batch.' : '';
  return section('graph', 'The parallel graph', `Equal blocks are drawn once. Collectives have their axis' colour, each operator the sharding of its result.${each}`,
    el('div', { class: 'split' }, el('div', {}, blocks), el('div', { class: 'panel' }, panel)));
}
function blockOf(one, panel, most) {
  const total = one.nodes.reduce((sum, node) => sum + timeOf(node), 0), moves = one.nodes.filter(isMove).length;
  const inside = el('div', { class: 'inside', hidden: true, tabindex: '0', role: 'group', 'aria-label': 'Graph of ' + one.title });
  const button = el('button', { 'aria-expanded': 'false', onclick: () => {
    const open = button.getAttribute('aria-expanded') !== 'true';
    button.setAttribute('aria-expanded', String(open));
    inside.hidden = !open;
    if (!open || inside.firstChild) return;
    inside.append(drawBlock(one, panel, inside.clientWidth - 24));
    inside.scrollLeft = (inside.scrollWidth - inside.clientWidth) / 2;
  } }, el('span', { class: 'times' }, one.count > 1 ? `${one.count} ×` : '1 ×'), el('span', {}, one.title),
  el('span', { class: 'right' }, `${plural(one.nodes.length - moves, 'operator')}, ${plural(moves, 'move')}, ${seconds(one.count * total)}`));
  const share = most ? one.count * total / most : 0;
  return el('div', { class: 'block' }, button, el('div', { class: 'bar thin', 'aria-hidden': 'true', style: { height: '3px', margin: '0 12px 6px' } },
    el('span', { style: { width: 100 * share + '%', background: 'var(--compute)' } })), inside);
}
function drawBlock(one, panel, room) {
  const drawn = layered(one.nodes), margin = 6, width = drawn.width + 2 * margin, height = drawn.height + 2 * margin;
  const scale = Math.min(1, Math.max(0.7, room / width));
  const root = svg('svg', { width: width * scale, height: height * scale, viewBox: `${-margin} ${-margin} ${width} ${height}` });
  for (const path of drawn.edges) root.append(svg('path', { class: 'edge', d: edgePath(path) }));
  for (const item of drawn.items) if (item.node) root.append(drawNode(item, one, root, panel));
  return root;
}
function drawNode(item, one, root, panel) {
  const node = item.node, move = isMove(node);
  const choose = () => {
    root.querySelectorAll('.on').forEach((other) => other.classList.remove('on'));
    group.classList.add('on');
    panel.replaceChildren(...(move ? explainMove(node, one) : explainOperator(node, one)));
  };
  const name = move ? `${node.op} along ${node.axis}` : node.name ? `${node.op} · ${lastOf(node.name)}` : node.op;
  const below = [node.type.replace(/^.*?(\[.*\]).*$/, '$1'), node.sharding].filter(Boolean).join('  ');
  const group = svg('g', { class: move ? 'node move' : 'node', tabindex: '0', role: 'button', transform: `translate(${item.x - WIDTH / 2} ${item.y})`,
    onpointermove: (event) => showTip(`${name}\n${below}`, event), onpointerleave: () => showTip('', null),
    onclick: choose, onkeydown: (event) => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); choose(); } } },
  svg('rect', { width: WIDTH, height: HEIGHT, rx: move ? HEIGHT / 2 : 7, style: move ? { stroke: `var(${partColour(node.axis)})` } : {} }),
  svg('text', { x: move ? 18 : 10, y: 16, 'font-weight': 600 }, shorten(name, move ? 28 : 30)), svg('text', { x: move ? 18 : 10, y: 31, class: 'dim', 'font-size': 11 }, shorten(below, move ? 32 : 35)));
  return group;
}
const lastOf = (name) => name.split('*.').pop().split('.').slice(-2).join('.');

function states(sharding) {
  const words = { I: 'the same on all, computed alike', R: 'the same on all, used differently', P: 'terms of a sum' };
  return sharding.split(',').map((state, place) => [AXES[place], state.startsWith('S') ? 'cut along dim ' + state.slice(1) : words[state] || state]);
}
function about(node, one, more) {
  const rows = [['result', el('span', { class: 'mono' }, node.type)], ...(AXES.length ? states(node.sharding).map(([axis, words]) => [axis, words]) : []),
    ['forward', seconds(node.forward_s)], ['backward', seconds(node.backward_s)], ...more];
  if (node.from.length) rows.push(['reads', node.from.map(([kind, name, sharding]) => el('div', {}, `${kind} ${name} `, sharding && el('span', { class: 'chip' }, sharding)))]);
  if (one.count > 1) rows.push(['in', `${one.count} equal blocks`]);
  return el('dl', {}, rows.flatMap(([term, words]) => [el('dt', {}, term), el('dd', {}, words)]));
}
function explainMove(node, one) {
  return [el('h3', {}, swatch(partColour(node.axis)), `${node.op} along ${node.axis}`), el('p', {}, sentence(MOVES[node.op] || node.op)), about(node, one, [])];
}
function explainOperator(node, one) {
  const entry = OPERATORS.get(node.number), why = WHY.get(node.number);
  const found = [el('h3', {}, node.name ? `${node.op} · ${node.name}` : node.op)];
  const more = entry ? [['cut', splitText(entry.splits)], ['price', [num(seconds(entry.time_s), entry.time_s, `operators.${node.number}.time_s`), `, ${entry.source}`]]] : [];
  found.push(about(node, one, more));
  if (!why) return [...found, el('h3', { style: { 'margin-top': '16px' } }, 'Why so'), missing('Which other cuts there are, and their prices:', COMMAND)];
  found.push(el('h3', { style: { 'margin-top': '16px' } }, 'Why so'), whyText(why));
  for (const [axis, options] of Object.entries(why.instead)) {
    const ranked = Object.entries(options).sort((a, b) => (a[1] ? a[1].extra_s : Infinity) - (b[1] ? b[1].extra_s : Infinity));
    if (ranked.length) found.push(el('p', { class: 'small', style: { 'margin-top': '10px' } }, `Along ${axis}, instead of ${why.splits[axis]}:`),
      table(['cut', 'more a step'], ranked.map(([label, extra]) => [loopText(why, axis, label).slice(axis.length + 2), extra ? extraText(extra) : 'not possible']), [1]));
  }
  return found;
}
function whyText(why) {
  if (why.too_wide) return el('p', {}, 'Its block is too wide to be solved again without this cut.');
  if (!why.rejected) return el('p', {}, 'No other cut is possible between the same boundary shardings.');
  const extra = why.rejected;
  return el('p', { id: 'rejected' }, `The best rejected cut, ${cutText(why, extra.splits)}, would cost `, num(extraText(extra), extra.extra_s), ' a step for each such operator.',
    extra.extra_s < 0 ? ` ${DATA.why.cheaper}` : '');
}
