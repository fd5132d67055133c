'use strict';

// Plots: a vertical line at the pointer, and the value of each series there.
for (const svg of document.querySelectorAll('svg.plot[data-plot]')) {
  const plot = JSON.parse(svg.dataset.plot);
  const cursor = svg.querySelector('.cursor');
  const figure = svg.closest('figure');
  const [left, right, low, high] = plot.x;
  let tip = null, link = '';
  const hide = () => {
    cursor.setAttribute('visibility', 'hidden');
    if (tip) tip.remove();
    tip = null;
    link = '';
  };
  svg.addEventListener('click', (event) => {
    if (link && !event.target.closest('a')) location.href = link;
  });
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const x = right > left ? low + (at - left) / (right - left) * (high - low) : low;
    const lines = [];
    let near = null;
    link = '';
    for (const series of plot.series) {
      let best = -1;
      series.x.forEach((v, i) => {
        if (best < 0 || Math.abs(v - x) < Math.abs(series.x[best] - x)) best = i;
      });
      if (best < 0) continue;
      // Show the value of a sparse series only near its points.
      const away = Math.abs(series.x[best] - x) / (high - low || 1);
      if (away > 0.03 && plot.series.length > 1) continue;
      if (near === null) near = series.x[best];
      if (!link && series.link) link = series.link + series.x[best];
      lines.push(`${series.name}: ${series.text[best]}`);
    }
    if (near === null) return hide();
    const place = right > left ? left + (near - low) / (high - low || 1) * (right - left) : left;
    cursor.setAttribute('x1', place);
    cursor.setAttribute('x2', place);
    cursor.setAttribute('visibility', 'visible');
    if (!tip) {
      tip = document.createElement('div');
      tip.className = 'tip';
      figure.append(tip);
    }
    if (link) lines.push('click: its trajectories');
    svg.style.cursor = link ? 'pointer' : '';
    tip.textContent = [`${plot.xLabel} ${near}`, ...lines].join('\n');
    const offset = box.left - figure.getBoundingClientRect().left;
    const start = place / svg.viewBox.baseVal.width * box.width + offset;
    const last = figure.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(4, Math.min(start + 12, last))}px`;
    tip.style.top = `${box.top - figure.getBoundingClientRect().top + 8}px`;
  });
}

// Trajectories: filters by phase, family, verdict and text.
const filters = [...document.querySelectorAll('[data-filter]')];
const episodes = [...document.querySelectorAll('.episode')];
const output = document.querySelector('.filters output');
const apply = () => {
  let shown = 0;
  for (const episode of episodes) {
    episode.hidden = !filters.every(({value, dataset}) => !value || (
      dataset.filter === 'text'
        ? episode.textContent.toLowerCase().includes(value.toLowerCase())
        : episode.dataset[dataset.filter] === value));
    if (!episode.hidden) shown += 1;
  }
  output.textContent = `${shown} shown`;
};
for (const filter of filters) filter.addEventListener('input', apply);
