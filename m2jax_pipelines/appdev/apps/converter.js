const units = Object.keys(CONFIG.units);
const amount = h('input', {inputMode: 'decimal', autocomplete: 'off'});
const choice = (chosen) => {
  const select = h('select', {onchange: draw}, ...units.map((u) => h('option', {}, u)));
  select.value = chosen;
  return select;
};
const from = choice(units[0]), to = choice(units[1]);
const result = shown('result');
function draw() {
  const text = amount.value.trim(), value = Number(text);
  const wrong = text === '' || !Number.isFinite(value);
  if (wrong && CONFIG.checked) result.textContent = CONFIG.wrong;
  else if (value < 0 && CONFIG.positive) result.textContent = CONFIG.wrong;
  else {
    const there = value * CONFIG.units[from.value] / CONFIG.units[to.value];
    result.textContent = `${there.toFixed(CONFIG.rounded ? CONFIG.decimals : 6)} ` +
      to.value;
  }
}
amount.addEventListener('input', () => { if (CONFIG.live) draw(); });
root.append(field(CONFIG.label, amount), field('From', from), field('To', to));
if (CONFIG.swapping) {
  root.append(button('Swap', () => {
    if (CONFIG.swap) [from.value, to.value] = [to.value, from.value];
    draw();
  }));
}
root.append(result);
draw();
