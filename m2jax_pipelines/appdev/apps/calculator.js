const display = h('div', {className: 'display', 'data-testid': 'display'}, '0');
let tokens = [], entry = '0', fresh = true;
const divide = (a, b) => b !== 0 ? a / b : CONFIG.zero ? NaN : 0;
const apply = (a, op, b) => op === '+' ? a + b : op === '−' ? a - b
  : op === '×' ? a * b : divide(a, b);
function value(list) {
  const rest = [...list];
  const fold = (i) => rest.splice(i - 1, 3, apply(rest[i - 1], rest[i], rest[i + 1]));
  if (CONFIG.precedence) {
    for (let i = 1; i < rest.length;)
      if ('×÷'.includes(rest[i])) fold(i); else i += 2;
  }
  while (rest.length > 1) fold(1);
  return rest[0];
}
const show = (text) => { display.textContent = text; };
function digit(d) {
  if (d === '.' && !fresh && entry.includes('.') && CONFIG.point) return;
  if (fresh) entry = d === '.' ? '0.' : d;
  else entry = entry === '0' && d !== '.' ? d : entry + d;
  fresh = false;
  show(entry);
}
function operator(op) { tokens.push(Number(entry), op); fresh = true; }
function equals() {
  const found = value([...tokens, Number(entry)]);
  tokens = [];
  fresh = true;
  entry = Number.isFinite(found)
    ? String(CONFIG.rounded ? +found.toFixed(CONFIG.decimals) : found) : CONFIG.error;
  show(entry);
}
function clear() {
  if (!CONFIG.clear) return;
  [tokens, entry, fresh] = [[], '0', true];
  show(entry);
}
function back() {
  if (fresh || !CONFIG.back) return;
  entry = entry.slice(0, -1) || '0';
  show(entry);
}
const keys = h('div', {className: 'keys'});
for (const key of '789÷456×123−0.=+')
  keys.append(button(key, () => '+−×÷'.includes(key) ? operator(key)
    : key === '=' ? equals() : digit(key)));
keys.append(button(CONFIG.clearing, clear));
if (CONFIG.deleting) keys.append(button(CONFIG.deleting, back));
root.append(display, keys);
