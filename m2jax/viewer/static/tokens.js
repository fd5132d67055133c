// Recorded token ids as text: the path of a branch, or a segment of a prefix tree.

const BLOCK_TOKENS = 300;

// Control characters, bidirectional marks and invisible characters, as code points.
const UNSAFE = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const printable = (text) => String(text ?? '').replace(/\r\n/g, '\n').replace(
  UNSAFE, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);

// Places [segment, offset] of a branch's tokens, in blocks.
function blocksOf(bundle, segments) {
  const blocks = [];
  for (const s of segments) {
    const n = bundle.segments[s][1].length;
    for (let start = 0; start < n; start += BLOCK_TOKENS) {
      blocks.push({ segment: s, start, end: Math.min(start + BLOCK_TOKENS, n) });
    }
  }
  return blocks;
}

function has(block, place) {
  const [s, i] = (place ?? '').split(':').map(Number);
  return block.segment === s && block.start <= i && i < block.end;
}

// The place of the first token of a path that a trajectory sampled.
function firstSampled(bundle, segments, session) {
  for (const s of segments) {
    const own = bundle.through[s].filter((c) => c.session === session);
    const i = Math.max(0, Math.min(...own.map((c) => c.prompt_tokens)) - bundle.depths[s]);
    if (i < bundle.segments[s][1].length) return `${s}:${i}`;
  }
  return null;
}

// Draws its content once it comes near the view.
function Lazy({ children, lines, eager }) {
  const ref = useRef(), [near, setNear] = useState(Boolean(eager));
  useEffect(() => {
    if (near) return undefined;
    const watch = new IntersectionObserver(
      ([entry]) => entry.isIntersecting && setNear(true), { rootMargin: '800px' });
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, [near]);
  if (near) return children();
  return html`<div ref=${ref} style=${{ height: `${lines * 1.7}em` }} />`;
}

// Kept as it is while only the chosen token changes.
const Block = ({ bundle, block, mode, limits }) =>
  useMemo(() => spansOf(bundle, block, mode, limits), [bundle, block, mode, limits]);

function spansOf(bundle, block, mode, limits) {
  const m = MODES[mode], spans = [];
  for (let i = block.start; i < block.end; i++) {
    const token = bundle.token(block.segment, i), value = m.value?.(token);
    const text = token.text === undefined ? `⟨${token.id}⟩ ` : printable(token.text);
    const own = token.terms.length ? ' own' : '';
    const several = token.terms.length > 1 ? ' several' : '';
    spans.push(html`<span class=${`t${own}${several}`} data-t=${`${block.segment}:${i}`}
      style=${value === undefined || value === null ? undefined : m.scale(value, limits)}
      >${text === '\n' ? '↵\n' : text}</span>`);
  }
  return html`<span>${spans}</span>`;
}

// A focusable strip: hovering or the arrow keys choose a token, whose values are shown.
// It opens at the token `start`, if there is one.
function Strip({ bundle, segments, mode, start = null }) {
  const [chosen, setChosen] = useState(start), ref = useRef();
  const blocks = useMemo(() => blocksOf(bundle, segments), [bundle, segments]);
  const limits = useMemo(() => limitsOf(mode, bundle), [mode, bundle]);
  const order = useMemo(() => new Map(segments.map((s, i) => [s, i])), [segments]);
  useEffect(() => {
    const element = chosen && ref.current.querySelector(`[data-t="${chosen}"]`);
    element?.setAttribute('aria-current', 'true');
    return () => element?.removeAttribute('aria-current');
  }, [chosen]);
  useLayoutEffect(() => {
    setChosen(start);
    const element = start && ref.current.querySelector(`[data-t="${start}"]`);
    element?.scrollIntoView({ block: 'center' });
  }, [bundle, segments]);
  const move = (step) => {
    let [s, i] = chosen ? chosen.split(':').map(Number) : [segments[0], -1];
    i += step;
    while (i < 0 || i >= bundle.segments[s][1].length) {
      const next = segments[order.get(s) + Math.sign(step)];
      if (next === undefined) return;
      i = i < 0 ? i + bundle.segments[next][1].length : i - bundle.segments[s][1].length;
      s = next;
    }
    setChosen(`${s}:${i}`);
    ref.current.querySelector(`[data-t="${s}:${i}"]`)?.scrollIntoView({ block: 'nearest' });
  };
  const onKey = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    move(event.shiftKey ? 10 * step : step);
  };
  const onMove = (event) => { // not what scrolling puts below the pointer
    const place = event.target.dataset?.t;
    if (place) setChosen(place);
  };
  return html`<div class="strip">
    <div class="tokens" ref=${ref} tabindex="0" role="group" onMouseMove=${onMove}
      onKeyDown=${onKey} aria-label="Tokens: arrow keys move, Shift by ten">
      ${blocks.map((block, i) => html`<${Lazy} key=${`${block.segment}:${block.start}`}
        eager=${i < 4 || has(block, start)} lines=${(block.end - block.start) / 20}>${() =>
          html`<${Block} ...${{ bundle, block, mode, limits }} />`}<//>`)}
    </div>
    <${Inspector} bundle=${bundle} chosen=${chosen} />
  </div>`;
}

function Inspector({ bundle, chosen }) {
  if (!chosen) {
    return html`<aside class="inspect" aria-live="polite"><p class="soft">Point at a token, or
      focus the text and use ← →.</p></aside>`;
  }
  const [s, i] = chosen.split(':').map(Number), token = bundle.token(s, i);
  const shown = token.terms.slice(0, 12);
  return html`<aside class="inspect" aria-live="polite">
    <p class="tokentext">${token.text === undefined ? '' : printable(JSON.stringify(token.text))}</p>
    <dl><dt>id</dt><dd>${token.id}</dd><dt>position</dt><dd>${token.depth}</dd></dl>
    ${!shown.length && html`<p class="soft">Prompt or observation: no loss term.</p>`}
    ${shown.map((t) => html`<${Term} term=${t} alone=${shown.length === 1} />`)}
    ${token.terms.length > shown.length && html`<p class="soft">and
      ${' '}${token.terms.length - shown.length} more terms</p>`}
  </aside>`;
}

function Term({ term, alone }) {
  const t = term.completion.trajectory;
  const rows = [
    ['old log-prob.', term.logprob?.toFixed(4)],
    ['probability', term.logprob === undefined ? null : Math.exp(term.logprob).toFixed(4)],
    ['advantage', term.advantage == null ? 'not judged' : signedText(term.advantage)],
    ['weight', term.weight == null ? 'not in the loss, or unknown' : term.weight.toExponential(3)],
    ['version', term.version],
    ['entropy', term.entropy?.toFixed(4)],
    ['learner', term.learner?.toFixed(4)],
    ['ratio', term.mismatch === undefined ? null : Math.exp(term.mismatch).toFixed(5)],
  ].filter(([, value]) => value !== undefined && value !== null);
  return html`<section class="term">
    <h4>${alone ? 'Loss term' : `Term of trajectory ${t?.rank}`} · turn ${term.completion.turn}</h4>
    <dl>${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
  </section>`;
}

// The tokens of one trajectory, a branch at a time.
function Tokens({ bundle, session, mode, setMode }) {
  const branches = useMemo(
    () => bundle.branches(session).filter((c) => c.leaf != null), [bundle, session]);
  const [which, setWhich] = useState(0);
  const branch = branches[Math.min(which, branches.length - 1)];
  const segments = useMemo(() => (branch ? bundle.path(branch) : []), [bundle, branch]);
  if (!branch) {
    return html`<p class="soft pad">Its token ids were pruned: the pool keeps those that a
      checkpoint may still need.</p>`;
  }
  return html`<div class="tools"><${ColorPicker} ...${{ mode, setMode }} />
    ${branches.length > 1 && html`<label class="pick">Branch <select value=${which}
      onChange=${(e) => setWhich(Number(e.target.value))}>${branches.map((c, i) =>
        html`<option value=${i}>${i + 1}: to turn ${c.turn}${reasonOf(bundle, c)}</option>`)}
    </select></label>`}
    <${Legend} ...${{ mode, bundle }} /></div>
    <${Strip} ...${{ bundle, segments, mode }} start=${firstSampled(bundle, segments, session)} />`;
}

// Why a branch began, if it did not begin with the trajectory.
function reasonOf(bundle, completion) {
  let c = completion;
  while (c.parent && bundle.byId.has(c.parent)) c = bundle.byId.get(c.parent);
  return c.fork_reason ? ` (${c.fork_reason})` : '';
}
