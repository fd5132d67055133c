const two = (n) => String(n).padStart(2, '0');
const clock = (s) => CONFIG.padded ? `${two(Math.floor(s / 60))}:${two(s % 60)}` : `${s}`;
const display = h('p', {className: 'display', 'data-testid': 'time'});
const status = shown('status');
const list = h('ul');
const seconds = h('input', {inputMode: 'numeric', autocomplete: 'off'});
let total = 0, past = 0, since = null, laps = [];
const elapsed = () => past + (since === null ? 0 : Date.now() - since);
function draw() {
  const s = Math.floor(elapsed() / 1000);
  const left = Math.max(0, total - s);
  display.textContent = clock(CONFIG.countdown ? left : s);
  if (CONFIG.countdown && since !== null && left === 0 && CONFIG.ends) {
    past = total * 1000;
    since = null;
    status.textContent = CONFIG.done;
  }
  list.replaceChildren(...laps.map((lap) => h('li', {'data-testid': 'lap'}, lap)));
}
function start() {
  if (since !== null) return;
  if (CONFIG.countdown && past === 0) total = Number(seconds.value) || 0;
  if (CONFIG.countdown && total * 1000 <= past) return;
  since = Date.now();
  status.textContent = CONFIG.running;
  draw();
}
function pause() {
  if (since === null || !CONFIG.pause) return;
  past = elapsed();
  since = null;
  status.textContent = CONFIG.paused;
  draw();
}
function reset() {
  if (!CONFIG.reset) return;
  [past, since, total, laps] = [0, null, 0, []];
  status.textContent = CONFIG.ready;
  draw();
}
setInterval(draw, 100);
if (CONFIG.countdown) root.append(field('Seconds', seconds));
root.append(display, h('div', {className: 'row'}, button('Start', start),
  button(CONFIG.pausing, pause), button('Reset', reset)), status);
if (!CONFIG.countdown) {
  root.append(button('Lap', () => {
    const at = clock(Math.floor(elapsed() / 1000));
    if (CONFIG.newest) laps.unshift(at); else laps.push(at);
    draw();
  }), list);
}
status.textContent = CONFIG.ready;
draw();
