// Returns what is there: every text's box, size and colours, and every control's box.
// `visible` is for looks; `shown`: a person can read it where it is.
// Runs in an isolated world; see visual.py for what is done with it.
(() => {
  const MAX_TEXTS = 600;
  const rgba = (text) => {
    const m = /^rgba?\(([\d.]+), ([\d.]+), ([\d.]+)(?:, ([\d.]+))?\)$/.exec(text);
    return m ? [+m[1], +m[2], +m[3], m[4] === undefined ? 1 : +m[4]] : null;
  };
  const styles = new Map();
  const styleOf = (e) => {
    if (!styles.has(e)) styles.set(e, getComputedStyle(e));
    return styles.get(e);
  };
  const up = (e) => e.parentElement || (e.getRootNode().host ?? null);
  // Colour behind an element: null if an image, a filter or an unknown colour is there.
  const behind = (e) => {
    const layers = [];
    for (let x = e; x; x = up(x)) {
      const s = styleOf(x);
      if (s.backgroundImage !== 'none' || s.filter !== 'none') return null;
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
  const transformed = (e) => {
    for (let x = e; x; x = up(x))
      if (styleOf(x).transform !== 'none' || styleOf(x).clipPath !== 'none') return true;
    return false;
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
  const covers = [];
  for (const e of document.querySelectorAll('*')) {
    const s = styleOf(e);
    if (s.pointerEvents !== 'none' || s.display === 'none') continue;
    const c = rgba(s.backgroundColor);
    const opaque = (c && c[3] > 0) || s.backgroundImage !== 'none';
    const drawn = ['CANVAS', 'IMG', 'SVG', 'svg', 'VIDEO'].includes(e.tagName);
    if (opaque || drawn || e.childNodes.length)
      if (s.position !== 'static') covers.push(e);
  }
  const hit = (e, box) => {
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    for (const c of covers) {
      if (c.contains(e) || e.contains(c)) continue;
      const r = c.getBoundingClientRect();
      if (x > r.left && x < r.right && y > r.top && y < r.bottom) return false;
    }
    if (x < 0 || y < 0) return false;
    if (x >= innerWidth || y >= innerHeight) return true; // by scrolling
    let top = document.elementFromPoint(x, y);
    while (top && top.shadowRoot && top.shadowRoot.elementFromPoint(x, y) !== top) {
      const inner = top.shadowRoot.elementFromPoint(x, y);
      if (!inner) break;
      top = inner;
    }
    if (!top) return false;
    if (top === e || e.contains(top)) return true;
    if (!top.contains(e)) return styleOf(e).pointerEvents === 'none';
    return true;
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
      shown: opacity >= 0.5 && !transformed(e) && !cut && hit(e, box),
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
