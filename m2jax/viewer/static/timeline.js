// When a group's or a trajectory's completions ran, and with which weights.

const LANE = 26, LEFT = 92, WIDTH = 1000;

function Timeline({ bundle, sessions, onOpen }) {
  const lanes = sessions.map((session) => {
    const t = bundle.trajectories.find((x) => x.session === session);
    const own = bundle.completions.filter((c) => c.session === session)
      .sort((a, b) => a.started_s - b.started_s);
    return { t, own };
  }).filter(({ own }) => own.length);
  if (!lanes.length) return html`<p class="soft pad">No completions are recorded.</p>`;
  const all = lanes.flatMap(({ own }) => own);
  const start = Math.min(...all.map((c) => c.started_s));
  const end = Math.max(...all.map((c) => c.ended_s), start + 1e-3);
  const x = (s) => LEFT + ((s - start) / (end - start)) * (WIDTH - LEFT - 8);
  const limits = limitsOf('version', bundle), height = lanes.length * LANE + 30;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((f) => start + f * (end - start));
  return html`<div class="timeline">
    <svg viewBox=${`0 0 ${WIDTH} ${height}`} role="img"
      aria-label=${`Timeline of ${lanes.length} trajectories over ${(end - start).toFixed(1)} seconds`}>
      ${ticks.map((s) => html`<line class="grid" x1=${x(s)} x2=${x(s)} y1="0" y2=${height - 22} />
        <text x=${x(s)} y=${height - 6} text-anchor="middle">${(s - start).toFixed(1)} s</text>`)}
      ${lanes.map(({ t, own }, i) => html`<${Lane} ...${{ t, own, x, limits, onOpen }}
        y=${i * LANE + 4} />`)}
    </svg>
    <div class="legend"><span><i class="tools" />tools and agent</span>
      <span><i style=${{ background: sequential(0.5).background }} />generation, by weight version</span>
      <span>${limits[0]}</span><i class="ramp" style=${{ background:
        `linear-gradient(90deg,${CIVIDIS.map((c) => `rgb(${c})`).join(',')})` }} /><span>${limits[1]}</span>
    </div>
    ${sessions.length === 1 && html`<${Turns} own=${lanes[0].own} start=${start} bundle=${bundle} />`}
  </div>`;
}

function Lane({ t, own, x, y, limits, onOpen }) {
  const last = own[own.length - 1], name = t.item < 0 ? 'evaluation' : `rank ${t.rank}`;
  return html`<g class="lane" onClick=${() => onOpen?.(t)}>
    <text x="0" y=${y + 13}>${name} ${t.success >= 1 ? '✓' : '✗'}</text>
    <line class="tools" x1=${x(own[0].started_s)} x2=${x(last.ended_s)} y1=${y + 9} y2=${y + 9} />
    ${own.map((c) => {
      const colors = MODES.version.scale(c.last_version ?? limits[0], limits);
      const width = Math.max(2, x(c.ended_s) - x(c.started_s));
      return html`<rect x=${x(c.started_s)} y=${y} width=${width} height="18" rx="2"
          style=${{ fill: colors.background }}><title>turn ${c.turn}: ${c.response_tokens} tokens in
          ${' '}${(c.ended_s - c.started_s).toFixed(3)} s, weights ${c.first_version}–${c.last_version}</title></rect>
        ${width > 26 && html`<text class="v" x=${x(c.started_s) + 5} y=${y + 13}
          style=${{ fill: colors.color }}>v${c.last_version}</text>`}`;
    })}</g>`;
}

function Turns({ own, start, bundle }) {
  return html`<table><thead><tr><th>turn</th><th>start</th><th>seconds</th><th>prompt</th>
    <th>sampled</th><th>weights</th><th>advantage</th><th>weight of a term</th><th>parse</th><th>prompt is</th>
    </tr></thead><tbody>${own.map((c) => html`<tr class=${c.superseded ? 'soft' : ''}>
      <td>${c.turn}</td><td>${(c.started_s - start).toFixed(2)}</td>
      <td>${(c.ended_s - c.started_s).toFixed(3)}</td><td>${c.prompt_tokens}</td>
      <td>${c.response_tokens}</td><td>${c.lineage ? `${c.lineage}/` : ''}${c.first_version}–${c.last_version}</td>
      <td>${signedText(c.advantage)}</td><td>${c.weight == null ? '–' : c.weight.toExponential(2)}</td>
      <td>${c.status}</td><td>${originOf(bundle, c)}</td></tr>`)}</tbody></table>`;
}

function originOf(bundle, c) {
  const parent = bundle.byId.get(c.parent);
  if (parent) return `turn ${parent.turn} extended`;
  return c.turn ? `new: ${c.fork_reason ?? 'first of a branch'}` : 'the first';
}
