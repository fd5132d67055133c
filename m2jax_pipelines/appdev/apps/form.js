const name = h('input', {autocomplete: 'off'});
const code = h('input', {autocomplete: 'off'});
const amount = h('input', {inputMode: 'numeric', autocomplete: 'off'});
const agree = h('input', {type: 'checkbox'});
const summary = shown('summary');
const errors = Object.fromEntries(['name', 'code', 'amount', 'agree'].map((key) =>
  [key, h('p', {className: 'error', 'data-testid': `error-${key}`})]));
const matches = () => new RegExp(CONFIG.whole ? `^${CONFIG.pattern}$` : CONFIG.pattern)
  .test(code.value);
const inRange = (n) => Number.isInteger(n) && n >= CONFIG.low && n <= CONFIG.high;
function submit(event) {
  event.preventDefault();
  const length = name.value.trim().length, count = Number(amount.value);
  const wrong = {
    name: length < CONFIG.shortest && CONFIG.name,
    code: !matches(),
    amount: !amount.value.trim() || (CONFIG.range ? !inRange(count) : Number.isNaN(count)),
    agree: !agree.checked && CONFIG.agree,
  };
  for (const key of Object.keys(errors))
    errors[key].textContent = wrong[key] ? CONFIG.messages[key] : '';
  const fine = !Object.values(wrong).some(Boolean);
  summary.textContent = fine ? CONFIG.summary.replace('{name}', name.value.trim())
    .replace('{code}', code.value).replace('{amount}', count) : '';
  if (fine && CONFIG.empties) for (const f of [name, code, amount]) f.value = '';
}
root.append(h('form', {onsubmit: submit, noValidate: true},
  field(CONFIG.labels.name, name), errors.name, field(CONFIG.labels.code, code),
  errors.code, field(CONFIG.labels.amount, amount), errors.amount,
  field(CONFIG.labels.agree, agree), errors.agree, h('button', {}, CONFIG.submit)),
  summary);
