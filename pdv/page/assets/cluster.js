// The cluster as it was planned for: its levels, its devices, and what crosses each mesh axis in a step.
const MOST_NODES = 8, MOST_DEVICES = 8;

function clusterSection() {
  const cluster = PLAN.cluster;
  const classes = cluster.classes.map((entry) => [`${entry.count} × ${entry.device.name}`, bytes(entry.device.memory_bytes),
    `${rate(Math.max(...Object.values(entry.device.peak_flops)))}FLOP/s`, `${rate(entry.device.memory_bandwidth_bytes_per_s)}B/s`]);
  return section('cluster', 'Cluster and traffic', 'What a device of the busiest stage moves along each axis in a step, and how long its links are busy with it, waited for or not.',
    trafficTable(), el('h3', { style: { 'margin-top': '20px' } }, 'Devices'), table(['devices', 'memory', 'peak', 'memory bandwidth'], classes, [1, 2, 3]),
    el('h3', { style: { 'margin-top': '20px' } }, 'Links'), levels(cluster));
}
function trafficTable() {
  const known = DATA.traffic;
  const links = Object.fromEntries(PLAN.mesh.map((axis) => [axis.name, axis.link]));
  const names = [...new Set([...AXES, ...Object.keys(known)])];
  const step = PLAN.predicted.step_time_s.mean * PICO;
  const rows = names.map((name) => {
    const moved = known[name] || { bytes: 0, busy_ps: 0, calls: 0 }, link = links[name];
    return [el('span', {}, swatch(partColour(name)), axisText(name)), link ? `${link.name}${link.bandwidth_bytes_per_s ? ', ' + rate(link.bandwidth_bytes_per_s) + 'B/s' : ''}` : '',
      String(moved.calls), moved.bytes === null ? '–' : num(bytes(moved.bytes), moved.bytes), num(seconds(moved.busy_ps / PICO), moved.busy_ps), percent(moved.busy_ps / step)];
  });
  if (!rows.length) return el('p', {}, 'One device: nothing is sent.');
  return table(['axis', 'link', 'collectives', 'bytes', 'links busy', 'of the step'], rows, [2, 3, 4, 5]);
}
const axisText = (name) => ({ pipeline: 'between stages', tied: 'sums between stages' }[name] || name);

// Each level with its link and what runs over it; below, the devices as they hang together.
function levels(cluster) {
  const found = cluster.levels || [];
  if (!found.length) return el('p', {}, 'One device, no links.');
  const rows = found.map((level, place) => [el('strong', {}, `${level.size} × ${level.name}`), level.link.name,
    level.link.bandwidth_bytes_per_s ? rate(level.link.bandwidth_bytes_per_s) + 'B/s' : '–', seconds(level.link.latency_s), carried(found, place)]);
  return [table(['level', 'link', 'a device and direction', 'latency', 'what crosses it in a step'], rows, [2, 3]),
    el('div', { class: 'map', role: 'img', 'aria-label': found.map((level) => `${level.size} ${level.name}`).join(' of ') }, nested(found, 0)),
    cluster.places && el('p', {}, placed(cluster.places))];
}
// Where stages are, if not in the order of the devices.
function placed(places) {
  const each = places.length / RUNNING.stages;
  const parts = Array.from({ length: RUNNING.stages }, (_, stage) => `stage ${stage} is on ${spans(places.slice(stage * each, (stage + 1) * each))}`);
  return `Of all devices, counted from 0 as they are listed, ${parts.join(', ')}.`;
}
function spans(numbers) {
  const runs = [];
  for (const number of numbers) {
    const run = runs[runs.length - 1];
    if (run && number === run[1] + 1) run[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`)).join(', ');
}
// Axes whose link is that of the level, or one of those that it is where nodes differ; joint ones are on the levels of
// all their axes, sends on the outermost.
function carried(found, place) {
  const own = new Map(PLAN.mesh.map((axis) => [axis.name, Math.max(0, found.findIndex((level) => level.link.name === axis.link.name || level.link.name.split('+').includes(axis.link.name)))]));
  const crosses = (name) => (own.has(name) ? own.get(name) === place : name.split('+').some((part) => (own.get(part) || 0) === place));
  const names = Object.keys(DATA.traffic).filter(crosses);
  if (!names.length) return 'nothing';
  return names.map((name) => el('span', { class: 'chip' }, swatch(partColour(name)), `${axisText(name)}: ${DATA.traffic[name].bytes === null ? '' : bytes(DATA.traffic[name].bytes) + ', '}${seconds(DATA.traffic[name].busy_ps / PICO)}`));
}
function nested(found, place) {
  const level = found[place], last = place === found.length - 1, most = last ? MOST_DEVICES : MOST_NODES;
  const inside = Array.from({ length: Math.min(level.size, most) }, (_, i) => (last ? el('span', { class: 'device' }, String(i)) : el('div', { class: 'level' }, el('p', { class: 'small' }, `${level.name} ${i}`), nested(found, place + 1))));
  const more = level.size > most && el('span', { class: 'small' }, `… ${level.size} × ${level.name}`);
  return el('div', { class: last ? 'devices' : 'nodes' }, inside, more);
}
