// Trajectories of one task side by side, a row a turn, and where they become different.

const SAMPLED = new Set(['thinking', 'text', 'call', 'answer']);
const MEMBERS = 8; // columns at first

// Steps by turn; the task is the same for all.
function turnsOf({ steps }) {
  const turns = [];
  for (const step of steps ?? []) {
    if (step[2] || !['system', 'task'].includes(step[0])) (turns[step[2]] ??= []).push(step);
  }
  return turns;
}

const said = (turn) => JSON.stringify((turn ?? []).filter(([kind]) => SAMPLED.has(kind)));

// The first turn in which the model wrote something else; -1: none.
function firstDifference(turns, reference) {
  const n = Math.max(turns.length, reference.length);
  return [...Array(n).keys()].findIndex((i) => said(turns[i]) !== said(reference[i]));
}

const answerOf = (t) => t.answer || (t.steps ?? []).findLast(([kind]) => kind === 'answer')?.[1];

function Member({ t, name, turns, differs, first, flags, onOpen }) {
  const title = html`${name ?? `rank ${t.rank}`}`;
  return html`<div class="member"><p>${onOpen ? html`<button class="link" onClick=${() => onOpen(t)}>${title}</button>`
      : html`<b>${title}</b>`} <span class=${`badge ${verdict(t)}`}>${Number(t.success).toFixed(2)}</span></p>
    <p class="soft">${t.total == null ? '' : `return ${t.total.toFixed(3)}, `}${t.end_reason}, ${t.wall_s.toFixed(1)} s,
      ${' '}${t.steps ? count(turns.length, 'turn') : 'messages pruned'}${t.superseded ? ', superseded' : ''}</p>
    ${flags.length > 0 && html`<p class="flag">⚑ ${flagsText(flags)}</p>`}
    <p class="soft">${!t.steps || first ? '' : differs < 0 ? 'as the first column' : `differs from turn ${differs}`}</p>
    <pre>${printable(answerOf(t) || '–')}</pre></div>`;
}

// `members`: [{ t, name }]; what the others are compared with comes first.
function Members({ members, flagged, onOpen }) {
  const [all, setAll] = useState(false);
  const shown = (all ? members : members.slice(0, MEMBERS)).map(({ t, name }) => ({ t, name, turns: turnsOf(t) }));
  if (!shown.length) return html`<p class="soft pad">No trajectory yet.</p>`;
  const reference = shown.find(({ t }) => t.steps);
  for (const m of shown) m.differs = m.t.steps ? firstDifference(m.turns, reference.turns) : -1;
  const turns = Math.max(...shown.map((m) => m.turns.length));
  return html`${members.length > shown.length && html`<p class="soft pad">The first ${MEMBERS} of ${members.length}.
      ${' '}<button class="link" onClick=${() => setAll(true)}>Show all</button></p>`}
    <div class="wide" tabindex="0" role="region" aria-label="Side by side">
    <div class="members" style=${{ gridTemplateColumns: `repeat(${shown.length}, minmax(12.5rem, 1fr))` }}>
      ${shown.map((m) => html`<${Member} ...${m} first=${m === reference} flags=${flagsOf(flagged ?? {}, m.t.session)} onOpen=${onOpen} />`)}
      ${[...Array(turns).keys()].map((turn) => shown.map((m) => html`<div class=${`cell${turn === m.differs ? ' differs' : ''}`}>
        ${m.turns[turn] && html`<p class="soft">turn ${turn}${turn === m.differs ? html` <b>first difference</b>` : ''}</p>
          ${m.turns[turn].map((step) => html`<${Message} step=${step} />`)}`}</div>`))}
    </div></div>`;
}
