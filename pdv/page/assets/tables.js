// What is weighed: operators with their rejected cuts, rewrites, experts' plans, and other circumstances.
const COMMAND = 'pdv report DIR';
const splitText = (splits) => Object.entries(splits).filter(([, loop]) => loop !== 'none').map(([axis, loop]) => `${axis}: ${loop}`).join(', ') || 'whole on every device';
const loopText = (entry, axis, label) => (entry.loops[label] && entry.loops[label].role ? `${axis}: ${label} (${entry.loops[label].role})` : `${axis}: ${label}`);
const cutText = (entry, splits) => Object.entries(splits).map(([axis, label]) => loopText(entry, axis, label)).join(', ') || '–';
const extraText = (extra) => (extra.exact ? '' : '≥ ') + signed(extra.extra_s);

function operatorSection() {
  const lead = 'Equal operators once, the longest first: what a step spends on them, and the best other cut with what it would cost more, all else in its block free.' + (DATA.why ? ` ${DATA.why.cheaper}` : '');
  if (!DATA.why) return section('operators', 'Operators, and what was rejected', lead, missing('For this parts of the plan are solved again.', COMMAND));
  const rows = DATA.why.operators.map((entry) => [
    el('span', {}, el('strong', {}, entry.op), ` ${entry.type}`), String(entry.count), num(seconds(entry.time_s), entry.time_s), cutText(entry, entry.splits),
    entry.too_wide ? 'too wide to solve again' : entry.rejected ? cutText(entry, entry.rejected.splits) : 'no other cut is possible',
    entry.rejected && !entry.too_wide ? num(extraText(entry.rejected), entry.rejected.extra_s) : '']);
  return section('operators', 'Operators, and what was rejected', lead, table(['operator', 'count', 'a step', 'cut', 'best rejected', 'each more'], rows, [1, 2, 5]));
}
function rewriteSection() {
  const lead = 'Algebraic laws that the plan applies. Alone: what a rewrite adds to the whole model on one device. Without: how much longer the best plan takes that uses only the others.';
  const taken = PLAN.derivation.filter((step) => step.kind === 'algebraic');
  if (!taken.length) return section('rewrites', 'Rewrites', null, el('p', {}, 'No algebraic rewrite was worth taking.'));
  if (!DATA.why) {
    const rows = taken.map((step) => [step.rule, String(step.sites.length), el('code', {}, step.law || '')]);
    return section('rewrites', 'Rewrites', lead, table(['rule', 'sites', 'law'], rows, [1]), missing('What each brought takes a search without it.', COMMAND));
  }
  const rows = DATA.why.rewrites.map((entry) => [entry.rule, String(entry.sites), signed(entry.alone_s),
    entry.without_s === null ? 'nothing fits' : signed(entry.without_s - entry.with_s), el('code', {}, entry.equation)]);
  return section('rewrites', 'Rewrites', lead, table(['rule', 'sites', 'alone', 'without', 'law'], rows, [1, 2, 3]));
}
function compared(rows, best, first) {
  const worst = Math.max(...rows.map((row) => row.step_s || 0));
  return rows.map((row) => el('div', { class: 'row' }, el('span', { class: row.name === first && 'strong' }, row.name, row.detail ? el('span', { class: 'small' }, ' ' + row.detail) : null),
    row.step_s ? stacked([[row.name, row.step_s, row.name === first ? '--compute' : row.fits === false ? '--bubble' : '--host']], worst, `${row.name}: ${seconds(row.step_s)}`, true) : el('span', { class: 'small' }, row.why),
    row.step_s ? el('span', {}, num(seconds(row.step_s), row.step_s), row.name === first ? '' : ` (${digits(row.step_s / best, 3)}×)`, row.fits === false ? el('span', { class: 'no' }, ' does not fit') : '') : el('span', { class: 'small' }, '–')));
}
function expertSection() {
  const lead = 'What experts would write by hand, each in its best mesh and completed in its best way, priced and simulated alike. All but the pipelines take the batch at once and recompute nothing.';
  if (!DATA.experts) return section('experts', 'Beside the experts', lead, missing('Each of these is a search of its own.', COMMAND));
  const own = { name: 'this plan', step_s: PLAN.predicted.step_time_s.mean, fits: true };
  return section('experts', 'Beside the experts', lead, rowsOf(compared([own, ...DATA.experts], own.step_s, 'this plan')));
}
function sensitivitySection() {
  const lead = 'The same model planned again where one thing is another.';
  if (!DATA.sensitivity) return section('sensitivity', 'What would change it', lead, missing('Each of these plans the model again.', COMMAND));
  const own = { name: 'as it is', step_s: PLAN.predicted.step_time_s.mean, fits: true };
  return section('sensitivity', 'What would change it', lead, rowsOf(compared([own, ...DATA.sensitivity], own.step_s, 'as it is')));
}
