// The value is an object whose functions find, place, hide and show texts, and
// `restore` where the page was scrolled to; see seen.py.
// Runs in an isolated world.
(() => {
  const MAX_TEXTS = 600, MAX_CHARS = 400, SLACK = 1;
  const up = (e) => e.parentElement || (e.getRootNode().host ?? null);
  const chain = (e) => { const all = []; for (; e; e = up(e)) all.push(e); return all; };
  const range = document.createRange();
  const rectOf = (node) => {
    range.selectNodeContents(node);
    return range.getBoundingClientRect();
  };
  // What pixels do not tell: why a text does not read as it is in the page, or ''.
  const ORNAMENT = /^[\s"'•·▪●◆★☆✓✔✗✘→←↑↓▲▼▶◀›‹»«|*:]*$/;
  const generated = (e, pseudo, own) => {
    const s = getComputedStyle(e, pseudo);
    if (['none', 'normal'].includes(s.content) || s.display === 'none') return false;
    if (/^url|gradient\(/.test(s.content)) return false; // an image: by its pixels
    if (ORNAMENT.test(s.content) || s.visibility !== 'visible' || +s.opacity < 0.1)
      return false;
    return own || ['absolute', 'fixed'].includes(s.position);
  };
  const bare = (family) => family.replace(/["']/g, '').trim().toLowerCase();
  const customFonts = () => {
    const found = new Set();
    for (const face of document.fonts)
      if (face.status !== 'unloaded') found.add(bare(face.family));
    return found;
  };
  const cut = (e) => /text/.test(getComputedStyle(e).webkitBackgroundClip);
  const scaled = (v) =>
    v === 'none' ? v : `scale(${v.split(' ').slice(0, 2).join(',')})`;
  const rotated = (v) => {
    if (v === 'none') return v;
    const axis = v.split(' '), angle = axis.pop();
    const named = {x: '1,0,0', y: '0,1,0', z: '0,0,1'}[axis[0]];
    return `rotate3d(${named ?? (axis.join(',') || '0,0,1')},${angle})`;
  };
  const denied = (e, box, fonts) => {
    const s = getComputedStyle(e);
    if (s.webkitTextSecurity !== 'none') return 'masked characters';
    if (s.writingMode !== 'horizontal-tb') return 'vertical';
    const size = parseFloat(s.fontSize);
    if (parseFloat(s.webkitTextStrokeWidth) > size / 8) return 'stroked';
    if (chain(e).some(cut) && !/^(transparent|rgba\(.*, 0\))$/.test(s.webkitTextFillColor))
      return 'filled over its own shape';
    const families = s.fontFamily.split(',').map(bare);
    if (families.some((f) => fonts.has(f))) return 'in a font of the page';
    let [a, b, c, d] = [1, 0, 0, 1];
    for (const x of chain(e)) {
      const t = getComputedStyle(x), r = x.getBoundingClientRect();
      const own = r.left >= box.x - SLACK && r.right <= box.x + box.width + SLACK
        && r.top >= box.y - SLACK && r.bottom <= box.y + box.height + SLACK;
      if (['::before', '::after'].some((p) => generated(x, p, own)))
        return 'beside generated text';
      for (const v of [t.transform, scaled(t.scale), rotated(t.rotate)]) {
        if (v === 'none') continue;
        const n = new DOMMatrix(v);
        [a, b, c, d] = [n.a * a + n.c * b, n.b * a + n.d * b,
          n.a * c + n.c * d, n.b * c + n.d * d];
      }
    }
    const upright = a > 0 && d > 0 && Math.abs(b) < a / 3 && Math.abs(c) < d / 3;
    return upright ? '' : 'turned or reflected';
  };
  const nodes = [];
  const walk = (root) => {
    const it = document.createTreeWalker(
      root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
    for (let n = it.nextNode(); n && nodes.length < MAX_TEXTS; n = it.nextNode()) {
      if (n.nodeType === 1) { if (n.shadowRoot) walk(n.shadowRoot); continue; }
      const e = n.parentElement ?? n.getRootNode().host;
      if (!e || !n.data.trim()) continue;
      if (e.closest('script, style, noscript, template, select, textarea')) continue;
      if (getComputedStyle(e).visibility !== 'visible') continue;
      if (chain(e).reduce((o, x) => o * +getComputedStyle(x).opacity, 1) < 0.1) continue;
      const rect = rectOf(n);
      if (rect.width > 0 && rect.height > 0) nodes.push({n, e, rect});
    }
  };
  let groups = [];
  const find = (boxes) => {
    walk(document);
    const fonts = customFonts();
    groups = boxes.map((box) => nodes.filter(({rect}) => {
      const x = rect.left + rect.width / 2, y = rect.top + rect.height / 2;
      return x >= box.x - SLACK && x <= box.x + box.width + SLACK
        && y >= box.y - SLACK && y <= box.y + box.height + SLACK;
    }));
    return groups.map((group, i) =>
      group.map(({e}) => denied(e, boxes[i], fonts)).find((why) => why) ?? '');
  };
  const scrolls = (v) => v === 'auto' || v === 'scroll';
  const shift = (low, high, from, to) =>
    low < from ? low - from : high > to ? Math.min(low - from, high - to) : 0;
  // As a person could: what is hidden by overflow is not scrolled to.
  const moved = [];
  const move = (x, by) => {
    if (!by.top && !by.left) return;
    moved.push([x, x.scrollLeft, x.scrollTop]);
    x.scrollBy(by);
  };
  const restore = () => {
    for (const [x, left, top] of moved.splice(0).reverse())
      x.scrollTo({behavior: 'instant', left, top});
  };
  const reveal = ({n, e}) => {
    const root = document.scrollingElement;
    for (const x of chain(e)) {
      if (x === root || x === document.documentElement) break;
      const s = getComputedStyle(x), r = x.getBoundingClientRect(), t = rectOf(n);
      const by = {behavior: 'instant', left: 0, top: 0};
      if (scrolls(s.overflowY)) by.top = shift(t.top, t.bottom, r.top, r.bottom);
      if (scrolls(s.overflowX)) by.left = shift(t.left, t.right, r.left, r.right);
      if (x !== document.body) move(x, by);
    }
    const styles = [document.documentElement, document.body].map((x) =>
      x ? getComputedStyle(x) : {});
    const free = (k) => !styles.some((s) => s[k] === 'hidden' || s[k] === 'clip');
    const t = rectOf(n), by = {behavior: 'instant', left: 0, top: 0};
    if (free('overflowY')) by.top = shift(t.top, t.bottom, 0, innerHeight);
    if (free('overflowX')) by.left = shift(t.left, t.right, 0, innerWidth);
    move(root, by);
  };
  // Each group's texts, as [character, left, top, width, height].
  const place = (first) => {
    if (groups[first].length) reveal(groups[first][0]);
    const chars = ({n}) => {
      const found = [];
      for (let i = 0; i < n.data.length && found.length < MAX_CHARS; ) {
        const c = String.fromCodePoint(n.data.codePointAt(i));
        range.setStart(n, i);
        range.setEnd(n, i += c.length);
        const r = range.getBoundingClientRect();
        if (c.trim()) found.push([c, r.left, r.top, r.width, r.height]);
      }
      return found;
    };
    return {groups: groups.map((g) => g.map(chars)), width: innerWidth,
      height: innerHeight, scrolled: [scrollX, scrollY],
      moved: moved.length > 0};
  };
  let undo = [];
  const hide = () => {
    const targets = new Set();
    for (const {e} of groups.flat()) {
      targets.add(e);
      for (const x of chain(e)) if (cut(x)) targets.add(x);
    }
    for (const e of targets) {
      undo.push([e, e.getAttribute('style')]);
      const clip = cut(e);
      const set = (k, v) => e.style.setProperty(k, v, 'important');
      set('transition', 'none');
      set('-webkit-text-fill-color', 'transparent');
      if (!clip) continue;
      set('background-image', 'none');
      set('background-color', 'transparent');
    }
  };
  const show = () => {
    for (const [e] of undo)
      for (const k of ['-webkit-text-fill-color', 'background-image', 'background-color'])
        e.style.removeProperty(k);
    for (const [e, old] of undo) {
      getComputedStyle(e).color; // before transitions are as they were
      if (old === null) e.removeAttribute('style'); else e.setAttribute('style', old);
    }
    undo = [];
  };
  return {find, place, hide, show, restore};
})()
