// Colour scales that people with any colour vision can tell apart: cividis for versions,
// one hue that grows stronger for magnitudes, blue to orange through white for signed
// values, Okabe and Ito's colours for classes.

const CIVIDIS = [
  [0, 34, 78], [42, 63, 108], [87, 93, 109], [125, 124, 120], [166, 157, 117],
  [211, 192, 100], [254, 232, 56],
];
const SIGNED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [253, 184, 99], [179, 88, 6]];

function at(stops, fraction) {
  const x = Math.min(Math.max(fraction, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(x), stops.length - 2), t = x - i;
  return stops[i].map((a, k) => Math.round(a + t * (stops[i + 1][k] - a)));
}

// Black or white text, whichever has the larger contrast: 4.58 or more on any colour
// (WCAG's relative luminance; the two are equal at 0.179).
function paint(rgb) {
  const [r, g, b] = rgb.map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return { background: `rgb(${rgb})`, color: light > 0.179 ? '#000' : '#fff' };
}

// Nothing at 0, so that what is ordinary stays plain text.
const BLUE = [0, 114, 178];
const strength = (fraction) => {
  const a = 0.9 * Math.min(Math.max(fraction, 0), 1);
  const panel = matchMedia('(prefers-color-scheme: dark)').matches ? [27, 30, 34] : [255, 255, 255];
  const { color } = paint(panel.map((v, k) => v + a * (BLUE[k] - v)));
  return { background: `rgba(${BLUE}, ${a.toFixed(3)})`, color: a > 0.2 ? color : undefined };
};
const STRENGTHS = [0, 0.5, 1].map((f) => strength(f).background);
const sequential = (fraction) => paint(at(CIVIDIS, fraction));
const signed = (value, limit) => paint(at(SIGNED, 0.5 + 0.5 * (value / (limit || 1))));

const CLASSES = {
  trained: { rgb: [86, 180, 233], label: 'sampled, in the loss' },
  unused: { rgb: [230, 159, 0], label: 'sampled, not in the loss' },
};

// What tokens can be coloured by. value(token): a number, a class, or undefined.
const first = (name) => (token) => token.terms[0]?.[name];
const MODES = {
  none: { label: 'none' },
  logprob: {
    label: 'log-probability', value: first('logprob'), limits: [-6, 0],
    text: (v) => v.toFixed(3), scale: (v) => strength(v / -6),
    stops: [...STRENGTHS].reverse(),
  },
  entropy: {
    label: 'entropy', value: first('entropy'), limits: [0, 3], recorded: true,
    text: (v) => `${v.toFixed(3)} nats`, scale: (v) => strength(v / 3),
    stops: STRENGTHS,
  },
  mismatch: {
    label: 'learner − engine', value: first('mismatch'), limits: [-0.5, 0.5],
    recorded: true, text: (v) => v.toExponential(2), scale: (v) => signed(v, 0.5),
    diverging: true,
  },
  version: {
    label: 'weight version', value: first('version'), text: (v) => String(v),
    scale: (v, [low, high]) => sequential(high > low ? (v - low) / (high - low) : 0.5),
  },
  advantage: {
    label: 'advantage', value: first('advantage'), limits: [-2, 2],
    text: (v) => signedText(v), scale: (v) => signed(v, 2), diverging: true,
  },
  mask: {
    label: 'loss mask',
    value: (token) => token.terms.length
      ? (token.terms.some((t) => t.weight > 0 || (t.weight == null && t.advantage))
        ? 'trained' : 'unused')
      : undefined,
    text: (v) => CLASSES[v].label, scale: (v) => paint(CLASSES[v].rgb), classes: CLASSES,
  },
};

// The range of the weight versions, which has no fixed limits.
function limitsOf(mode, bundle) {
  if (MODES[mode].limits) return MODES[mode].limits;
  const versions = bundle.completions.flatMap((c) => (c.versions ?? []).map(([v]) => v));
  return versions.length ? [Math.min(...versions), Math.max(...versions)] : [0, 0];
}

const signedText = (v) => (v == null ? '–' : `${v < 0 ? '−' : '+'}${Math.abs(v).toFixed(2)}`);

function Legend({ mode, bundle }) {
  const m = MODES[mode];
  if (!m.value) return null;
  const limits = limitsOf(mode, bundle);
  if (m.classes) {
    return html`<div class="legend" role="note">${Object.values(m.classes).map((c) =>
      html`<span><i style=${{ background: `rgb(${c.rgb})` }} />${c.label}</span>`)}
      <span><i class="empty" />prompt and observations</span></div>`;
  }
  const stops = m.stops ?? (m.diverging ? SIGNED : CIVIDIS).map((rgb) => `rgb(${rgb})`);
  const missing = m.recorded && !bundle.completions.some(
    (c) => c.extra[mode === 'entropy' ? 'entropy' : 'learner_logprob']);
  return html`<div class="legend" role="note"><span>${m.label}</span>
    <span>${limits[0]}</span>
    <i class="ramp" style=${{ background: `linear-gradient(90deg,${stops})` }} />
    <span>${limits[1]}</span>
    ${missing && html`<span class="warn">not recorded for this trajectory:
      python -m experiments.replay --record adds it</span>`}</div>`;
}

function ColorPicker({ mode, setMode }) {
  return html`<label class="pick">Colour <select value=${mode} aria-label="Colour tokens by"
    onChange=${(e) => setMode(e.target.value)}>${Object.entries(MODES).map(([name, m]) =>
      html`<option value=${name}>${m.label}</option>`)}</select></label>`;
}
