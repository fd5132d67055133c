// When a group's or a trajectory's completions ran, and with which weights.

const LANE = 26, LEFT = 92;

function Timeline({ bundle, sessions, onOpen }) {
  const lanes = sessions.map((session) => {
    const t = bundle.trajectories.find((x) => x.session === session);
    const own = bundle.completions.filter((c) => c.session === session)
      .sort((a, b) => a.started_s - b.started_s);
    return { t, own };
  }).filter(({ own }) => own.length);
  const [ref, width] = useWidth();
  if (!lanes.length) return html`<p ref=${ref} class="soft pad">No completions are recorded.</p>`;
  const all = lanes.flatMap(({ own }) => own);
  const start = Math.min(...all.map((c) => c.started_s));
  const end = Math.max(...all.map((c) => c.ended_s), start + 1e-3);
  const x = (s) => LEFT + ((s - start) / (end - start)) * (width - LEFT - 8);
  const limits = limitsOf('version', bundle), height = lanes.length * LANE + 30;
  const steps = width > 600 ? 4 : 2;
  const ticks = [...Array(steps + 1).keys()].map((i) => start + (i / steps) * (end - start));
  return html`<div class="timeline" ref=${ref}>
    ${width > 0 && html`<svg width=${width} height=${height} role="group"
      aria-label=${`Timeline of ${lanes.length} trajectories over ${(end - start).toFixed(1)} seconds`}>
      ${ticks.map((s) => html`<line class="grid" x1=${x(s)} x2=${x(s)} y1="0" y2=${height - 22} />
        <text x=${x(s)} y=${height - 6} text-anchor=${s === end ? 'end' : 'middle'}>${
          (s - start).toFixed(1)} s</text>`)}
      ${lanes.map(({ t, own }, i) => html`<${Lane} ...${{ t, own, x, limits, onOpen }}
        y=${i * LANE + 4} />`)}
    </svg>`}
    <div class="legend"><span><i class="tools" />tools and agent</span>
      <span><i style=${{ background: sequential(0.5).background }} />generation, by weight version</span>
      <span>${limits[0]}</span><i class="ramp" style=${{ background:
        `linear-gradient(90deg,${CIVIDIS.map((c) => `rgb(${c})`).join(',')})` }} /><span>${limits[1]}</span>
    </div>
    ${sessions.length === 1 && html`<${Turns} own=${lanes[0].own} start=${start} bundle=${bundle} />`}
  </div>`;
}

// The parts of a completion by weight version: [version, share of its tokens]. Tokens are
// taken to need equal times; of a pruned one only the first and the last version are known.
function partsOf(c) {
  if (c.versions?.length) return c.versions.map(([v, n]) => [v, n / c.response_tokens]);
  if (c.first_version === c.last_version) return [[c.last_version, 1]];
  return [[c.first_version, 0.5], [c.last_version, 0.5]];
}

function Lane({ t, own, x, y, limits, onOpen }) {
  const last = own[own.length - 1], name = t.item < 0 ? 'evaluation' : `rank ${t.rank}`;
  const open = onOpen && { tabindex: 0, role: 'button', 'aria-label': `Open ${name}`,
    class: 'lane', onClick: () => onOpen(t),
    onKeyDown: (event) => {
      if (event.key !== 'Enter') return;
      event.stopPropagation();
      onOpen(t);
    } };
  return html`<g ...${open}>
    <text x="0" y=${y + 13}>${name} ${t.success >= 1 ? '✓' : '✗'}</text>
    <line class="tools" x1=${x(own[0].started_s)} x2=${x(last.ended_s)} y1=${y + 9} y2=${y + 9} />
    ${own.map((c) => html`<${Generation} ...${{ c, x, y, limits }} />`)}</g>`;
}

function Generation({ c, x, y, limits }) {
  const left = x(c.started_s), whole = Math.max(2, x(c.ended_s) - left);
  let share = 0;
  const parts = partsOf(c).map(([version, part]) => {
    const at = left + share * whole, width = part * whole;
    share += part;
    const colors = MODES.version.scale(version ?? limits[0], limits);
    return html`<rect x=${at} y=${y} width=${width} height="18" data-version=${version}
        style=${{ fill: colors.background }} />
      ${width > 26 && html`<text class="v" x=${at + 5} y=${y + 13}
        style=${{ fill: colors.color }}>v${version}</text>`}`;
  });
  return html`<g class="generation" data-completion=${c.id}><title>turn ${c.turn}: ${c.response_tokens}
    ${' '}tokens in ${(c.ended_s - c.started_s).toFixed(3)} s, weights ${
      c.first_version}–${c.last_version}</title>${parts}</g>`;
}

function Turns({ own, start, bundle }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label="Turns"><table><thead><tr><th>turn</th><th>start</th><th>seconds</th><th>prompt</th>
    <th>sampled</th><th>weights</th><th>advantage</th><th>weight of a term</th><th>parse</th><th>prompt is</th>
    </tr></thead><tbody>${own.map((c) => html`<tr class=${c.superseded ? 'soft' : ''}>
      <td>${c.turn}</td><td>${(c.started_s - start).toFixed(2)}</td>
      <td>${(c.ended_s - c.started_s).toFixed(3)}</td><td>${c.prompt_tokens}</td>
      <td>${c.response_tokens}</td><td>${c.lineage ? `${c.lineage}/` : ''}${c.first_version}–${c.last_version}</td>
      <td>${signedText(c.advantage)}</td><td>${c.weight == null ? '–' : c.weight.toExponential(2)}</td>
      <td>${c.status}</td><td>${originOf(bundle, c)}</td></tr>`)}</tbody></table></div>`;
}

function originOf(bundle, c) {
  const parent = bundle.byId.get(c.parent);
  if (parent) return `turn ${parent.turn} extended`;
  return c.turn ? `new: ${c.fork_reason ?? 'first of a branch'}` : 'the first';
}
