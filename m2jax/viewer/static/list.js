// The list on the left: groups with their trajectories, or evaluations. Only the rows
// in view are in the document.

const rowPx = () => (NARROW.matches ? 50 : 30); // as in view.css

// Rows as drawn: groups, below the open ones and that of the selection their trajectories.
function entriesOf({ items, rows }, phase, open, allOpen, selected) {
  if (phase === 'eval') return rows.map((row) => ({ kind: 'trajectory', row, level: 1 }));
  const byItem = new Map();
  for (const row of rows) {
    if (!byItem.has(row.item)) byItem.set(row.item, []);
    byItem.get(row.item).push(row);
  }
  const entries = [];
  for (const item of items) {
    const own = byItem.get(item.index) ?? [];
    const shown = allOpen || open.has(item.index) || own.some((row) => row.session === selected);
    entries.push({ kind: 'group', item, rows: own, open: shown, level: 1 });
    if (shown) own.forEach((row) => entries.push({ kind: 'trajectory', row, level: 2 }));
  }
  return entries;
}

const keyOf = (entry) => (entry.kind === 'group' ? `g${entry.item.index}` : entry.row.session);

function List({ entries, selected, flagged, wanted, waiting, onSelect, onEnd, more, before, error }) {
  const ROW_PX = rowPx(), ref = useRef(), [scroll, setScroll] = useState(0), [height, setHeight] = useState(800);
  useEffect(() => {
    const watch = new ResizeObserver(() => setHeight(ref.current.clientHeight));
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  const at = entries.findIndex((e) => keyOf(e) === selected);
  useEffect(() => {
    if (at < 0) return;
    const box = ref.current, y = at * ROW_PX;
    if (y < box.scrollTop) box.scrollTop = y;
    else if (y + ROW_PX > box.scrollTop + box.clientHeight) {
      box.scrollTop = y + ROW_PX - box.clientHeight;
    }
  }, [selected, at, ROW_PX]);
  const first = Math.max(0, Math.floor(scroll / ROW_PX) - 8);
  const last = Math.min(entries.length, Math.ceil((scroll + height) / ROW_PX) + 8);
  useEffect(() => { if (last >= entries.length) onEnd(); }, [last, entries.length, more, before]);
  return html`${waiting > 0 && html`<p class="soft pad waiting">${waiting} pending, without a trajectory yet</p>`}
  <div class="list" ref=${ref} tabindex="0" role="tree" id="list"
    aria-label="Trajectories" aria-activedescendant=${at < 0 ? undefined : `row-${selected}`}
    onScroll=${(e) => setScroll(e.target.scrollTop)}>
    <div style=${{ height: `${entries.length * ROW_PX}px`, position: 'relative' }}>
      ${entries.slice(first, last).map((entry, i) => html`<${Row} key=${keyOf(entry)}
        ...${{ entry, wanted, flagged, onSelect }} y=${(first + i) * ROW_PX} on=${keyOf(entry) === selected} />`)}
    </div>
    ${error ? html`<p class="flag pad" role="alert">${error.message}</p>` : more && html`<p class="soft pad">…</p>`}
    ${!more && !entries.length && html`<p class="soft pad">No trajectory here yet, or none that
      meets the conditions.</p>`}
  </div>`;
}

function Row({ entry, wanted, flagged, y, on, onSelect }) {
  const group = entry.kind === 'group';
  return html`<div id=${`row-${keyOf(entry)}`} class=${`row ${entry.kind}${on ? ' on' : ''}`} role="treeitem"
    aria-level=${entry.level} aria-selected=${on} aria-expanded=${group ? entry.open : undefined}
    style=${{ transform: `translateY(${y}px)` }} onClick=${() => onSelect(entry, true)}>
    ${group ? html`<${GroupRow} ...${{ entry, flagged }} />` : html`<${TrajectoryRow} ...${{ row: entry.row, wanted, flags: flagsOf(flagged, entry.row.session) }} />`}</div>`;
}

function GroupRow({ entry: { item, rows, open }, flagged }) {
  const flags = rows.flatMap((r) => flagsOf(flagged, r.session));
  const family = rows[0]?.family ?? item.task.split('?')[0].split('/').slice(2, 3)[0] ?? '';
  return html`<span class="caret" aria-hidden="true">${open ? '▾' : '▸'}</span>
    <span class="num">${item.index}</span><span class="name">${printable(family)}</span>
    ${flags.length > 0 && html`<${FlagMark} flags=${[...new Set(flags)]} />`}<${What} text=${rows[0]?.instruction} />
    <span class="dots" aria-label=${`${rows.filter((r) => r.success >= 1).length} of ${rows.length} succeed`}>
      ${rows.slice(0, 24).map((r) => html`<i class=${verdict(r)} />`)}</span>
    <span class="end">${item.state === 'taken' ? `step ${item.step}` : item.state}</span>`;
}

// Verdicts of people, in annotations.jsonl.
const FLAGS = { hacked: 'hacked', infrastructure: 'infrastructure', look: 'look at this' };
const flagsText = (flags) => flags.map((name) => FLAGS[name] ?? printable(name)).join(', ');
const FlagMark = ({ flags }) => html`<span class="flag" title=${flagsText(flags)}
  aria-label=${`flagged: ${flagsText(flags)}`}>⚑</span>`;

// What a task asks, or where a search found its text.
function What({ text, wanted }) {
  const shown = printable(text), at = wanted ? shown.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  const end = at + (wanted?.length ?? 0);
  return html`<span class="what" title=${shown}>${at < 0 ? shown
    : html`${shown.slice(0, at)}<mark>${shown.slice(at, end)}</mark>${shown.slice(end)}`}</span>`;
}

const VERDICTS = { good: 'succeeds', part: 'in part', bad: 'fails', masked: 'not counted: infrastructure failed, or superseded' };
const STATES = { pending: 'rollouts run', completed: 'waits for a step', 'step n': 'taken by it', failed: 'given up' };

function ListLegend({ training }) {
  return html`<div class="legend pad" role="note" aria-label="Legend">${Object.entries(VERDICTS).map(
    ([name, what]) => html`<span><i class=${name} />${what}</span>`)}
    ${training && Object.entries(STATES).map(([name, what]) => html`<span><b>${name}</b> ${what}</span>`)}</div>`;
}

function TrajectoryRow({ row, wanted, flags }) {
  return html`<i class=${`dot ${verdict(row)}`} aria-label=${verdict(row)} />
    <span class="num">${row.item < 0 ? '' : row.rank}</span>
    <span class="name">${row.end_reason === 'answer' ? printable(row.family) : row.end_reason}${
      row.superseded ? ' (superseded)' : ''}</span>
    ${flags.length > 0 && html`<${FlagMark} flags=${flags} />`}<${What} text=${row.hit ?? row.instruction} wanted=${row.hit && wanted} />
    <span class="val">${Number(row.success).toFixed(2)}</span>
    <span class="val">${row.tool_calls} calls</span>
    <span class="end">${row.wall_s.toFixed(1)} s</span>`;
}

function verdict(row) {
  if (row.end_reason === 'infrastructure' || row.superseded) return 'masked';
  if (row.success >= 1) return 'good';
  return row.success > 0 ? 'part' : 'bad';
}

function Filters({ summary, condition, go }) {
  const set = (name) => (event) => go({ [name]: event.target.value });
  const evaluation = condition.phase === 'eval';
  const kinds = summary.kinds.filter(([ofEval]) => ofEval === evaluation);
  const choices = (column) => [...new Set(kinds.map((kind) => kind[column]))].sort();
  const select = (name, label, values) => html`<select aria-label=${label} value=${condition[name]}
    onChange=${set(name)}><option value="">${label}</option>
    ${values.map((v) => html`<option value=${v}>${printable(v)}</option>`)}</select>`;
  const [text, setText] = useState(condition.text);
  useEffect(() => {
    const timer = setTimeout(() => text !== condition.text && go({ text }), 250);
    return () => clearTimeout(timer);
  }, [text]);
  useEffect(() => setText(condition.text), [condition.text]);
  return html`<div class="filters" role="search">
    <input id="search" type="search" placeholder="Search text  ( / )" aria-label="Search text"
      maxlength="200" value=${text} onInput=${(e) => setText(e.target.value)} />
    ${select('outcome', 'outcome', ['success', 'failure'])}
    ${select('family', 'family', choices(1))}${select('end_reason', 'end', choices(2))}
    <select aria-label="flag" value=${condition.flag} onChange=${set('flag')}><option value="">flag</option>
      <option value="any">any flag</option>${Object.entries(FLAGS).map(([name, label]) =>
        html`<option value=${name}>${label}</option>`)}</select>
    ${!evaluation && html`<${NumberInput} label="step" hint="step" value=${condition.step} set=${set('step')} unit="1" />`}
    ${evaluation && summary.stages.length > 0
      && select('stage', 'stage', summary.stages.map(([name]) => name).reverse())}
    <span class="range"><${NumberInput} label="least seconds" hint="min s" value=${condition.least_s}
      set=${set('least_s')} />–<${NumberInput} label="most seconds" hint="max s" value=${condition.most_s}
      set=${set('most_s')} /></span>
  </div><${Histogram} ...${{ summary, condition, go }} />`;
}

// Keeps what is typed when the page is drawn again meanwhile.
function NumberInput({ label, hint, value, set, unit = 'any' }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  return html`<input type="number" min="0" step=${unit} placeholder=${hint} aria-label=${label}
    value=${text} onInput=${(e) => setText(e.target.value)} onChange=${set} />`;
}
