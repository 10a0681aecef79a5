// The page in order, and which sections it has.
function drawAll() {
  drawHead();
  const main = document.getElementById('main');
  main.append(el('div', { class: 'cards' }, stepCard(), memoryCard(), planCard(), certificateCard()),
    timelineSection(), memorySection(), graphSection(), operatorSection(), rewriteSection(), expertSection(), sensitivitySection(), clusterSection());
  document.getElementById('contents').append(...sections.map(([id, title]) => el('a', { href: '#' + id }, title)));
  document.getElementById('bottom').append(el('p', {}, PLAN.command ? ['Planned by ', el('code', {}, PLAN.command), '. '] : null,
    'Every figure is that of plan.json and of the step simulated from it; times are estimates of the cost model ', el('code', {}, String(PLAN.cost_model.name)), '. Drawn by pdv report.'));
  setTheme(matchMedia('(prefers-color-scheme: dark)').matches);
  document.documentElement.dataset.ready = 'yes';
}
drawAll();
