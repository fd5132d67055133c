// Returns what is there: every text's box, size and colours, and every control's box.
// Runs in an isolated world; see visual.py for what is done with it.
(() => {
  const MAX_TEXTS = 600;
  let pixel = null;
  const rgba = (text) => {
    const m = /^rgba?\(([\d.]+), ([\d.]+), ([\d.]+)(?:, ([\d.]+))?\)$/.exec(text);
    if (m) return [+m[1], +m[2], +m[3], m[4] === undefined ? 1 : +m[4]];
    if (!CSS.supports('color', text)) return null;
    pixel ??= new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = text; // oklch() and others, in sRGB
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const styles = new Map();
  const styleOf = (e) => {
    if (!styles.has(e)) styles.set(e, getComputedStyle(e));
    return styles.get(e);
  };
  const up = (e) => e.parentElement || (e.getRootNode().host ?? null);
  const SHADOWS = /^(none|(\s*drop-shadow\(([^()]|\([^()]*\))*\))*)$/;
  const recolours = (filter) => !SHADOWS.test(filter);
  // Colour behind an element: null if an image, a filter or an unknown colour is there.
  const behind = (e) => {
    const layers = [];
    for (let x = e; x; x = up(x)) {
      const s = styleOf(x);
      if (s.backgroundImage !== 'none' || recolours(s.filter)) return null;
      if (s.mixBlendMode !== 'normal') return null;
      const c = rgba(s.backgroundColor);
      if (!c) return null;
      if (c[3] > 0) layers.push(c);
      if (c[3] === 1) break;
    }
    let out = [255, 255, 255];
    for (const c of layers.reverse())
      out = out.map((v, i) => v * (1 - c[3]) + c[i] * c[3]);
    return out;
  };
  const opacityOf = (e) => {
    let o = 1;
    for (let x = e; x; x = up(x)) o *= +styleOf(x).opacity;
    return o;
  };
  const clipped = (e, box) => {
    for (let x = e; x && x !== document.body; x = up(x)) {
      const s = styleOf(x);
      if (s.overflowX === 'visible' && s.overflowY === 'visible') continue;
      const r = x.getBoundingClientRect();
      const w = Math.min(box.right, r.right) - Math.max(box.left, r.left);
      const h = Math.min(box.bottom, r.bottom) - Math.max(box.top, r.top);
      if (w < box.width * 0.5 || h < box.height * 0.5) return true;
    }
    return false;
  };
  const texts = [];
  const add = (e, text, box, style, editable) => {
    if (!text || box.width <= 0 || box.height <= 0) return;
    if (styleOf(e).visibility !== 'visible') return;
    const color = rgba(style.color), back = behind(e), opacity = opacityOf(e);
    const fill = rgba(style.webkitTextFillColor), cut = clipped(e, box);
    texts.push({
      text: text.slice(0, 300), editable,
      box: [box.left + scrollX, box.top + scrollY, box.width, box.height],
      size: parseFloat(style.fontSize), bold: +style.fontWeight >= 700,
      color: fill || color, back, opacity,
      visible: opacity > 0 && !cut,
      disabled: !!e.closest(':disabled, [aria-disabled="true"]'),
    });
  };
  const fields = 'INPUT TEXTAREA SELECT'.split(' ');
  const walk = (root) => {
    const it = document.createTreeWalker(
      root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
    for (let n = it.nextNode(); n && texts.length < MAX_TEXTS; n = it.nextNode()) {
      if (n.nodeType === 1) {
        if (n.shadowRoot) walk(n.shadowRoot);
        if (fields.includes(n.tagName) && n.type !== 'hidden') {
          const value = n.tagName === 'SELECT'
            ? (n.selectedOptions[0]?.text ?? '') : n.value;
          const typed = !['checkbox', 'radio', 'range', 'color'].includes(n.type);
          if (typed) add(n, value.trim(), n.getBoundingClientRect(), styleOf(n), true);
        }
        continue;
      }
      const e = n.parentElement ?? n.getRootNode().host;
      const text = n.data.replace(/\s+/g, ' ').trim();
      if (!text || !e || e.closest('script, style, noscript, template')) continue;
      if (e.closest('select, textarea')) continue;
      const range = document.createRange();
      range.selectNodeContents(n);
      const style = styleOf(e);
      let shown = text;
      if (style.textTransform === 'uppercase') shown = text.toUpperCase();
      if (style.textTransform === 'lowercase') shown = text.toLowerCase();
      add(e, shown, range.getBoundingClientRect(), style, false);
    }
  };
  walk(document);
  const controls = [];
  for (const e of document.querySelectorAll('button, input, select, textarea, a[href]')) {
    const r = e.getBoundingClientRect();
    if (r.width <= 0 || r.height <= 0 || styleOf(e).visibility !== 'visible') continue;
    const label = e.labels && e.labels[0] && e.labels[0].getBoundingClientRect();
    const box = label && ['checkbox', 'radio'].includes(e.type) ? label : r;
    controls.push({tag: e.tagName.toLowerCase(), text: (e.innerText ?? '').trim(),
      label: e.getAttribute('aria-label') ?? '',
      box: [r.left + scrollX, r.top + scrollY,
        Math.max(box.width, r.width), Math.max(box.height, r.height)]});
  }
  return {texts, controls,
    scroll: Math.max(document.documentElement.scrollWidth,
      document.body?.scrollWidth ?? 0),
    width: innerWidth, elements: document.querySelectorAll('*').length};
})()
