// The head of the page and its four cards: the step, memory, the certificate, what the plan does.
const SIMULATED = DATA.simulated;
const RUNNING = SIMULATED.pipeline;

function drawHead() {
  const where = `${plural(SIMULATED.cluster.num_devices, 'device')}, ${PLAN.mode === 'infer' ? 'inference' : 'training'}`;
  document.getElementById('top').append(
    el('div', {}, el('h1', {}, `${PLAN.source.name} on ${PLAN.cluster.name}`),
      el('p', { class: 'sub' }, `${count(PLAN.source.parameters)} parameters, ${where}; inputs `,
        PLAN.source.inputs.map((one) => `${one.name} [${one.shape.join(', ')}]`).join(', '),
        RUNNING.micro_batches > 1 && ' a micro-batch')),
    el('button', { class: 'theme', id: 'theme', 'aria-pressed': 'false', onclick: toggleTheme }, 'Dark'));
}
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? 'dark' : 'light';
  const button = document.getElementById('theme');
  button.setAttribute('aria-pressed', String(dark));
  button.textContent = dark ? 'Light' : 'Dark';
  dispatchEvent(new Event('repaint'));
}
function toggleTheme() { setTheme(document.documentElement.dataset.theme !== 'dark'); }

function legend(parts, whole, show) {
  return el('table', { class: 'legend' }, el('tbody', {}, parts.map(([name, amount, colour, source]) => el('tr', {},
    el('td', {}, swatch(colour), name), el('td', { class: 'n' }, num(show(amount), amount, source)),
    el('td', { class: 'n' }, percent(whole ? amount / whole : 0))))));
}
function stepCard() {
  const time = PLAN.predicted.step_time_s;
  const parts = Object.entries(PLAN.predicted.breakdown_s).map(([name, part]) => [partText(name), part, partColour(name), 'predicted.breakdown_s.' + name]);
  const shown = parts.filter((part) => part[1] > 0.0005 * time.mean);
  const speed = SIMULATED.tokens_per_s === null ? `${digits(SIMULATED.samples_per_s, 4)} samples/s` : `${count(SIMULATED.tokens_per_s)} tokens/s`;
  return el('div', { class: 'card', id: 'step' }, el('h3', {}, 'One step'),
    el('div', { class: 'big' }, num(seconds(time.mean), time.mean, 'predicted.step_time_s.mean'), ' ',
      el('small', {}, '± ', num(seconds(time.std), time.std, 'predicted.step_time_s.std'))),
    el('p', { class: 'facts' }, `${speed}, ${digits(SIMULATED.flops_per_s_per_device / 1e12)} TFLOP/s of the model a device, MFU ${percent(SIMULATED.mfu)}. Prices: ${PLAN.predicted.source}.`),
    stacked(shown, time.mean, 'Where the step goes: ' + shown.map((part) => `${part[0]} ${percent(part[1] / time.mean)}`).join(', ')),
    legend(shown, time.mean, seconds));
}
function memoryCard() {
  const worst = DATA.timeline.held.reduce((a, b) => (b.total_bytes / b.capacity_bytes > a.total_bytes / a.capacity_bytes ? b : a));
  const kinds = Object.entries(worst.by_kind_bytes).map(([kind, size]) => [kind, size, holderColour(kind)]);
  const outside = worst.total_bytes - worst.peak_bytes;
  if (outside > 0) kinds.push(['allocator, context, communicators', outside, '--bubble']);
  const where = RUNNING.stages > 1 ? `stage ${worst.stage}, ` : '';
  return el('div', { class: 'card', id: 'memory-card' }, el('h3', {}, 'Memory of the fullest device'),
    el('div', { class: 'big' }, num(bytes(worst.total_bytes), worst.total_bytes), ' ',
      el('small', {}, `of ${bytes(worst.capacity_bytes)} on ${where}${worst.device}`)),
    el('p', { class: 'facts' }, el('span', { class: worst.fits ? 'ok strong' : 'no strong' }, worst.fits ? 'Fits' : 'Does not fit'),
      worst.when ? `; the peak is at ${worst.when}.` : '.',
      PLAN.simulated.host_bytes ? [' Beside it, up to ', num(bytes(PLAN.simulated.host_bytes), PLAN.simulated.host_bytes, 'simulated.host_bytes'), ' of its host\'s memory.'] : null),
    stacked(kinds, Math.max(worst.capacity_bytes, worst.total_bytes), 'Who holds it: ' + kinds.map((kind) => `${kind[0]} ${bytes(kind[1])}`).join(', ')),
    legend(kinds.filter((kind) => kind[1] > 0.0005 * worst.total_bytes), worst.capacity_bytes, bytes));
}
function certificateCard() {
  const search = PLAN.search, certificate = search.certificate;
  const known = search.gap !== null;
  return el('div', { class: 'card', id: 'certificate' }, el('h3', {}, 'Certificate and proof'),
    el('div', { class: 'big' }, known ? [num(percent(search.gap), search.gap, 'search.gap'), ' ', el('small', {}, 'from the bound')] : 'no bound'),
    el('p', { class: 'facts' }, known && ['At least ', num(seconds(search.lower_bound), search.lower_bound, 'search.lower_bound'), ', found ',
      num(seconds(search.cost), search.cost, 'search.cost'), ` (${certificate.of === 'step' ? 'simulated step' : 'kernels, collectives and optimizer added up'}). `],
      `${plural(search.states, 'state')} priced by ${search.strategy}`, certificate.complete ? '.' : '; the budget stopped the search.'),
    el('p', {}, sentence(certificate.statement)),
    PLAN.proof && el('p', {}, el('span', { class: 'ok strong' }, 'Proved: '), PLAN.proof.statement + '.'),
    PLAN.run && el('p', { class: 'small' }, 'The text, run: ' + PLAN.run.statement + '.'));
}
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith('.') ? '' : '.');

function planCard() {
  const rows = PLAN.mesh.map((axis) => [el('span', { class: 'whole' }, swatch(partColour(axis.name)), `${axis.name} = ${axis.size}`), el('span', { class: 'whole' }, axis.link.name), (PLAN.techniques[axis.name] || []).join(', ') || DATA.uses[axis.name]]);
  const head = PLAN.mesh.length ? PLAN.mesh.map((axis) => axis.size).join(' × ') : 'One device';
  return el('div', { class: 'card', id: 'plan' }, el('h3', {}, 'What the plan does'),
    el('div', { class: 'big' }, RUNNING.stages > 1 ? `${RUNNING.stages} × (${head})` : head, ' ', el('small', {}, RUNNING.stages > 1 ? 'stages, each a mesh' : PLAN.mesh.length ? 'mesh' : 'nothing is cut')),
    el('p', { class: 'facts' }, sentence(DATA.runs || 'the whole batch at once')),
    rows.length ? table(['axis', 'link', 'what it does'], rows) : null,
    storage());
}
function storage() {
  const steps = PLAN.derivation.filter((step) => step.kind === 'storage');
  if (!steps.length) return el('p', { class: 'small' }, 'Every parameter rests whole on every device.');
  const total = steps.reduce((sum, step) => sum + step.sites.length, 0);
  const again = steps.filter((step) => step.bindings.regather).reduce((sum, step) => sum + step.sites.length, 0);
  return el('p', { class: 'small' }, `${plural(total, 'parameter rests', 'parameters rest')} cut${again ? `; ${again} of them are gathered again in backward` : ''}.`);
}
