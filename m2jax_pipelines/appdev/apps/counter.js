let value = CONFIG.start;
let history = [];
const step = h('input', {value: '1', inputMode: 'numeric', autocomplete: 'off'});
const display = h('p', {className: 'display', 'data-testid': 'value'});
const note = shown('note');
function change(sign) {
  const size = Number(step.value);
  if (CONFIG.checked && !(Number.isInteger(size) && size > 0)) {
    note.textContent = CONFIG.wrong;
    return;
  }
  const next = value + sign * size;
  note.textContent = '';
  if (CONFIG.bounded && (next < CONFIG.low || next > CONFIG.high)) {
    note.textContent = CONFIG.limit;
    return;
  }
  history.push(value);
  value = next;
  draw();
}
function undo() {
  if (history.length && CONFIG.undo) value = history.pop();
  draw();
}
function draw() {
  display.textContent = `${value} ${CONFIG.unit}`;
  undoing.disabled = CONFIG.greyed && !history.length;
}
const undoing = button('Undo', undo);
root.append(display, field('Step', step), h('div', {className: 'row'},
  button(CONFIG.up, () => change(1)), button(CONFIG.down, () => change(-1)), undoing,
  button('Reset', () => { if (CONFIG.reset) [value, history] = [CONFIG.start, []]; draw(); })),
  note);
draw();
