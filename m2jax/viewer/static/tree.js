// The prefix tree of a group: each token once, with the loss terms that it carries.

const ROW_HEIGHT = 15, WIDTH = 1000; // stretched to the page's

// Vertical places of the segments: leaves one below the other, in depth-first order.
function layout(bundle) {
  const n = bundle.segments.length, children = Array.from({ length: n }, () => []);
  const roots = [];
  bundle.segments.forEach(([parent], s) => (parent < 0 ? roots : children[parent]).push(s));
  const top = Array(n).fill(0), bottom = Array(n).fill(0), order = [];
  let y = 0;
  const stack = roots.slice().reverse().map((s) => [s, false]);
  while (stack.length) {
    const [s, done] = stack.pop();
    if (!done) {
      order.push(s);
      top[s] = y;
      stack.push([s, true]);
      for (const child of children[s].slice().reverse()) stack.push([child, false]);
      if (!children[s].length) y += 1;
    } else {
      bottom[s] = Math.max(y, top[s] + 1);
    }
  }
  return { top, bottom, rows: Math.max(y, 1), order, children };
}

// Runs of a segment's tokens that carry the same terms.
function runsOf(bundle, s) {
  const length = bundle.segments[s][1].length, start = bundle.depths[s];
  const marks = new Set([0, length]);
  for (const c of bundle.through[s]) {
    for (const at of [c.prompt_tokens, c.prompt_tokens + c.response_tokens]) {
      if (at > start && at < start + length) marks.add(at - start);
    }
  }
  const sorted = [...marks].sort((a, b) => a - b), runs = [];
  for (let i = 0; i + 1 < sorted.length; i++) {
    const depth = start + sorted[i];
    const terms = bundle.through[s].filter((c) =>
      depth >= c.prompt_tokens && depth < c.prompt_tokens + c.response_tokens);
    runs.push({ start: sorted[i], end: sorted[i + 1], terms });
  }
  return runs;
}

function PrefixTree({ bundle, mode, setMode, onOpen }) {
  const place = useMemo(() => layout(bundle), [bundle]);
  const [chosen, setChosen] = useState(place.order[0] ?? null);
  useEffect(() => setChosen(place.order[0] ?? null), [bundle]);
  const shown = chosen !== null && chosen < bundle.segments.length ? chosen : null;
  if (shown === null) {
    return html`<p class="soft pad">The group's token ids were pruned, or it has none yet.</p>`;
  }
  const total = bundle.segments.reduce((sum, [, ids]) => sum + ids.length, 0);
  const apart = bundle.completions.filter((c) => c.leaf != null)
    .reduce((sum, c) => sum + c.prompt_tokens + c.response_tokens, 0);
  const onKey = (event) => {
    const to = {
      ArrowRight: place.children[shown][0], ArrowLeft: bundle.segments[shown][0],
      ArrowDown: sibling(bundle, place, shown, 1), ArrowUp: sibling(bundle, place, shown, -1),
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (to >= 0) setChosen(to);
  };
  const segments = useMemo(() => [shown], [shown, bundle]);
  return html`<p class="soft pad">${total.toLocaleString()} tokens once each;
    ${' '}${apart.toLocaleString()} in ${bundle.completions.length} separate samples
    (${(apart / total).toFixed(1)} ×). Colour: advantage of the sampled tokens; grey has no loss term.</p>
    <${Icicle} ...${{ bundle, place, shown, setChosen, onKey }} />
    <div class="tools"><${ColorPicker} ...${{ mode, setMode }} /><${Legend} ...${{ mode, bundle }} /></div>
    <${SegmentFacts} ...${{ bundle, s: shown, onOpen }} />
    <${Strip} ...${{ bundle, segments, mode }} />`;
}

function sibling(bundle, place, s, step) {
  const parent = bundle.segments[s][0];
  const all = parent < 0 ? place.order.filter((o) => bundle.segments[o][0] < 0)
    : place.children[parent];
  return all[all.indexOf(s) + step] ?? -1;
}

function Icicle({ bundle, place, shown, setChosen, onKey }) {
  const depth = Math.max(...bundle.segments.map(([, ids], s) => bundle.depths[s] + ids.length));
  const height = place.rows * ROW_HEIGHT, x = (d) => (d / depth) * WIDTH;
  const runs = useMemo(() => bundle.segments.map((_, s) => runsOf(bundle, s)), [bundle]);
  return html`<div class="icicle" tabindex="0" role="tree" onKeyDown=${onKey}
    aria-label="Prefix tree: arrow keys go to children, parents and siblings"
    aria-activedescendant=${`segment-${shown}`}>
    <svg viewBox=${`0 0 ${WIDTH} ${height}`} preserveAspectRatio="none"
      style=${{ height: `${Math.min(height, 420)}px` }}>
      ${bundle.segments.map(([, ids], s) => html`<g id=${`segment-${s}`} role="treeitem"
        aria-selected=${s === shown} class=${s === shown ? 'chosen' : ''} onClick=${() => setChosen(s)}
        aria-label=${`${ids.length} tokens from position ${bundle.depths[s]}, in ${bundle.through[s].length} samples`}>
        ${runs[s].map((run) => html`<rect x=${x(bundle.depths[s] + run.start)} y=${place.top[s] * ROW_HEIGHT + 0.5}
          width=${Math.max(x(run.end - run.start) - 0.6, 0.8)}
          height=${(place.bottom[s] - place.top[s]) * ROW_HEIGHT - 1}
          style=${fillOf(run)}><title>${titleOf(run)}</title></rect>`)}</g>`)}
    </svg></div>`;
}

function fillOf(run) {
  const judged = run.terms.filter((c) => c.advantage != null);
  if (!judged.length) return { fill: run.terms.length ? 'var(--unjudged)' : 'var(--prompt)' };
  const mean = judged.reduce((sum, c) => sum + c.advantage, 0) / judged.length;
  return { fill: signed(mean, 2).background };
}

const titleOf = (run) => `${run.end - run.start} tokens, ${run.terms.length
  ? run.terms.map((c) => `rank ${c.trajectory?.rank} turn ${c.turn} ${signedText(c.advantage)}`)
    .slice(0, 8).join('; ') : 'no loss term'}`;

const count = (n, word) => `${n} ${word}${n === 1 ? '' : 's'}`;

function SegmentFacts({ bundle, s, onOpen }) {
  const runs = runsOf(bundle, s), ids = bundle.segments[s][1];
  const ranks = [...new Map(bundle.through[s].map((c) => [c.session, c.trajectory])).values()];
  const terms = runs.reduce((sum, run) => sum + run.terms.length * (run.end - run.start), 0);
  return html`<p class="segment">Segment of ${count(ids.length, 'token')} from position
    ${' '}${bundle.depths[s]}, ${count(terms, 'loss term')}; in the samples of
    ${ranks.slice(0, 20).map((t) => html`${' '}<button class="link" onClick=${() => onOpen(t)}>
      ${t.item < 0 ? 'this' : `rank ${t.rank}`} ${t.success >= 1 ? '✓' : '✗'}</button>`)}</p>`;
}
