// The lineage as a graph: rounds from left to right, each below the parent that it changes.
// A parent has a lane from its own round to its last child's; other rounds hang from it.

const GRAPH = { least: 12, most: 48, lane: 30, hang: 14, left: 18, top: 16 };

// Of each round its lane, -1 without one, and its last child; and the number of lanes.
function lanesOf(rows) {
  const last = rows.map(() => -1), lane = rows.map(() => -1), until = [];
  for (const { round, parent } of rows) if (parent != null) last[parent] = round;
  for (const { round, parent } of rows) {
    if (last[round] < 0 && parent != null) continue; // it hangs
    let free = parent != null && until[lane[parent]] === round ? lane[parent] : until.findIndex((end) => end < round);
    if (free < 0) free = until.length;
    [lane[round], until[free]] = [free, Math.max(last[round], round)];
  }
  return { lane, last, lanes: until.length };
}

// The rounds from the start to a node, by parents.
function pathTo(rows, round) {
  const found = new Set();
  for (let at = round; at != null && rows[at] && !found.has(at); at = rows[at].parent) found.add(at);
  return found;
}

function Lineage({ rows, summary, selected, select }) {
  const [box, room] = useWidth(), [view, setView] = useState([0, 2000]), [over, setOver] = useState(null);
  const { lane, last, lanes } = useMemo(() => lanesOf(rows), [rows]);
  const kept = useMemo(() => pathTo(rows, summary.incumbent[0]), [rows, summary.incumbent[0]]);
  const own = useMemo(() => pathTo(rows, over ?? selected), [rows, over, selected]);
  const step = Math.min(Math.max((room - 3 * GRAPH.left) / rows.length, GRAPH.least), GRAPH.most);
  const x = (round) => GRAPH.left + round * step;
  const y = (round) => { const { parent } = rows[round];
    return GRAPH.top + GRAPH.lane * (lane[round] >= 0 ? lane[round] : lane[parent]) + (lane[round] >= 0 ? 0 : GRAPH.hang); };
  const width = x(rows.length - 1) + GRAPH.left, height = GRAPH.top * 2 + GRAPH.lane * Math.max(lanes - 1, 0) + GRAPH.hang;
  const look = () => { const { scrollLeft, clientWidth } = box.current; setView([scrollLeft - 400, scrollLeft + clientWidth + 400]); };
  useLayoutEffect(() => {
    const { scrollLeft, clientWidth } = box.current, at = x(selected ?? 0);
    if (at < scrollLeft + 20 || at > scrollLeft + clientWidth - 20) box.current.scrollLeft = at - clientWidth / 2;
    const { scrollTop, clientHeight } = box.current, down = y(selected ?? 0);
    if (down < scrollTop || down > scrollTop + clientHeight - 20) box.current.scrollTop = down - clientHeight / 2;
    look();
  }, [selected, rows.length, room]);
  const shown = rows.filter((row) => x(row.round) >= view[0] && x(row.round) <= view[1]);
  const crosses = (from, to) => x(from) <= view[1] && x(to) >= view[0];
  const path = ({ round, parent }) => {
    const [x0, y0, x1, y1] = [x(parent), y(parent), x(round), y(round)];
    return y0 === y1 ? `M${x0},${y0}H${x1}` : `M${x0},${y0}H${Math.max(x0, x1 - GRAPH.least / 2 - 2)}L${x1},${y1}`;
  };
  // One line of a parent for all of its children, and from there one to each.
  const rails = rows.filter(({ round }) => last[round] >= 0 && crosses(round, last[round]));
  const drop = ({ round, parent }) => `M${Math.max(x(parent), x(round) - GRAPH.least / 2 - 2)},${y(parent)}L${x(round)},${y(round)}`;
  const marked = rows.filter((row) => row.parent != null && (kept.has(row.round) || own.has(row.round)) && crosses(row.parent, row.round));
  const of = (row) => (own.has(row.round) ? 'own' : '') + (kept.has(row.round) ? ' kept' : '');
  const onKey = (event) => {
    const child = rows.findIndex((row) => row.parent === selected);
    const to = { ArrowRight: selected + 1, ArrowLeft: selected - 1, ArrowUp: rows[selected]?.parent,
      ArrowDown: child < 0 ? null : child, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === 'Enter') document.getElementById('round').focus();
    else if (to === undefined && !event.key.startsWith('Arrow')) return;
    else if (to != null && rows[to]) select(to);
    event.preventDefault();
  };
  const now = rows[over ?? selected];
  return html`<section aria-labelledby="lineage-title"><h2 id="lineage-title">Lineage</h2>
    <div class="lineage" ref=${box} onScroll=${look} onKeyDown=${onKey} tabindex="0" role="listbox" aria-label="Rounds: arrow keys move, up to the parent, down to the first child; Enter reads"
      aria-activedescendant=${shown.some((row) => row.round === selected) ? `node-${selected}` : undefined}>
      <svg width=${width} height=${height} role="presentation">
        ${rails.map(({ round }) => html`<path key=${`r${round}`} class="edge"
          d=${`M${x(round)},${y(round)}H${x(last[round]) - (lane[last[round]] === lane[round] ? 0 : GRAPH.least / 2 + 2)}`} />`)}
        ${shown.filter((row) => row.parent != null).map((row) => html`<path key=${`d${row.round}`} class="edge" d=${drop(row)} />`)}
        ${marked.map((row) => html`<path key=${`m${row.round}`} class=${`edge ${of(row)}`} d=${path(row)} />`)}
        ${shown.map((row) => html`<g key=${row.round} id=${`node-${row.round}`} role="option" class=${`node ${of(row)}`} aria-selected=${row.round === selected}
          aria-label=${`round ${row.round}, ${WORDS[row.decision]}`} onClick=${() => select(row.round)}
          onMouseEnter=${() => setOver(row.round)} onMouseLeave=${() => setOver(null)}>
          <rect x=${x(row.round) - step / 2} y=${y(row.round) - 8} width=${step} height="16" />
          ${row.round === selected && html`<circle class="ring" cx=${x(row.round)} cy=${y(row.round)} r="8" />`}
          <${Mark} row=${row} x=${x(row.round)} y=${y(row.round)} r=${row.decision === 'reject' ? 2.8 : 3.6} /></g>`)}
      </svg></div>
    <p class="legend"><span><i class="dot keep" />kept</span><span><i class="dot revert" />reverted</span><span><b class="cross">×</b>rejected before its evaluation</span>
      <span><i class="rule path" />start to incumbent</span></p>
    <p class="about-node" role="status">${now && html`<b>${now.round ? `Round ${now.round}` : 'The start'}</b>${now.round ? `, ${verdictOf(now)}` : ''}
      ${now.parent == null ? '' : `, changes ${now.parent ? `round ${now.parent}` : 'the start'}`}${now.mean == null ? '' : `: ${interval(now)}`}. ${now.note}`}</p></section>`;
}
