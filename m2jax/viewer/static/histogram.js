// How rewards are distributed under the other filters. A range of bars is a filter too:
// click or drag, or the arrow keys, with Shift for a range.

const NO_RANGE = { least_reward: '', most_reward: '' };

// The bar of a value: the last one includes its upper edge.
function barOf(edges, value) {
  const above = edges.findIndex((edge) => edge > value);
  return above < 0 ? edges.length - 2 : above - 1;
}

function countsOf(edges, values) {
  const counts = Array(Math.max(edges.length - 1, 0)).fill(0);
  for (const v of values) if (v != null && counts.length) counts[barOf(edges, v)] += 1;
  return counts;
}

// The first and the last bar of a condition's range.
function rangeOf(edges, { least_reward: least, most_reward: most }) {
  const last = edges.length - 2, bound = (bar) => Math.min(Math.max(bar, 0), last);
  const end = edges.findLastIndex((edge) => edge < Number(most));
  return [least === '' ? 0 : bound(barOf(edges, Number(least))), most === '' ? last : bound(end)];
}

// The condition of a range: no bound where it has the first or the last bar.
function conditionOf(edges, a, b) {
  const [first, last] = [Math.min(a, b), Math.max(a, b)];
  return { least_reward: first ? String(edges[first]) : '',
    most_reward: last < edges.length - 2 ? String(edges[last + 1]) : '' };
}

function Histogram({ summary, condition, go }) {
  const asked = { ...rowsOf(condition, summary), ...NO_RANGE, text: '' };
  const evaluation = condition.phase === 'eval';
  const { value: { edges, counts } = { edges: [], counts: [] } } = useAnswer(() => source.histogram(asked),
    [JSON.stringify(asked), summary.trained, evaluation && summary.newest]);
  const [drag, setDrag] = useState(null), [active, setActive] = useState(0);
  if (counts.length < 2) return null;
  const [first, last] = drag ? [Math.min(...drag), Math.max(...drag)] : rangeOf(edges, condition);
  const whole = !first && last === counts.length - 1, most = Math.max(...counts, 1);
  const pick = (a, b) => go(conditionOf(edges, a, b));
  const barAt = ({ clientX, currentTarget }) => {
    const box = currentTarget.getBoundingClientRect(), share = (clientX - box.left) / box.width;
    return Math.min(Math.max(Math.floor(share * counts.length), 0), counts.length - 1);
  };
  const onDown = (event) => {
    event.currentTarget.setPointerCapture(event.pointerId);
    setDrag([barAt(event), barAt(event)]);
  };
  const onUp = () => {
    if (drag[0] === drag[1] && !whole && String(rangeOf(edges, condition)) === String(drag)) go(NO_RANGE);
    else pick(...drag);
    setActive(drag[0]);
    setDrag(null);
  };
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) {
      const next = Math.min(Math.max(active + by, 0), counts.length - 1);
      const anchor = whole || (active !== first && active !== last) ? active : active === first ? last : first;
      if (event.shiftKey) pick(anchor, next);
      setActive(next);
    } else if (event.key === 'Enter' || event.key === ' ') pick(active, active);
    else if (event.key === 'Escape' && !whole) go(NO_RANGE);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const name = evaluation ? 'verdict' : 'return';
  const shown = counts.slice(first, last + 1).reduce((sum, n) => sum + n, 0);
  return html`<div class="histogram"><div class="bars" role="listbox" tabindex="0" aria-multiselectable="true"
      aria-label=${`Trajectories by ${name}: arrow keys move, Enter selects, Shift extends`}
      aria-activedescendant=${`bar-${active}`} onKeyDown=${onKey} onPointerDown=${onDown}
      onPointerMove=${(e) => drag && setDrag([drag[0], barAt(e)])} onPointerUp=${onUp}
      onPointerCancel=${() => setDrag(null)}>
    ${counts.map((n, i) => html`<span id=${`bar-${i}`} role="option" class=${i === active ? 'active' : ''}
      aria-selected=${first <= i && i <= last} aria-label=${`${edges[i]} to ${edges[i + 1]}: ${n}`}
      title=${`${edges[i]} to ${edges[i + 1]}: ${n}`}><i style=${{ height: `${n && Math.max(3, (n / most) * 100)}%` }} /></span>`)}
    </div><p><span>${edges[0]}</span><span>${name}${whole ? '' : ` ${edges[first]} to ${edges[last + 1]}`}:
      ${' '}${shown.toLocaleString()}${!whole && html`${' '}<button class="link" onClick=${() => go(NO_RANGE)}>all</button>`}
    </span><span>${edges.at(-1)}</span></p></div>`;
}
