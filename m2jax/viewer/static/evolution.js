// The evolution page, top to bottom: state, scores, lineage, selected round, all rounds.

const START = { round: '', shown: '', text: '', phase: '' };
const PHASES = [''], SELECTED = ['round'], POLL_MS = 3000, SHOWN = 100; // rows of the table at once
const FILTERS = [['', 'all'], ['keep', 'kept'], ['revert', 'reverted'], ['reject', 'rejected'],
  ['proposal', 'no proposal'], ['checked', 'static checks'], ['smoke', 'smoke']];

function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const counted = (n) => Math.round(n).toLocaleString('en');

// Rows and summary: a server's are read on, a file has them all.
class Record {
  rows = [];
  identity = '';

  async read() {
    if (!source.live) {
      this.index ??= await unpack('data-index');
      return this.#take(this.index);
    }
    for (;;) {
      const found = this.#take(await source.ask('evolution', { after: this.rows.length, identity: this.identity }));
      if (found.summary.reading >= 1) return found;
    }
  }

  #take({ rows, first, columns, ...summary }) {
    const named = rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]])));
    this.identity = summary.identity;
    if (named.length || first !== this.rows.length) this.rows = [...this.rows.slice(0, first), ...named];
    return { rows: this.rows, summary };
  }

  async round(number) {
    if (source.live) return source.get(`round/${number}`);
    const found = (await unpack(`data-rounds-${Math.floor(number / this.index.per_chunk)}`))[number];
    if (!found) throw new Error('This file leaves the round\'s texts out, to stay small: the page of a server has them.');
    return found;
  }

  async final() { return source.live ? source.get('final') : this.index.final; }
}

const record = new Record();

function State({ rows, summary }) {
  const { rounds, limits, counts, spent, stopped } = summary;
  const [incumbent, ...own] = summary.incumbent, rejected = (counts.proposal ?? 0) + (counts.checked ?? 0) + (counts.smoke ?? 0);
  const of = (value, limit, text) => `${text(value)}${limit ? ` of ${text(limit)}` : ''}`;
  const facts = [['Time', of(spent.seconds, limits.seconds, duration)], ['Tokens', of(spent.tokens, limits.tokens, counted)],
    ['Episodes', counted(spent.episodes)],
    ['Rounds in a row without an evaluation', of(summary.failures, limits.failures, counted)],
    ['Rounds since a keep', of(summary.since_keep, limits.patience, counted)], ['Proposer', summary.proposer], ['Stopped', stopped]];
  return html`<section class="state" aria-label="State"><p class="lead">${rounds.toLocaleString('en')} of ${limits.rounds.toLocaleString('en')} rounds are done:
    ${' '}<b>${counts.keep ?? 0} kept</b>, ${counts.revert ?? 0} reverted, ${rejected} rejected before their evaluation;
    ${' '}${incumbent ? `the incumbent is round ${incumbent}` : 'the start is still the incumbent'}, which scores <b>${interval(scoreOf([0, ...own]))}</b>
    ${incumbent ? html` on development tasks, the start ${interval(scoreOf(summary.start))}` : ' on development tasks'}.</p>
    <dl class="facts">${facts.filter(([, text]) => text).map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    ${summary.current && source.live && html`<p class="soft">${summary.current[0] ? `Round ${summary.current[0]}` : 'The start'}: ${summary.current[1]}</p>`}
    ${summary.left_out > 0 && html`<p class="flag" role="alert">${counted(summary.left_out)} lines of the record cannot be used, and are left out: ${summary.problems.join('; ')}</p>`}
    ${!rows.length && html`<p class="soft">No round is recorded yet.</p>`}</section>`;
}

const matchesShown = (row, shown) => !shown || row.decision === shown || (row.decision === 'reject' && row.phase === shown);

function Rounds({ rows, place, go, select, selected }) {
  const [from, setFrom] = useState(0), wanted = place.text.toLowerCase();
  const rounds = useMemo(() => rows.filter((row) => row.round), [rows]);
  const found = useMemo(() => rounds.filter((row) => matchesShown(row, place.shown)
    && (!wanted || `${row.note}\n${row.reason}\n${row.source}`.toLowerCase().includes(wanted))).reverse(), [rounds, place.shown, wanted]);
  useEffect(() => setFrom(0), [place.shown, wanted]);
  const page = found.slice(from, from + SHOWN);
  return html`<section aria-labelledby="rounds-title"><h2 id="rounds-title">All rounds</h2>
    <div class="tools" role="search"><span class="choices" role="group" aria-label="Shown rounds">${FILTERS.map(([name, label]) => html`<button key=${name} aria-pressed=${place.shown === name}
      onClick=${() => go({ shown: name })}>${label} <span class="soft">${counted(rounds.filter((row) => matchesShown(row, name)).length)}</span></button>`)}</span>
      <input type="search" aria-label="Search notes and reasons" placeholder="Search notes, reasons" maxlength="200" value=${place.text} onInput=${(e) => go({ text: e.target.value })} /></div>
    <div class="wide all" tabindex="0" role="region" aria-label="Rounds"><table class="rounds"><thead><tr><th>round</th><th>decision</th><th>score</th><th>effect</th><th>evidence</th><th>parent</th><th>note and reason</th></tr></thead>
    <tbody>${page.map((row) => html`<tr key=${row.round} class=${row.round === selected ? 'on' : ''} onClick=${() => select(row.round)}>
      <td><button class="link" aria-label=${`round ${row.round}`} aria-pressed=${row.round === selected}>${row.round}</button></td>
      <td><i class=${`dot ${row.decision || 'open'}`} /> ${verdictOf(row)}</td><td>${row.mean == null ? '' : `${percent(row.mean)} `}${row.mean != null && html`<span class="soft">/${row.n}</span>`}</td>
      <td class=${row.effect > 0 ? 'up' : row.effect < 0 ? 'down' : ''}>${row.effect != null && html`${signedPoints(row.effect)} <span class="soft">${range(row.effect_low, row.effect_high)}</span>`}</td>
      <td>${row.evidence != null && `${row.evidence.toFixed(1)} / ${row.needed?.toFixed(1) ?? '–'}`}</td><td>${row.parent ?? ''}</td>
      <td class="words">${row.note}${row.note && row.reason && html`<br />`}<span class="soft">${row.reason}</span></td></tr>`)}</tbody></table></div>
    <p class="pages" role="status">${found.length ? `${counted(from + 1)}–${counted(from + page.length)} of ${counted(found.length)} rounds` : 'No round matches.'}
      ${from > 0 && html` <button onClick=${() => setFrom(from - SHOWN)}>Newer</button>`}
      ${from + SHOWN < found.length && html` <button onClick=${() => setFrom(from + SHOWN)}>Older</button>`}</p></section>`;
}

function Final({ rows, summary, select }) {
  const { value, error } = useAnswer(() => record.final(), [summary.identity, summary.keeps.length]);
  if (!value) return error ? html`<p class="flag" role="alert">${error.message}</p>` : null;
  const second = new Map(summary.second.map((row) => [row[0], scoreOf(row)]));
  return html`<section aria-labelledby="final-title"><h2 id="final-title">From the start to the incumbent</h2>
    ${!value.keeps.length ? html`<p class="soft">No change was kept.</p>` : html`<div class="wide"><table class="keeps"><thead><tr><th>round</th><th>changed</th><th>added</th>
      <th>score</th><th>second split</th><th>note</th></tr></thead><tbody>${value.keeps.filter(([round]) => rows[round]).map(([round, fields]) => { const row = rows[round]; return html`<tr key=${round}>
      <td><button class="link" onClick=${() => select(round)}>${round}</button></td><td class="words">${fields.join(', ')}</td>
      <td class=${row.effect > 0 ? 'up' : 'down'}>${signedPoints(row.effect)} <span class="soft">${range(row.effect_low, row.effect_high)}</span></td>
      <td>${row.mean == null ? '–' : percent(row.mean)}</td><td>${second.get(round)?.mean == null ? '–' : percent(second.get(round).mean)}</td><td class="words">${row.note}</td></tr>`; })}</tbody></table></div>
      <p class="soft">Added is the difference from the incumbent before it, on the pairs that decided; a keep's own pairs overstate it.</p>
      <${Diff} text=${value.diff} label="The start and the incumbent" />`}</section>`;
}

function App() {
  const [found, setFound] = useState(null), [problem, setProblem] = useState('');
  const [place, go] = usePlace(() => latest.current());
  const reading = useRef(false), seen = useRef('');
  const poll = async () => {
    if (reading.current) return;
    reading.current = true;
    try {
      const next = await record.read(), text = JSON.stringify(next.summary);
      if (text !== seen.current) setFound(next);
      seen.current = text;
      setProblem('');
    } catch (error) {
      setProblem(error.status || !source.live ? error.message : 'The server does not answer: it may have ended.');
    } finally {
      reading.current = false;
    }
  };
  const latest = useRef(poll);
  latest.current = poll;
  useEffect(() => {
    latest.current();
    if (!source.live) return undefined;
    const timer = setInterval(() => !document.hidden && latest.current(), POLL_MS);
    return () => clearInterval(timer);
  }, []);
  useEffect(() => { if (found) document.title = `${found.summary.title} · evolution`; }, [found?.summary.title]);
  if (!found) return html`<header class="bar"><h1>m2jax</h1></header>${problem && (source.live
    ? html`<${KeyForm} problem=${problem} retry=${poll} />` : html`<p class="flag pad" role="alert">${problem}</p>`)}`;
  const { rows, summary } = found, asked = Number(place.round || summary.keeps.at(-1) || 0);
  const selected = rows[asked] ? asked : 0, select = (round) => go({ round: String(round) });
  return html`<header class="bar"><h1>${summary.title}</h1><span class="soft">scaffold evolution</span>
    <${Status} ...${{ problem, status: summary.status }} /></header><main class="evolution">
    <${State} ...${{ rows, summary }} />${rows.length > 0 && html`
    <${Scores} ...${{ rows, summary, selected, select }} /><${Lineage} ...${{ rows, summary, selected, select }} />
    <${Selected} row=${rows[selected]} ask=${() => record.round(selected)} summary=${summary} />
    <${Rounds} ...${{ rows, place, go, select, selected }} /><${Final} ...${{ rows, summary, select }} />`}</main>`;
}

const root = document.getElementById('app');
root.replaceChildren();
render(html`<${App} />`, root);
