// What the run doctor found: the window of each, its series, and the trajectories behind it.

const MOST_LINKS = 12;  // steps of a window that are listed

// Steps of the window that have a point, the ends included.
function stepsOf({ phase, window, curves }) {
  if (phase !== 'rl' || !window) return [];
  const steps = curves.flatMap(({ points }) => points.map(([step]) => step));
  const inside = [...new Set(steps)].filter((s) => window[0] <= s && s <= window[1]).sort((a, b) => a - b);
  const every = Math.max(1, Math.ceil((inside.length - 1) / (MOST_LINKS - 1)));
  return inside.filter((_, i) => i % every === 0 || i === inside.length - 1);
}

function Finding({ found }) {
  const steps = stepsOf(found), { window } = found;
  const charts = found.curves.filter(({ points }) => points.length).map(({ name, points, threshold, why }, i) => ({
    key: `${name}-${i}`, title: printable(name), note: printable(why), text: rounded, xLabel: 'step', shade: window,
    bound: threshold, points: points.map(([x, y]) => ({ x, y, text: `step ${x}: ${rounded(y)}`,
      link: found.phase === 'rl' ? `#step=${x}` : undefined })),
  }));
  return html`<article class="finding"><h3><span class=${found.severity === 'error' ? 'flag' : 'soft'}>${
      found.severity}</span> ${printable(found.kind)} <span class="soft">${printable(found.phase)}${
      window ? `, steps ${window[0].toLocaleString()} to ${window[1].toLocaleString()}` : ''}</span></h3>
    <p>${printable(found.summary)}</p>
    ${found.causes.length > 0 && html`<ul>${found.causes.map(([text, field]) => html`<li>${printable(text)}${
      field && html` (<code>${printable(field)}</code>)`}</li>`)}</ul>`}
    ${found.log.length > 0 && html`<pre>${found.log.map(printable).join('\n')}</pre>`}
    ${steps.length > 0 && html`<p>Trajectories of the window: ${steps.map((s) =>
      html`<a class="window" href=${`#step=${s}`}>step ${s}</a> `)}</p>`}
    ${charts.map((chart) => html`<${Chart} ...${chart} />`)}</article>`;
}

function Findings({ summary }) {
  const { value, error } = useAnswer(() => source.findings(), [summary.trained, summary.findings]);
  return html`<main class="detail curves findings" tabindex="-1" aria-label="Findings">
    ${error && html`<p class="flag" role="alert">${error.message}</p>`}
    ${value?.length === 0 && html`<p class="soft">No findings: experiments.doctor --write looks again.</p>`}
    ${value?.length > 0 && html`<p class="soft">Of the run doctor. The window is shaded, the threshold dashed; in
      training a point leads to its trajectories.</p>`}
    ${value?.map((found, i) => html`<${Finding} key=${i} found=${found} />`)}</main>`;
}
