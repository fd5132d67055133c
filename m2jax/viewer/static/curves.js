// Curves of metrics.jsonl. Each point is a link to the trajectories behind it.

const CHART = 170, MARGIN = { left: 46, right: 10, top: 10, bottom: 22 };
const rounded = (value) => String(Number(value.toPrecision(3)));

// Points of a column of the training steps: [step, reward, success].
const stepPoints = (rows, column, text) => rows.filter((row) => row[column] != null).map((row) => ({
  x: row[0], y: row[column], link: `#step=${row[0]}`, text: `step ${row[0]}: ${text(row[column])}` }));
const stagePoints = (rows) => rows.filter(([, y]) => y != null).map(([stage, y, n], i) => ({
  x: i + 1, y, link: `#${new URLSearchParams({ phase: 'eval', stage })}`, text: `${printable(stage)}: ${percent(y)} of ${n}` }));

// The places halfway to the neighbours: whatever is between them belongs to the point.
const reach = (xs, i) => [i ? (xs[i - 1] + xs[i]) / 2 : xs[0] - MARGIN.right,
  i < xs.length - 1 ? (xs[i] + xs[i + 1]) / 2 : xs[i] + MARGIN.right];

function Chart({ title, note, points, limits, text, line = true, xLabel }) {
  const [ref, width] = useWidth(), [chosen, setChosen] = useState(points.length - 1);
  const at = Math.min(Math.max(chosen, 0), points.length - 1), ys = points.map((p) => p.y);
  let [low, high] = limits ?? [Math.min(...ys), Math.max(...ys)];
  if (low === high) [low, high] = [low - 1, high + 1];
  const start = points[0].x, span = points.at(-1).x - start;
  const x = (v) => MARGIN.left + (span ? (v - start) / span : 0.5) * (width - MARGIN.left - MARGIN.right);
  const y = (v) => CHART - MARGIN.bottom - ((v - low) / (high - low)) * (CHART - MARGIN.top - MARGIN.bottom);
  const xs = points.map((p) => x(p.x)), ends = span ? [points[0], points.at(-1)] : [points[0]];
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) setChosen(Math.min(Math.max(at + by, 0), points.length - 1));
    else if (event.key === 'Enter') location.hash = points[at].link;
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<figure class="chart"><figcaption><b>${title}</b> <span class="soft">${note}</span></figcaption>
    <div ref=${ref} role="listbox" tabindex="0" onKeyDown=${onKey} aria-activedescendant=${`${title}-${at}`}
      aria-label=${`${title}: arrow keys move, Enter opens the trajectories`}>
    ${width > 0 && html`<svg width=${width} height=${CHART} role="presentation">
      ${[low, (low + high) / 2, high].map((v) => html`<line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right}
        y1=${y(v)} y2=${y(v)} /><text x=${MARGIN.left - 6} y=${y(v) + 4} text-anchor="end">${text(v)}</text>`)}
      ${ends.map((p, i) => html`<text x=${x(p.x)} y=${CHART - 5} text-anchor=${span ? ['start', 'end'][i] : 'middle'}>
        ${xLabel} ${p.x}</text>`)}
      ${line && html`<polyline points=${points.map((p, i) => `${xs[i]},${y(p.y)}`).join(' ')} />`}
      ${points.map((p, i) => { const [left, right] = reach(xs, i); return html`<a class="point" href=${p.link} tabindex="-1"
        role="option" id=${`${title}-${i}`} aria-selected=${i === at} aria-label=${p.text} onMouseEnter=${() => setChosen(i)}>
        <rect x=${left} y="0" width=${Math.max(right - left, 0)} height=${CHART - MARGIN.bottom} />
        <circle cx=${xs[i]} cy=${y(p.y)} r=${i === at ? 5 : points.length > 150 ? 1.5 : 3} /></a>`; })}</svg>`}
    </div><p class="soft">${points[at].text}</p></figure>`;
}

function Curves({ summary }) {
  const { value, error } = useAnswer(() => source.curves(), [summary.trained, summary.stages.length]);
  if (!value) return html`<main class="detail curves">${error ? html`<p class="flag" role="alert">${error.message}</p>` : '…'}</main>`;
  const { rl, eval: stages, every, problem } = value;
  const charts = [
    { title: 'Success', points: stepPoints(rl, 2, percent), limits: [0, 1], text: percent, xLabel: 'step',
      note: 'of the trajectories that a step trained on' },
    { title: 'Reward', points: stepPoints(rl, 1, rounded), text: rounded, xLabel: 'step', note: 'their mean return' },
    { title: 'Evaluations', points: stagePoints(stages), limits: [0, 1], text: percent, xLabel: 'evaluation',
      note: 'success, in their order', line: false },
  ].filter(({ points }) => points.length);
  return html`<main class="detail curves" tabindex="-1" aria-label="Curves">
    ${problem && html`<p class="flag" role="alert">No curves: ${printable(problem)}</p>`}
    ${!problem && !charts.length && html`<p class="soft">No step and no evaluation is recorded yet.</p>`}
    ${charts.length > 0 && html`<p class="soft">A point leads to its trajectories.${
      every > 1 ? ` Of the steps, one in ${every} is shown.` : ''}</p>`}
    ${charts.map((chart) => html`<${Chart} key=${chart.title} ...${chart} />`)}</main>`;
}
