// State, keyboard and layout.

const POLL_MS = 3000;
const START = { group: '', session: '', tab: '', phase: 'rl', outcome: '', family: '', end_reason: '',
  stage: '', step: '', flag: '', least_s: '', most_s: '', least_reward: '', most_reward: '', text: '',
  stage_b: '', task: '' }; // the last two: see compare.js
const PHASES = ['rl', 'eval', 'curves', 'compare'];
const SELECTED = ['group', 'session'];
const TABS = {
  group: [['tree', 'Prefix tree'], ['timeline', 'Timeline'], ['members', 'Side by side']],
  trajectory: [['transcript', 'Transcript'], ['tokens', 'Tokens'], ['tree', 'Branches'],
    ['timeline', 'Timeline']],
};
const KEYS = [
  ['j k ↓ ↑', 'next, previous'], ['→ ←', 'open, close a group'], ['Enter', 'open a group, read on the right'],
  ['1 2 3 4', 'views'], ['c', 'next colour'], ['/', 'search'], ['n', 'new note'],
  ['h i l', 'flag: hacked, infrastructure, look at this'], ['t e v', 'training, evaluations, curves'], ['?', 'these keys'], ['Esc', 'back to the list, clear the search'],
];

const named = (names, values) => Object.fromEntries(names.map((name, i) => [name, values[i]]));
const ITEM = ['index', 'task', 'group_size', 'attempt', 'state', 'reason', 'step'];

// The pages of the list that were read, and how to read on.
function usePages(condition, summary) {
  const [pages, setPages] = useState({ items: [], rows: [], before: null, more: true });
  const state = useRef({ running: false, serial: 0 });
  const page = (before) => source.page(rowsOf(condition, summary), before);
  const read = async (before, keep) => {
    const serial = state.current.serial;
    state.current.running = true;
    try {
      const found = await page(before);
      if (serial !== state.current.serial) return;
      const items = found.items.map((item) => named(ITEM, item));
      const rows = found.rows.map((row) => named(summary.listed, row));
      setPages((old) => ({
        items: [...(keep ? old.items : []), ...items], rows: [...(keep ? old.rows : []), ...rows],
        before: found.before, more: found.before !== null, condition,
      }));
    } catch (error) {
      if (serial === state.current.serial) setPages((old) => ({ ...old, more: false, error }));
    } finally {
      if (serial === state.current.serial) state.current.running = false;
    }
  };
  useEffect(() => {
    state.current = { running: false, serial: state.current.serial + 1 };
    setPages({ items: [], rows: [], before: null, more: true });
    if (summary) read(null, false);
  }, [condition, Boolean(summary)]);
  // New trajectories: the first page again, joined with those that were read.
  const refresh = async () => {
    if (state.current.running || condition.text) return;
    const serial = state.current.serial, found = await page(null);
    if (serial !== state.current.serial) return;
    const items = found.items.map((item) => named(ITEM, item));
    const rows = found.rows.map((row) => named(summary.listed, row));
    setPages((old) => ({ ...old, items: joined(items, old.items, 'index'),
      rows: joined(rows, old.rows, 'session') }));
  };
  const onEnd = () => {
    if (pages.more && pages.before !== null && !state.current.running) read(pages.before, true);
  };
  return [pages, onEnd, refresh];
}

function joined(fresh, old, key) {
  const known = new Set(fresh.map((x) => x[key]));
  return [...fresh, ...old.filter((x) => !known.has(x[key]))];
}

const versionOf = (entry) => (entry?.kind === 'group' ? `${entry.item.state}${entry.rows.length}` : entry?.row.total);

// The bundle of what is selected, in the list (`listed`) or not: again when that changes.
function useBundle({ group, session }, key, listed, summary) {
  const [found, setFound] = useState({});
  const version = versionOf(listed);
  useEffect(() => {
    if (!summary || !key || (found.key === key && (!listed || found.version === version))) return undefined;
    let current = true;
    const load = async () => {
      const data = await (group ? source.group(group) : source.session(session));
      const notes = group ? [] : await source.annotations(session);
      const bundle = new Bundle(data, summary.logprob_unit, notes), entry = entryOf(bundle, group);
      if (current) setFound({ key, bundle, notes, entry, version: versionOf(entry) });
    };
    const timer = setTimeout(() => load().catch((error) => current && setFound({ key, error })), SETTLED_MS);
    return () => { current = false; clearTimeout(timer); };
  }, [key, version, Boolean(listed), Boolean(summary)]);
  const onNote = (note) => setFound((old) => ({ ...old, notes: [...(old.notes ?? []), note] }));
  return [found.key === key ? found : {}, onNote];
}

function entryOf(bundle, group) {
  const { item, trajectories: rows } = bundle;
  return group ? { kind: 'group', item, rows, level: 1 } : { kind: 'trajectory', row: rows[0], level: 1 };
}

// What it asks; the spec of the task once that is pruned.
function titleOfEntry({ item, rows, row }, bundle) {
  const [{ instruction, task } = {}] = bundle?.trajectories ?? [];
  return printable(instruction || (row ?? rows[0])?.instruction || item?.task || task || row?.family);
}

function Detail({ entry, found: { bundle, notes = [], error }, summary, tab, setTab, mode, setMode,
  openTrajectory, onNote, onFlag, onBack }) {
  const back = html`<button class="back" onClick=${onBack}>← List</button>`;
  if (!entry) return html`<main id="detail" class="detail empty" tabindex="-1">${back}
    ${error ? html`<p class="flag" role="alert">${error.message}</p>`
      : html`<p class="soft">Choose a trajectory on the left: j and k move, ? lists all keys.</p>`}</main>`;
  const group = entry.kind === 'group', tabs = TABS[entry.kind];
  const shown = tabs.some(([name]) => name === tab) ? tab : tabs[0][0];
  const session = entry.row?.session;
  const views = {
    transcript: () => html`<${Transcript} ...${{ bundle, session }} />`,
    tokens: () => html`<${Tokens} ...${{ bundle, session, mode, setMode }} />`,
    tree: () => html`<${PrefixTree} ...${{ bundle, mode, setMode, onOpen: openTrajectory }} />`,
    members: () => html`<${Members} ...${{ members: bundle.trajectories.map((t) => ({ t })),
      flagged: summary.flagged, onOpen: openTrajectory }} />`,
    timeline: () => html`<${Timeline} ...${{ bundle, onOpen: openTrajectory,
      sessions: group ? bundle.trajectories.map((t) => t.session) : [session] }} />`,
  };
  return html`<main class="detail" id="detail" tabindex="-1" aria-label="Selected">
    ${back}<${Head} ...${{ entry, bundle, summary }} />
    ${!group && html`<${Flags} key=${session} ...${{ session, flagged: summary.flagged, onFlag }} />`}
    <div role="tablist" class="tabs">${tabs.map(([name, label], i) => html`<button role="tab"
      id=${`tab-${name}`} aria-selected=${name === shown} onClick=${() => setTab(name)}>${label}
      ${' '}<kbd>${i + 1}</kbd></button>`)}</div>
    <div role="tabpanel" aria-labelledby=${`tab-${shown}`} key=${`${keyOf(entry)} ${shown}`}>
      ${error && html`<p class="flag" role="alert">${error.message}</p>`}
      ${bundle ? views[shown]() : !error && html`<p class="soft pad">…</p>`}</div>
    ${bundle && !group && html`<${Notes} ...${{ session, notes, onNote }} />`}</main>`;
}

function Head({ entry, bundle, summary }) {
  const title = html`<h2>${titleOfEntry(entry, bundle)}</h2>`;
  if (entry.kind === 'group') {
    const { item, rows } = entry, good = rows.filter((r) => r.success >= 1).length;
    return html`<header>${title}<p class="about">Group ${item.index}: ${good} of ${rows.length} succeed,
      ${' '}${item.state}${item.step == null ? '' : ` at step ${item.step}`}${
        item.attempt ? `, attempt ${item.attempt + 1}` : ''}</p>
      <p class="task">${printable(item.task)}</p>${item.reason && html`<p class="flag">${printable(item.reason)}</p>`}
      </header>`;
  }
  const { row } = entry, t = bundle?.trajectories[0];
  const [stage] = row.item < 0 ? summary.stages.find(([, first, last]) => first <= row.row && row.row <= last) ?? [] : [];
  return html`<header>${title}<p class="about">
    <span class=${`badge ${verdict(row)}`}>${Number(row.success).toFixed(2)}</span>
    ${' '}${row.item < 0 ? `Evaluation${stage ? ` ${stage}` : ''}` : `Group ${row.item}, rank ${row.rank}`}:
    ${' '}${printable(row.family)}, ended by ${row.end_reason},
    ${' '}${row.wall_s.toFixed(2)} s, ${row.tool_calls} calls${row.tool_errors ? `, ${row.tool_errors} failed` : ''}${
      row.total == null ? '' : `, return ${row.total.toFixed(3)}`}</p>
    <p class="task">${printable(t?.task ?? '')}<br />${row.session}</p></header>`;
}

function Help({ onClose }) {
  const ref = useRef();
  useLayoutEffect(() => ref.current.focus(), []);  // before the next key
  const stay = (e) => { if (e.key === 'Tab') e.preventDefault(); };
  return html`<div class="veil" onClick=${onClose}><div class="help" role="dialog" aria-modal="true"
    aria-label="Keys" tabindex="-1" ref=${ref} onKeyDown=${stay} onClick=${(e) => e.stopPropagation()}><h2>Keys</h2>
    <dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl></div></div>`;
}

// With the focus on the right, arrow keys scroll.
const onList = (event) => (event.target.closest('#detail') ? undefined : true);

function useKeyboard(act) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    const onKey = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const typing = ['INPUT', 'TEXTAREA', 'SELECT'].includes(event.target.tagName);
      if (typing && event.key !== 'Escape') return;
      if (latest.current[event.key]?.(event) !== undefined) event.preventDefault();
    };
    document.addEventListener('keydown', onKey);
    return () => document.removeEventListener('keydown', onKey);
  }, []);
}

function App() {
  const [summary, setSummary] = useState(null), [problem, setProblem] = useState('');
  const [place, go] = usePlace(() => latest.current());
  const [open, setOpen] = useState(new Set()), [help, setHelp] = useState(false);
  const [mode, setMode] = useState('logprob');
  const { group, session, tab, ...conditions } = place;
  const listing = ['rl', 'eval'].includes(place.phase);
  const condition = useMemo(() => conditions, [JSON.stringify(conditions)]);
  const selected = group ? `g${group}` : session;
  const [pages, onEnd, refresh] = usePages(condition, listing && summary);
  const filtered = Object.keys(condition).some((name) => name !== 'phase' && condition[name]);
  const listed = useMemo(() => entriesOf(pages, condition.phase, open, filtered, selected),
    [pages, condition.phase, open, filtered, selected]);
  const [found, onNote] = useBundle(place, selected, listed.find((e) => keyOf(e) === selected), summary);
  const poll = async () => {
    try {
      const found = await source.summary();
      setProblem('');
      if (summary && listing && JSON.stringify(found) !== JSON.stringify(summary)) await refresh();
      setSummary((old) => (JSON.stringify(found) === JSON.stringify(old) ? old : found));
    } catch (error) {
      setProblem(error.status ? error.message : 'The job does not answer: it may have ended.');
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

  // What a link selects may be beyond the pages that were read: it comes first then.
  const beyond = found.bundle && !filtered && pages.condition === condition && !listed.some((e) => keyOf(e) === selected);
  const entries = !beyond ? listed : [...entriesOf({ items: group ? [found.entry.item] : [],
    rows: found.bundle.trajectories }, group ? 'rl' : 'eval', open), ...listed];
  const at = entries.findIndex((e) => keyOf(e) === selected), entry = entries[at] ?? found.entry;
  const toggle = (index, on) => setOpen((old) => {
    const next = new Set(old);
    if (on) next.add(index); else next.delete(index);
    return next;
  });
  const choose = (name, value) => go({ group: '', session: '', [name]: String(value) });
  const select = (chosen, click) => {
    if (chosen.kind !== 'group') return choose('session', chosen.row.session);
    if (click) toggle(chosen.item.index, !chosen.open || keyOf(chosen) !== selected);
    return choose('group', chosen.item.index);
  };
  // On a wide screen something is always selected: first the last trained group.
  useEffect(() => {
    if (selected || NARROW.matches || pages.condition !== condition || !listed.length) return;
    if (condition.phase === 'rl' && !filtered && summary.trained !== null) choose('group', summary.trained);
    else select(listed.find((e) => e.kind !== 'group' || e.rows.length) ?? listed[0]);
  }, [pages, selected]);
  useEffect(() => {  // where the selection is stays open
    if (entry?.level === 2) toggle(entry.row.item, true);
  }, [selected, entry?.level]);
  const title = entry && titleOfEntry(entry, found.bundle);
  useEffect(() => {
    if (summary) document.title = `${title ? `${title} · ` : ''}${summary.title} · trajectories`;
  }, [title, summary?.title]);
  const step = (by) => {
    const next = entries[Math.min(Math.max(at + by, 0), entries.length - 1)];
    if (!next) return undefined;
    select(next);
    return true;
  };
  const focus = (id) => { document.getElementById(id)?.focus(); return true; };
  const openTrajectory = (t) => {
    choose('session', t.session);
    focus('detail');
  };
  const flag = (name) => document.getElementById(`flag-${name}`)?.click();
  const phase = (name) => { go({ ...START, tab, phase: name }); return true; };
  const toList = () => {
    if (!listing) return go({ task: '' });
    if (!NARROW.matches) return focus('list');
    choose('session', '');
    requestAnimationFrame(() => focus('list'));
    return true;
  };
  const view = (i) => { const tabs = TABS[entry?.kind ?? 'group']; if (tabs[i]) go({ tab: tabs[i][0] }); return true; };
  useKeyboard({
    j: () => step(1), k: () => step(-1),
    ArrowDown: (event) => onList(event) && step(1), ArrowUp: (event) => onList(event) && step(-1),
    ArrowRight: () => entry?.kind === 'group' && (toggle(entry.item.index, true), true),
    ArrowLeft: () => {
      if (entry?.kind === 'group') toggle(entry.item.index, false);
      else if (entry && entry.level === 2) choose('group', entry.row.item);
      return true;
    },
    Enter: (event) => {
      if (event.target.tagName === 'BUTTON' || !entry) return undefined;
      if (entry.kind === 'group') toggle(entry.item.index, !entry.open);
      return focus('detail');
    },
    1: () => view(0), 2: () => view(1), 3: () => view(2), 4: () => view(3),
    c: () => { const names = Object.keys(MODES); setMode(names[(names.indexOf(mode) + 1) % names.length]); return true; },
    '/': () => focus('search'), n: () => focus('note'), '?': () => { setHelp(true); return true; },
    t: () => phase('rl'), e: () => phase('eval'), v: () => phase('curves'),
    h: () => flag('hacked'), i: () => flag('infrastructure'), l: () => flag('look'),
    Escape: () => {
      if (help) setHelp(false);
      else if (document.activeElement.id !== 'search') return toList();
      else go({ text: '' });
      return focus('list');
    },
  });

  if (!summary) {
    return problem ? html`<header class="bar"><h1>m2jax</h1></header>
      <${KeyForm} problem=${problem} retry=${poll} />` : html`<header class="bar"><h1>m2jax</h1></header>`;
  }
  const total = (evaluation) => summary.kinds.filter(([of]) => of === evaluation)
    .reduce((sum, kind) => sum + kind[3], 0).toLocaleString();
  return html`<header class="bar"><h1>${summary.title}</h1>
      <nav aria-label="Phase">${[['rl', 'Training', total(false)], ['eval', 'Evaluations', total(true)],
        ['curves', 'Curves', ''], ...(summary.compared ? [['compare', 'Compare', '']] : [])].map(([name, label, n]) =>
        html`<button aria-pressed=${condition.phase === name} onClick=${() => phase(name)}>${label}
          ${n && html` <span class="soft">${n}</span>`}</button>`)}</nav>
      <span class="soft states">${Object.entries(summary.states).map(([s, n]) => `${n} ${s}`).join(' · ')}</span>
      <${Status} ...${{ problem, status: summary.status }} />
      <button class="helpkey" aria-label="Keys" onClick=${() => setHelp(true)}>?</button></header>
    ${place.phase === 'curves' && html`<${Curves} summary=${summary} />`}
    ${place.phase === 'compare' && (summary.compared ? html`<${Compare} ...${{ summary, place, go }} />`
      : html`<p class="soft pad">No second run: experiments.view --compare=WORKDIR adds one.</p>`)}
    ${listing && html`<div class=${`columns ${selected ? 'reading' : ''}`}><section class="side" aria-label="List">
      <${Filters} ...${{ summary, condition, go }} />
      <${List} ...${{ entries, selected, flagged: summary.flagged, onSelect: select, onEnd, more: pages.more, before: pages.before,
        wanted: condition.text, error: pages.error, waiting: condition.phase === 'rl' && summary.waiting }} />
      <${ListLegend} training=${condition.phase === 'rl'} /></section>
      <${Detail} ...${{ entry, found, summary, tab, setTab: (name) => go({ tab: name }), mode, setMode,
        openTrajectory, onNote, onFlag: poll, onBack: toList }} /></div>`}
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

const root = document.getElementById('app');
root.replaceChildren();
render(html`<${App} />`, root);
