// One round: what was proposed, how it was checked and measured, and why it was decided so.

const PHASE_WORDS = { proposal: 'no proposal', checked: 'static checks', smoke: 'smoke', gate: 'gate' };
const verdictOf = ({ decision, phase }) => (decision === 'reject' ? `rejected: ${PHASE_WORDS[phase]}` : WORDS[decision]);
const KINDS = [['+++', 'file'], ['---', 'file'], ['@@', 'hunk'], ['+', 'add'], ['-', 'del']];

function Diff({ text, label }) {
  if (!text) return null;
  return html`<pre class="diff" tabindex="0" aria-label=${label}>${text.replace(/\n$/, '').split('\n').map((line) => html`<span
    class=${(KINDS.find(([mark]) => line.startsWith(mark)) ?? [])[1]}>${line || ' '}</span>`)}</pre>`;
}

const Text = ({ title, text, open }) => text && html`<details open=${open}><summary>${title}</summary><pre>${text}</pre></details>`;

function Looks({ looks }) {
  const fixed = (v) => (v == null ? '–' : v.toFixed(2));
  return html`<h3>Looks of the gate</h3><div class="wide"><table class="looks"><thead><tr><th>pairs</th><th>effect</th><th>95 % interval</th>
    <th>evidence</th><th>needed</th><th>better</th><th>worse</th><th>no score</th></tr></thead><tbody>
    ${looks.map(([pairs, effect, low, high, evidence, needed, wins, losses, missing]) => html`<tr><td>${pairs}</td>
      <td class=${effect > 0 ? 'up' : effect < 0 ? 'down' : ''}>${signedPoints(effect)}</td><td>${range(low, high) || '–'}</td>
      <td>${fixed(evidence)}</td><td>${fixed(needed)}</td><td>${wins}</td><td>${losses}</td><td>${missing}</td></tr>`)}</tbody></table></div>`;
}

function Costs({ costs }) {
  return html`<h3>Cost</h3><div class="wide"><table class="costs"><thead><tr><th>phase</th><th>tokens</th><th>episodes</th><th>time</th></tr></thead><tbody>
    ${costs.map(([name, tokens, seconds, episodes]) => html`<tr><th scope="row">${name}</th><td>${tokens.toLocaleString('en')}</td>
      <td>${episodes.toLocaleString('en')}</td><td>${duration(seconds)}</td></tr>`)}</tbody></table></div>`;
}

function Failures({ failures }) {
  return html`<h3>Failing trajectories that the proposer is shown</h3>${failures.map(([score, end, text], i) => html`<details key=${i}>
    <summary>score ${score ?? '–'}, ended by ${end}</summary><pre>${text}</pre></details>`)}`;
}

function Start({ found }) {
  return html`<${Text} title="Settings" text=${found.settings} />
    ${found.files.map(([name, text]) => html`<${Text} title=${name} text=${text} open=${found.files.length < 3} />`)}
    ${found.failures.length > 0 && html`<${Failures} failures=${found.failures} />`}<${Costs} costs=${found.costs} />`;
}

function Round({ found, row }) {
  const checks = !found.checked ? 'did not run' : found.problems.length ? 'not passed' : 'passed';
  return html`${found.reason && html`<p class="reason"><b>${PHASE_WORDS[row.phase] ?? 'Decision'}:</b> ${found.reason}</p>`}
    ${found.error && html`<p class="flag">No proposal: ${found.error}</p>`}
    <${Diff} text=${found.diff} label="What the round changes in its parent" />
    ${!found.diff && found.changes.length > 0 && html`<div class="wide"><table class="changes"><thead><tr><th>field</th><th>proposed value</th></tr></thead><tbody>
      ${found.changes.map(([name, value]) => html`<tr><th scope="row">${name}</th><td><pre>${value}</pre></td></tr>`)}</tbody></table></div>`}
    <p class="checks"><b>Static checks:</b> ${checks}${found.readded > 0 ? `; ${percent(found.readded)} of the added lines were deleted before` : ''}.
      ${found.smoke && html` <b>Smoke:</b> ${found.smoke.map(([end, n]) => `${n} × ${end}`).join(', ')}.`}</p>
    ${found.problems.length > 0 && html`<ul class="problems">${found.problems.map((problem) => html`<li>${problem}</li>`)}</ul>`}
    ${found.looks.length > 0 && html`<${Looks} looks=${found.looks} />`}
    <${Text} title="Self-criticism of the proposer" text=${found.criticism} open /><${Text} title="Memory of the proposer" text=${found.memory} />
    ${found.failures.length > 0 && html`<${Failures} failures=${found.failures} />`}<${Costs} costs=${found.costs} />`;
}

function Selected({ row, ask, summary }) {
  const { value, error } = useAnswer(ask, [row.round, summary.identity, summary.second.length]);
  const found = value?.round === row.round ? value : null;
  const second = summary.second.find(([round]) => round === row.round);
  const facts = [
    ['Development', interval(row)], ['Second split', second && interval(scoreOf(second))],
    [`Against ${row.incumbent ? `round ${row.incumbent}` : 'the start'}`, row.effect != null && `${signedPoints(row.effect)} ${range(row.effect_low, row.effect_high)}`],
    ['Evidence', row.evidence != null && `${row.evidence.toFixed(2)} of ${row.needed?.toFixed(2) ?? '–'}`],
    ['Parent', row.parent != null && (row.parent ? `round ${row.parent}` : 'the start')], ['Source', row.source],
  ].filter(([, text]) => text);
  return html`<section id="round" tabindex="-1" aria-label="Selected round">
    <h2>${row.round ? `Round ${row.round}` : 'The start'} ${row.round > 0 && html`<span class=${`badge ${row.decision}`}>${verdictOf(row)}</span>`}</h2>
    ${row.note && html`<p class="note-text">${found?.note || row.note}</p>`}
    <dl class="facts">${facts.map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    ${error && html`<p class="flag" role="alert">${error.message}</p>`}
    ${found && (row.round ? html`<${Round} key=${row.round} ...${{ found, row }} />` : html`<${Start} found=${found} />`)}</section>`;
}
