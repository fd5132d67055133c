const columns = CONFIG.columns.map((name) => ({name, cards: []}));
const input = h('input', {autocomplete: 'off'});
const board = h('div', {className: 'columns'});
const note = shown('note');
const full = (column) => CONFIG.limited && column.name === CONFIG.columns[1] &&
  column.cards.length >= CONFIG.limit;
function move(card, from, to) {
  note.textContent = '';
  if (full(columns[to])) {
    note.textContent = `${columns[to].name} ${CONFIG.fullness}`;
    return;
  }
  columns[from].cards = columns[from].cards.filter((c) => c !== card);
  columns[to].cards.push(card);
  draw();
}
function add(event) {
  event.preventDefault();
  const text = input.value.trim();
  input.value = '';
  if (text || !CONFIG.blank) columns[CONFIG.enters ? 0 : 1].cards.push(text);
  draw();
}
const named = (what, card) => ({'aria-label': `${what} ${card}`});
const draw = () => board.replaceChildren(...columns.map((column, at) => {
  const title = h('h2', {}, column.name);
  title.id = `column-${at}`;
  return h('section', {'aria-labelledby': title.id}, title,
    h('p', {'data-testid': 'count'}, CONFIG.counted
      .replace('{cards}', CONFIG.counts ? column.cards.length : columns.length)),
    ...column.cards.map((card) => {
      const buttons = [];
      if (at > 0) {
        buttons.push(button(CONFIG.left, () => move(card, at, CONFIG.back ? at - 1 : at),
          named(CONFIG.left, card)));
      }
      if (at < columns.length - 1)
        buttons.push(button(CONFIG.right, () => move(card, at, at + 1),
          named(CONFIG.right, card)));
      else if (CONFIG.archiving)
        buttons.push(button('Archive', () => {
          if (CONFIG.archive) column.cards = column.cards.filter((c) => c !== card);
          draw();
        }, named('Archive', card)));
      return h('div', {className: 'row'}, h('span', {'data-testid': 'card'}, card),
        ...buttons);
    }));
}));
root.append(h('form', {onsubmit: add}, field(CONFIG.label, input),
  h('button', {}, CONFIG.add)), note, board);
draw();
