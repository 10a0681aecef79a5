// Memory by stage: who holds the peak, and what is allocated over the step; and where each stage's time goes.
function memorySection() {
  const held = T.held;
  const alike = new Set(held.map((one) => one.capacity_bytes)).size === 1; // devices of several kinds have a bar of their own each
  const largest = Math.max(...held.map((one) => Math.max(one.capacity_bytes, one.total_bytes)));
  const rows = held.map((one) => {
    const kinds = Object.entries(one.by_kind_bytes).map(([kind, size]) => [kind, size, holderColour(kind)]);
    kinds.push(['allocator, context, communicators', Math.max(0, one.total_bytes - one.peak_bytes), '--bubble']);
    const name = held.length > 1 || RUNNING.stages > 1 ? `stage ${one.stage}, ${one.device}` : `${one.count} × ${one.device}`;
    return el('div', { class: 'row' }, el('span', {}, name), stacked(kinds, alike ? largest : Math.max(one.capacity_bytes, one.total_bytes), kinds.map((kind) => `${kind[0]} ${bytes(kind[1])}`).join(', '), held.length > 6),
      el('span', { class: one.fits ? '' : 'no strong' }, num(bytes(one.total_bytes), one.total_bytes), alike ? '' : ` of ${bytes(one.capacity_bytes)}`, one.fits ? '' : ', does not fit'));
  });
  const kinds = [...new Set(held.flatMap((one) => Object.keys(one.by_kind_bytes)))];
  const chosen = held.indexOf(held.reduce((a, b) => (b.total_bytes / b.capacity_bytes > a.total_bytes / a.capacity_bytes ? b : a)));
  const panel = el('div', { id: 'held' });
  const choice = el('select', { id: 'held-stage', 'aria-label': 'Stage', onchange: (event) => drawHeld(panel, held[event.target.value]) },
    held.map((one, place) => el('option', { value: place, selected: place === chosen }, `stage ${one.stage}, ${one.device}`)));
  drawHeld(panel, held[chosen]);
  addEventListener('repaint', () => drawHeld(panel, held[choice.value]));
  return section('memory', 'Memory', `Of ${alike ? `${bytes(largest)} a device` : 'what each device has'}, by who holds it at the peak.`, rowsOf(rows),
    el('ul', { class: 'keys' }, kinds.map((kind) => el('li', {}, swatch(holderColour(kind)), kind)), el('li', {}, swatch('--bubble'), 'allocator, context, communicators')),
    el('div', { class: 'tools', style: { 'margin-top': '18px' } }, el('h3', { style: { margin: 0 } }, 'Over the step'), held.length > 1 && choice), panel,
    SIMULATED.stages.length > 1 && stageTable());
}
function drawHeld(panel, one) {
  const width = 1000, height = 150, points = one.curve;
  const most = Math.max(one.peak_bytes, 1) * 1.06;
  let path = '';
  for (let i = 0; i < points.length; i += 4) {
    const [start, inside, end, after] = points.slice(i, i + 4);
    const x = (time) => (width * time / T.end).toFixed(1), y = (size) => (height - height * size / most).toFixed(1);
    path += `${path ? 'L' : 'M0,' + height + 'L'}${x(start)},${y(inside)}L${x(end)},${y(inside)}L${x(end)},${y(after)}`;
  }
  const holders = one.holders.map(([kind, op, size]) => [el('span', {}, swatch(holderColour(kind)), kind), op || '', num(bytes(size), size), percent(size / one.peak_bytes)]);
  panel.replaceChildren(
    el('p', { class: 'small' }, `At most ${bytes(one.peak_bytes)} of tensors${one.when ? ', at ' + one.when : ''}.`),
    svg('svg', { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', width: '100%', height, role: 'img', 'aria-label': `Bytes allocated over the step, at most ${bytes(one.peak_bytes)}` },
      svg('path', { d: path + `L${width},${height}Z`, style: { fill: 'var(--forward)', 'fill-opacity': '.35', stroke: 'var(--compute)', 'stroke-width': '1.5', 'vector-effect': 'non-scaling-stroke' } })),
    el('p', { class: 'small', style: { display: 'flex', 'justify-content': 'space-between' } }, el('span', {}, '0'), el('span', {}, seconds(T.end / PICO))),
    table(['who holds the peak', 'made by', 'bytes', 'share'], holders, [2, 3]));
}
function stageTable() {
  const names = Object.keys(PLAN.predicted.breakdown_s);
  const rows = SIMULATED.stages.map((stage) => {
    const parts = names.map((name) => [partText(name), stage.breakdown_s[name] || 0, partColour(name)]);
    return el('div', { class: 'row' }, el('span', {}, `stage ${stage.stage}, ${stage.device}`),
      stacked(parts, SIMULATED.step_s, parts.map((part) => `${part[0]} ${percent(part[1] / SIMULATED.step_s)}`).join(', '), true),
      el('span', { class: 'num' }, percent((stage.breakdown_s.bubble || 0) / SIMULATED.step_s) + ' bubble'));
  });
  return el('div', { id: 'stages' }, el('h3', { style: { 'margin-top': '20px' } }, 'Where each stage spends the step'), rowsOf(rows),
    el('ul', { class: 'keys' }, names.map((name) => el('li', {}, swatch(partColour(name)), partText(name)))));
}
