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
    return [el('span', {}, swatch(partColour(name)), name === 'pipeline' ? 'between stages' : name), link ? `${link.name}${link.bandwidth_bytes_per_s ? ', ' + rate(link.bandwidth_bytes_per_s) + 'B/s' : ''}` : '',
      String(moved.calls), num(bytes(moved.bytes), moved.bytes), num(seconds(moved.busy_ps / PICO), moved.busy_ps), percent(moved.busy_ps / step)];
  });
  if (!rows.length) return el('p', {}, 'One device: nothing is sent.');
  return table(['axis', 'link', 'collectives', 'bytes', 'links busy', 'of the step'], rows, [2, 3, 4, 5]);
}
function levels(cluster) {
  const found = cluster.levels || [];
  if (!found.length) return el('p', {}, 'One device, no links.');
  return found.reduceRight((inner, level, place) => el('div', { class: 'level' },
    el('p', {}, el('strong', {}, `${level.size} × ${level.name}`), ` joined by ${level.link.name}, `,
      level.link.bandwidth_bytes_per_s ? `${rate(level.link.bandwidth_bytes_per_s)}B/s a device and direction, ` : '', `${seconds(level.link.latency_s)} latency`, axesOf(cluster, place)),
    inner ? el('div', { class: 'nodes' }, Array.from({ length: Math.min(level.size, MOST_NODES) }, (_, i) => (i === 0 ? inner : inner.cloneNode(true))),
      level.size > MOST_NODES && el('p', { class: 'small' }, `… and ${level.size - MOST_NODES} more`)) : devices(level.size)), null);
}
function devices(size) {
  const shown = Array.from({ length: Math.min(size, MOST_DEVICES) }, (_, i) => el('span', { class: 'device' }, String(i)));
  return el('div', { class: 'devices' }, shown, size > MOST_DEVICES && el('span', { class: 'small' }, `… ${size} in all`));
}
// Which axes run over the links of a level: those whose link is that one.
function axesOf(cluster, place) {
  const link = cluster.levels[place].link.name;
  const names = PLAN.mesh.filter((axis) => axis.link.name === link).map((axis) => axis.name);
  return names.length ? el('span', {}, ': ', names.map((name) => el('span', { class: 'chip' }, swatch(partColour(name)), name))) : '';
}
