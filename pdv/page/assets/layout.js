// Layers of a graph from top to bottom (Sugiyama et al., 1981): ranks by longest path, bends for long edges, barycenters.
const WIDTH = 214, HEIGHT = 40, GAP = 20, RISE = 26, BEND = 14;

function layered(nodes) {
  const items = nodes.map((node) => ({ node, width: WIDTH, in: [], out: [], rank: 0 }));
  nodes.forEach((node, place) => node.in.forEach((from) => { items[place].rank = Math.max(items[place].rank, items[from].rank + 1); }));
  // what only starts something (a parameter's gather) stands right above its reader
  nodes.forEach((node, place) => {
    if (node.in.length) return;
    const readers = nodes.map((other, number) => (other.in.includes(place) ? items[number].rank : Infinity));
    const first = Math.min(...readers);
    if (first < Infinity) items[place].rank = first - 1;
  });
  const edges = [], ranks = [];
  const join = (from, to) => { from.out.push(to); to.in.push(from); };
  nodes.forEach((node, place) => [...new Set(node.in)].forEach((from) => {
    const path = [items[from]];
    for (let rank = items[from].rank + 1; rank < items[place].rank; rank += 1) { const bend = { width: BEND, in: [], out: [], rank }; items.push(bend); path.push(bend); }
    path.push(items[place]);
    for (let i = 1; i < path.length; i += 1) join(path[i - 1], path[i]);
    edges.push(path);
  }));
  for (const item of items) (ranks[item.rank] = ranks[item.rank] || []).push(item);
  for (let sweep = 0; sweep < 8; sweep += 1) {
    const down = sweep % 2 === 0;
    for (const rank of down ? ranks : [...ranks].reverse()) order(rank, down ? 'in' : 'out');
  }
  return place(ranks, items, edges);
}
// What begins here (a parameter's gather) stands on the right, so that the way of the values is a straight line.
const beginning = (item) => Number(Boolean(item.node) && !item.in.length && item.out.length > 0 && item.rank > 0);
function order(rank, side) {
  rank.forEach((item, at) => { item.at = item.at === undefined ? at : item.at; });
  const wish = (item) => (item[side].length ? item[side].reduce((sum, other) => sum + (other.at || 0), 0) / item[side].length : item.at);
  const wishes = new Map(rank.map((item) => [item, wish(item)]));
  rank.sort((a, b) => beginning(a) - beginning(b) || wishes.get(a) - wishes.get(b));
  rank.forEach((item, at) => { item.at = at; });
}
function place(ranks, items, edges) {
  for (const rank of ranks) { let x = 0; for (const item of rank) { item.x = x + item.width / 2; x += item.width + GAP; } }
  for (let sweep = 0; sweep < 120; sweep += 1) for (const rank of sweep % 2 ? [...ranks].reverse() : ranks) settle(rank);
  const left = Math.min(...items.map((item) => item.x - item.width / 2)), right = Math.max(...items.map((item) => item.x + item.width / 2));
  for (const item of items) { item.x -= left; item.y = item.rank * (HEIGHT + RISE); }
  return { items, edges, width: right - left, height: ranks.length * (HEIGHT + RISE) - RISE };
}
// Everyone goes where its neighbours are, as far as those beside it let it.
function settle(rank) {
  const wish = rank.map((item) => {
    const all = [...item.in, ...item.out], main = all.filter((other) => !beginning(other)), near = main.length ? main : all;
    return near.length ? near.reduce((sum, other) => sum + other.x, 0) / near.length : item.x;
  });
  const least = (a, b) => (a.width + b.width) / 2 + GAP;
  const free = rank.findIndex((item) => beginning(item)), count = free < 0 ? rank.length : free;
  const right = [...wish], left = [...wish];
  for (let i = 1; i < count; i += 1) right[i] = Math.max(right[i], right[i - 1] + least(rank[i - 1], rank[i]));
  for (let i = count - 2; i >= 0; i -= 1) left[i] = Math.min(left[i], left[i + 1] - least(rank[i], rank[i + 1]));
  for (let i = 0; i < rank.length; i += 1) {
    if (i < count) rank[i].x = (left[i] + right[i]) / 2;
    else rank[i].x = i ? Math.max(wish[i], rank[i - 1].x + least(rank[i - 1], rank[i])) : wish[i];  // these give way
  }
}
function edgePath(path) {
  let text = '';
  for (let i = 1; i < path.length; i += 1) {
    const [a, b] = [path[i - 1], path[i]];
    const from = a.y + (a.node ? HEIGHT : HEIGHT / 2), to = b.y + (b.node ? 0 : HEIGHT / 2), middle = (from + to) / 2;
    text += `${i === 1 ? `M${a.x},${from}` : ''}C${a.x},${middle} ${b.x},${middle} ${b.x},${to}`;
  }
  return text;
}
