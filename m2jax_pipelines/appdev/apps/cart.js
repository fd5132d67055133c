const money = (cents) => `${CONFIG.sign}${(cents / 100).toFixed(2)}`;
const rows = h('div'), coupon = h('input', {autocomplete: 'off'});
const [subtotal, discount, total] = ['subtotal', 'discount', 'total'].map((id) => shown(id));
const note = shown('note');
let products = [], counts = [], used = false;
const percent = (cents, p) => Math.floor((cents * p + 50) / 100);
function draw() {
  const sum = products.reduce((s, p, i) => s + p.cents * counts[i], 0);
  let off = 0;
  if (sum >= CONFIG.from && CONFIG.discounted) off = percent(sum, CONFIG.percent);
  if (used) off += percent(sum - off, CONFIG.coupon);
  subtotal.textContent = money(sum);
  discount.textContent = money(off);
  total.textContent = money(sum - off + (CONFIG.taxed ? percent(sum - off, CONFIG.tax) : 0));
}
function rowOf(product, i) {
  const count = h('span', {'data-testid': 'quantity'}, '0');
  const change = (by) => {
    counts[i] = CONFIG.bounded ? Math.max(0, counts[i] + by) : counts[i] + by;
    count.textContent = counts[i];
    draw();
  };
  return h('div', {className: 'row', role: 'group', 'aria-label': product.name},
    h('span', {}, `${product.name} ${money(product.cents)}`),
    button(CONFIG.more, () => change(1), {'aria-label': `${CONFIG.more} ${product.name}`}),
    button(CONFIG.less, () => change(-1), {'aria-label': `${CONFIG.less} ${product.name}`}),
    count);
}
root.append(rows);
if (CONFIG.coupons) {
  root.append(field('Coupon', coupon), button('Apply', () => {
    used = coupon.value.trim().toUpperCase() === CONFIG.code || !CONFIG.strict;
    note.textContent = used ? 'Coupon applied' : 'Unknown coupon';
    draw();
  }), note);
}
root.append(...[['Subtotal', subtotal], ['Discount', discount], ['Total', total]].map(
  ([name, place]) => h('div', {className: 'row'}, h('strong', {}, name), place)));
fetch('products.json').then((a) => a.json()).then((data) => {
  products = data;
  counts = data.map(() => 0);
  rows.append(...products.map(rowOf));
  draw();
});
