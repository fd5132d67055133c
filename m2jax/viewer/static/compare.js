// Two runs on the same tasks: A is the run of the page, B the other one.

const TRAINING = 'training', PAIRS = 200; // rows at first

// What is compared: training, or a stage; by default the last stage if both have one.
const stageOf = (chosen, summary, both) => chosen || (both ? summary.stages.at(-1)[0] : TRAINING);
const partOf = (stage, summary) => (stage === TRAINING ? { phase: 'rl' } : rowsOf({ phase: 'eval', stage }, summary));

// Tasks of both, the largest difference first.
function pairsOf(a, b) {
  const others = new Map(b.map((row) => [row[0], row]));
  return a.filter(([task]) => others.has(task)).map(([task, family, n, rate]) => {
    const [, , m, other] = others.get(task);
    return { task, family, n, rate, m, other, by: other - rate };
  }).sort((x, y) => Math.abs(y.by) - Math.abs(x.by) || (x.task < y.task ? -1 : 1));
}

function StageChoice({ label, stage, summary, set }) {
  return html`<label>${label} <select aria-label=${`Part of ${label}`} value=${stage} onChange=${(e) => set(e.target.value)}>
    ${[TRAINING, ...summary.stages.map(([name]) => name)].map((name) => html`<option value=${name}>${printable(name)}</option>`)}
    </select></label>`;
}

function Compare({ summary, place, go }) {
  const { value: other, error } = useAnswer(() => source.summary('other'), [summary]);
  if (!other) return html`<main class="detail">${error ? html`<p class="flag" role="alert">${error.message}</p>` : '…'}</main>`;
  const both = summary.stages.length > 0 && other.stages.length > 0;
  return html`<${Pairs} ...${{ summary, other, place, go, a: stageOf(place.stage, summary, both),
    b: stageOf(place.stage_b, other, both) }} />`;
}

function Pairs({ summary, other, place, go, a, b }) {
  const parts = [partOf(a, summary), partOf(b, other)], [all, setAll] = useState(false);
  const { value: [ofA, ofB] = [[], []], error } = useAnswer(
    () => Promise.all([source.tasks('', parts[0]), source.tasks('other', parts[1])]), [JSON.stringify(parts)]);
  const pairs = useMemo(() => pairsOf(ofA, ofB), [ofA, ofB]);
  const mean = (name) => (pairs.length ? percent(pairs.reduce((sum, p) => sum + p[name], 0) / pairs.length) : '–');
  const better = pairs.filter((p) => p.by > 0).length, worse = pairs.filter((p) => p.by < 0).length;
  return html`<div class=${`columns ${place.task ? 'reading' : ''}`}><section class="side" aria-label="Tasks">
    <div class="filters"><${StageChoice} label=${`A: ${summary.title}`} stage=${a} summary=${summary} set=${(stage) => go({ stage })} />
      <${StageChoice} label=${`B: ${other.title}`} stage=${b} summary=${other} set=${(stage_b) => go({ stage_b })} /></div>
    ${error && html`<p class="flag pad" role="alert">${error.message}</p>`}
    <p class="pad">${count(pairs.length, 'task')} in both: A succeeds in ${mean('rate')}, B in ${mean('other')}.
      ${' '}<span class="soft">B is better in ${better}, worse in ${worse}; ${ofA.length - pairs.length} only in A,
      ${' '}${ofB.length - pairs.length} only in B.</span></p>
    <div class="pairs"><table><thead><tr><th>B − A</th><th>A</th><th>B</th><th>task</th></tr></thead><tbody>
      ${(all ? pairs : pairs.slice(0, PAIRS)).map((p) => html`<tr class=${p.task === place.task ? 'on' : ''}>
        <td class=${p.by < 0 ? 'down' : p.by > 0 ? 'up' : 'soft'}>${p.by ? signedText(p.by) : '0'}</td>
        <td>${p.rate.toFixed(2)} <span class="soft">/${p.n}</span></td><td>${p.other.toFixed(2)} <span class="soft">/${p.m}</span></td>
        <td><button class="link" onClick=${() => go({ task: p.task })}>${printable(p.task)}</button></td></tr>`)}</tbody></table>
      ${!all && pairs.length > PAIRS && html`<button class="link pad" onClick=${() => setAll(true)}>Show all</button>`}</div></section>
    <main class="detail" id="detail" tabindex="-1" aria-label="Selected"><button class="back" onClick=${() => go({ task: '' })}>← List</button>
      ${place.task ? html`<${Pair} key=${place.task} ...${{ task: place.task, parts }} />`
        : html`<p class="soft">Choose a task on the left.</p>`}</main></div>`;
}

function Pair({ task, parts }) {
  const { value, error } = useAnswer(() => Promise.all(['', 'other'].map((run, i) => source.task(run, parts[i], task))),
    [task, JSON.stringify(parts)]);
  if (error) return html`<p class="flag" role="alert">${error.message}</p>`;
  if (!value) return html`<p class="soft">…</p>`;
  const members = value.flatMap(({ trajectories }, i) => trajectories.map((t, k) => ({ t, k, name: `${'AB'[i]} ${k + 1}` })))
    .sort((x, y) => x.k - y.k); // A 1, B 1, A 2, …
  return html`<header><h2>${printable(members.find(({ t }) => t.instruction)?.t.instruction || task)}</h2>
    <p class="task">${printable(task)}</p></header><${Members} members=${members} />`;
}
