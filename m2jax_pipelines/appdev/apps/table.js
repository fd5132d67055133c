const search = h('input', {autocomplete: 'off'});
const select = h('select', {onchange: draw});
const body = h('tbody');
const summary = shown('summary');
let rows = [], sorted = '', down = false;
const [first, group, number] = CONFIG.columns;
function draw() {
  const wanted = search.value.trim();
  const low = (s) => CONFIG.folded ? s.toLowerCase() : s;
  let found = rows.filter((r) => low(r[first]).includes(low(wanted)));
  if (select.value !== CONFIG.all && CONFIG.grouped)
    found = found.filter((r) => r[group] === select.value);
  if (sorted) {
    found = [...found].sort((a, b) => sorted === number && CONFIG.numeric
      ? a[number] - b[number]
      : String(a[sorted]) < String(b[sorted]) ? -1 : 1);
    if (down) found.reverse();
  }
  body.replaceChildren(...found.map((r) => h('tr', {}, h('td', {'data-testid': 'name'},
    r[first]), h('td', {}, r[group]), h('td', {}, String(r[number])))));
  const over = CONFIG.total ? found : rows;
  summary.textContent = CONFIG.summary.replace('{rows}', found.length)
    .replace('{sum}', over.reduce((sum, r) => sum + r[number], 0));
}
const sortBy = (column) => {
  if (sorted === column) { if (CONFIG.toggle) down = !down; }
  else [sorted, down] = [column, CONFIG.down && column === number];
  draw();
};
search.addEventListener('input', draw);
root.append(field('Search', search), field(CONFIG.columns[1], select),
  h('div', {className: 'row'}, button(`Sort by ${first}`, () => sortBy(first)),
    button(`Sort by ${number}`, () => sortBy(number))),
  h('table', {}, h('thead', {}, h('tr', {},
    ...CONFIG.columns.map((c) => h('th', {}, c)))), body), summary);
fetch('data.json').then((answer) => answer.json()).then((data) => {
  rows = data;
  const groups = [...new Set(rows.map((r) => r[group]))].sort();
  select.append(...[CONFIG.all, ...groups].map((g) => h('option', {}, g)));
  draw();
});
