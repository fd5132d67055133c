// A trajectory as people read it: thinking, calls, observations, rewards apart.

const KINDS = {
  system: 'system', task: 'task', thinking: 'thinking', text: 'text', call: 'call',
  observation: 'observation', answer: 'answer',
};
const LONG_CHARS = 4000;

function Message({ step }) {
  const [kind, text, , tool] = step, [open, setOpen] = useState(kind !== 'system');
  const [whole, setWhole] = useState(false);
  const shown = whole ? text : text.slice(0, LONG_CHARS);
  return html`<div class=${`step ${kind}`}>
    <button class="who" aria-expanded=${open} onClick=${() => setOpen(!open)}>
      ${KINDS[kind] ?? kind}${tool && html`<span class="tool">${printable(tool)}</span>`}</button>
    ${open ? html`<pre>${printable(shown)}${text.length > shown.length && html`
      <button class="more" onClick=${() => setWhole(true)}>show all
        ${' '}${text.length.toLocaleString()} characters</button>`}</pre>`
      : html`<pre class="closed">${printable(text.slice(0, 200))}</pre>`}
  </div>`;
}

// The completions that the agent acted on, by turn of its messages.
function actedOn(bundle, session) {
  const own = bundle.completions.filter((c) => c.session === session && !c.superseded);
  const judged = own.filter((c) => c.advantage != null);
  return judged.length ? judged : own;
}

function TurnHead({ c, turn }) {
  const versions = [...new Set([c.first_version, c.last_version])].filter((v) => v != null);
  return html`<p class="turn"><b>turn ${turn}</b>
    ${c.advantage != null && html`<span>advantage
      ${' '}<b class=${c.advantage < 0 ? 'down' : 'up'}>${signedText(c.advantage)}</b></span>`}
    ${versions.length > 0 && html`<span>weights ${versions.join('–')}</span>`}
    <span>${c.response_tokens} tokens after ${c.prompt_tokens}</span>
    <span>${(c.ended_s - c.started_s).toFixed(2)} s</span>
    ${c.status !== 'ok' && html`<span class="flag">${c.status}</span>`}
    ${!c.parent && c.turn > 0 && html`<span class="flag" title="the prompt does not extend a
      recorded completion">fork: ${c.fork_reason ?? 'new conversation'}</span>`}
    ${c.overrides && html`<span class="flag">overridden: ${c.overrides}</span>`}</p>`;
}

function Rewards({ trajectory: t }) {
  const parts = [['outcome', t.success], ['perf', t.perf], ['process', t.process],
    ['speed', t.speed], ['return', t.total]].filter(([, v]) => v != null);
  return html`<div class="step reward"><span class="who">reward</span>
    <dl class="facts">${parts.map(([name, v]) =>
      html`<div><dt>${name}</dt><dd>${Number(v).toFixed(3)}</dd></div>`)}
      <div><dt>end</dt><dd>${t.end_reason}</dd></div></dl></div>`;
}

function Transcript({ bundle, session }) {
  const t = bundle.trajectories.find((x) => x.session === session);
  const turns = actedOn(bundle, session);
  if (!t.steps) {
    return html`<p class="soft pad">Its messages were pruned: the pool keeps those of a sample
      of trajectories. Its numbers are under Timeline.</p><${Rewards} trajectory=${t} />`;
  }
  const parts = [];
  let turn = -1;
  for (const step of t.steps) {
    const byModel = ['thinking', 'text', 'call', 'answer'].includes(step[0]);
    if (byModel && step[2] !== turn) {
      turn = step[2];
      if (turns[turn]) parts.push(html`<${TurnHead} c=${turns[turn]} turn=${turn} />`);
    }
    parts.push(html`<${Message} step=${step} />`);
  }
  return html`<div class="transcript">${t.error && html`<p class="flag">${printable(t.error)}</p>`}
    ${parts}<${Rewards} trajectory=${t} /></div>`;
}

// The flags of a trajectory; a click or a key sets one, and removes it.
function Flags({ session, flagged, onFlag }) {
  const own = flagsOf(flagged, session), [error, setError] = useState('');
  if (!source.live) return own.length > 0 && html`<p class="flag">⚑ ${flagsText(own)}</p>`;
  const toggle = (name) => source.annotate(session, { flag: name, on: !own.includes(name) })
    .then(onFlag).then(() => setError(''), (problem) => setError(problem.message));
  return html`<p class="flags" role="group" aria-label="Flags">${Object.entries(FLAGS).map(([name, label]) => html`<button
    id=${`flag-${name}`} aria-pressed=${own.includes(name)} onClick=${() => toggle(name)}>⚑ ${label} <kbd>${name[0]}</kbd></button>`)}
    ${error && html`<span class="flag" role="alert">${error}</span>`}</p>`;
}

// Notes of people: appended, never changed.
function Notes({ session, notes, onNote }) {
  const [text, setText] = useState(''), [error, setError] = useState('');
  const shown = notes.filter((n) => n.kind === 'note');
  const send = async (event) => {
    event.preventDefault();
    try {
      onNote(await source.annotate(session, { text }));
      setText('');
      setError('');
    } catch (problem) {
      setError(problem.message);
    }
  };
  if (!source.live && !shown.length) return null;
  return html`<section class="notes"><h3>Notes</h3>
    ${shown.map((n) => html`<article><time>${new Date(n.time_s * 1000).toLocaleString()}</time>
      <p>${printable(n.text)}</p></article>`)}
    ${source.live && html`<form onSubmit=${send}>
      <textarea id="note" rows="2" aria-label="New note" placeholder="Add a note (n)" value=${text}
        onInput=${(e) => setText(e.target.value)} />
      <button disabled=${!text.trim()}>Add</button>
      ${error && html`<p class="flag" role="alert">${error}</p>`}</form>`}</section>`;
}
