// Development score by round: a point and its 95 % interval, the incumbent as a line.

const PLOT = { height: 230, left: 50, right: 14, top: 12, bottom: 26 };
const WORDS = { keep: 'kept', revert: 'reverted', reject: 'rejected', start: 'the start', '': 'no decision' };

const interval = ({ mean, low, high, n }) => (mean == null ? '–'
  : `${percent(mean)} [${(100 * low).toFixed(1)}, ${(100 * high).toFixed(1)}], n = ${n.toLocaleString('en')}`);
const scoreOf = ([, mean, n, low, high]) => ({ mean, n, low, high });

// At most `most` rounds beside keeps: the first and then every n-th.
function thinned(rows, most) {
  const every = Math.max(1, Math.ceil(rows.length / most));
  return [rows.filter((row, i) => row.decision === 'keep' || row.decision === 'start' || i % every === 0), every];
}

// A mark of a decision at a place; its class has the colour.
function Mark({ row, x, y, r }) {
  if (row.decision === 'reject') return html`<path class="reject" d=${`M${x - r},${y - r}l${2 * r},${2 * r}m0,${-2 * r}l${-2 * r},${2 * r}`} />`;
  return html`<circle class=${row.decision || 'open'} cx=${x} cy=${y} r=${row.decision === 'keep' ? r + 1.5 : r} />`;
}

function Scores({ rows, summary, selected, select }) {
  const [ref, width] = useWidth();
  const evaluated = useMemo(() => rows.filter((row) => row.mean != null), [rows]);
  const [points, every] = useMemo(() => thinned(evaluated, Math.max(width / 4, 20)), [evaluated, width]);
  const second = summary.second.map((row) => ({ round: row[0], ...scoreOf(row) })).filter((row) => row.mean != null);
  const all = [...points, ...second];
  const [least, most] = [Math.min(1, ...all.map((p) => p.low)), Math.max(0, ...all.map((p) => p.high))];
  const unit = [0.02, 0.05, 0.1].find((u) => most - least <= 5 * u) ?? 0.2;
  const [low, high] = [Math.floor(least / unit + 1e-9) * unit, Math.ceil(most / unit - 1e-9) * unit];
  const ticks = Array.from({ length: Math.round((high - low) / unit) + 1 }, (_, i) => low + i * unit);
  const last = Math.max(rows.length - 1, 1);
  const x = (v) => PLOT.left + (v / last) * (width - PLOT.left - PLOT.right);
  const y = (v) => PLOT.height - PLOT.bottom - ((v - low) / (high - low || 1)) * (PLOT.height - PLOT.top - PLOT.bottom);
  const line = rows.filter((row) => row.incumbent_mean != null)
    .map((row, i) => `${i ? `H${x(row.round)}V` : `M${x(row.round)},`}${y(row.incumbent_mean)}`).join('');
  const whisker = (p, at) => html`<line class="whisker" x1=${at} x2=${at} y1=${y(p.low)} y2=${y(p.high)} />`;
  const nearest = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const at = ((event.clientX - box.left - PLOT.left) / (width - PLOT.left - PLOT.right)) * last;
    select(evaluated.reduce((a, b) => (Math.abs(b.round - at) < Math.abs(a.round - at) ? b : a)).round);
  };
  const now = evaluated.find((row) => row.round === selected);
  return html`<section aria-labelledby="scores-title"><h2 id="scores-title">Score by round</h2>
    <p class="soft">Mean of a candidate's development attempts, with Wilson's 95 % interval. The line is the incumbent at the
      ${' '}time, over everything measured of it.${every > 1 ? ` Keeps are all shown, of other rounds one in ${every}.` : ''}</p>
    <div class="plot" ref=${ref}>${width > 0 && evaluated.length > 0 && html`<svg width=${width} height=${PLOT.height} onClick=${nearest}
      role="img" aria-label=${`Development score of ${evaluated.length} rounds; the table below has the values`}>
      ${ticks.map((v) => html`<line class="grid" x1=${PLOT.left} x2=${width - PLOT.right}
        y1=${y(v)} y2=${y(v)} /><text x=${PLOT.left - 6} y=${y(v) + 4} text-anchor="end">${percent(v)}</text>`)}
      <text x=${PLOT.left} y=${PLOT.height - 6}>start</text>
      <text x=${width - PLOT.right} y=${PLOT.height - 6} text-anchor="end">round ${rows.length - 1}</text>
      ${now && html`<line class="now" x1=${x(now.round)} x2=${x(now.round)} y1=${PLOT.top} y2=${PLOT.height - PLOT.bottom} />`}
      <path class="incumbent" d=${line} />
      ${points.map((p) => html`<g class=${`score ${p.decision || 'open'}`} key=${p.round}>${whisker(p, x(p.round))}
        <${Mark} row=${p} x=${x(p.round)} y=${y(p.mean)} r=${points.length > 120 ? 2 : 3.5} />
        <title>round ${p.round}, ${WORDS[p.decision]}: ${interval(p)}</title></g>`)}
      ${second.map((p) => { const at = Math.min(x(p.round) + 6, width - 6); return html`<g class="second" key=${`s${p.round}`}>
        ${whisker(p, at)}<rect x=${at - 3.5} y=${y(p.mean) - 3.5} width="7" height="7" transform=${`rotate(45 ${at} ${y(p.mean)})`} />
        <title>second split, round ${p.round}: ${interval(p)}</title></g>`; })}</svg>`}</div>
    <p class="legend"><span><i class="dot keep" />kept</span><span><i class="dot revert" />reverted</span>
      ${second.length > 0 && html`<span><i class="diamond" />second split, of keeps: never fed back</span>`}
      <span><i class="rule" />incumbent</span></p>
    ${summary.sealed && html`<${Sealed} sealed=${summary.sealed} />`}</section>`;
}

// The third split, which is opened once.
function Sealed({ sealed: { means, effect, low, high } }) {
  return html`<div class="sealed"><h3>Third split, opened once</h3><table><tbody>
    ${means.map((row) => { const p = scoreOf(row); return html`<tr><th scope="row">${row[0]}</th>
      <td>${interval(p)}</td><td class="span" aria-hidden="true">${p.mean != null && html`<span>
        <i style=${{ left: `${100 * p.low}%`, width: `${100 * (p.high - p.low)}%` }} /><b style=${{ left: `${100 * p.mean}%` }} /></span>`}</td></tr>`; })}
    </tbody></table>${effect != null && html`<p>Incumbent − start: <b>${signedPoints(effect)}</b> ${range(low, high)}</p>`}</div>`;
}

const signedPoints = (v) => (v == null ? '–' : `${v < 0 ? '−' : '+'}${Math.abs(100 * v).toFixed(1)} pp`);
const range = (low, high) => (low == null || high == null ? '' : `[${signedPoints(low).slice(0, -3)}, ${signedPoints(high).slice(0, -3)}]`);
