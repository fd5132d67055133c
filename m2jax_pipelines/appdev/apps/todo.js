const KEY = 'entries';
let entries = CONFIG.persist ? JSON.parse(localStorage.getItem(KEY) ?? '[]') : [];
let filter = CONFIG.filters[0];
const input = h('input', {autocomplete: 'off'});
const list = h('ul');
const count = shown('count');
const filters = CONFIG.filters.map((name) =>
  button(name, () => { filter = name; draw(); }));
const same = (a, b) => a.toLowerCase() === b.toLowerCase();

function add() {
  const text = CONFIG.trim ? input.value.trim() : input.value;
  input.value = '';
  if (CONFIG.blank && !text.trim()) return;
  if (CONFIG.unique && entries.some((e) => same(e.text, text))) return;
  const entry = {text, done: false};
  if (CONFIG.first) entries.unshift(entry); else entries.push(entry);
  draw();
}
function draw() {
  if (CONFIG.persist) localStorage.setItem(KEY, JSON.stringify(entries));
  const [, open, done] = CONFIG.filters;
  const chosen = entries.filter((e) =>
    !CONFIG.filter || (filter !== open || !e.done) && (filter !== done || e.done));
  list.replaceChildren(...chosen.map((e) => h('li', {className: 'row'},
    h('input', {type: 'checkbox', checked: e.done, 'aria-label': e.text,
      onchange: () => { e.done = !e.done; draw(); }}),
    h('span', {'data-testid': 'entry'}, e.text),
    button('Remove', () => {
      if (CONFIG.remove) entries = entries.filter((x) => x !== e);
      draw();
    }, {'aria-label': `Remove ${e.text}`}))));
  const left = entries.filter((e) => !CONFIG.count || !e.done).length;
  count.textContent = CONFIG.counted.replace('{left}', left)
    .replace('{all}', entries.length);
  filters.forEach((b) => b.setAttribute('aria-pressed', b.textContent === filter));
}
const actions = [...filters];
if (CONFIG.clearing) {
  actions.push(button(CONFIG.clearing, () => {
    if (CONFIG.clear) entries = entries.filter((e) => !e.done);
    draw();
  }));
}
root.append(
  h('form', {onsubmit: (event) => { event.preventDefault(); add(); }},
    field(CONFIG.label, input), h('button', {}, CONFIG.add)),
  h('div', {className: 'row'}, ...actions), list, count);
draw();
