// Samples what is shown while nothing is done. The value is an object whose function
// `stop` returns what alternates: a value that comes back, or more than three values.
// Runs in an isolated world. Values that are read only once in passing do not count.
(() => {
  const EVERY_MS = 100, MAX_ELEMENTS = 200, MAX_VALUES = 3;
  const found = new Map();
  const note = (key, value) => {
    const row = found.get(key) ?? {values: [], last: undefined, back: false};
    found.set(key, row);
    const again = row.last === value;
    row.last = value;
    if (!again || row.values.at(-1) === value) return;
    row.back ||= row.values.includes(value);
    row.values.push(value);
  };
  const sample = () => {
    const counts = {};
    const every = document.querySelectorAll('[data-testid], button, input, select');
    for (const e of [...every].slice(0, MAX_ELEMENTS)) {
      const name = e.dataset.testid ?? e.tagName.toLowerCase();
      const key = `${name} ${counts[name] = (counts[name] ?? 0) + 1}`;
      note(`text of ${key}`, e.innerText);
      if ('disabled' in e) note(`disabled of ${key}`, e.disabled);
      if ('checked' in e) note(`checked of ${key}`, e.checked);
      if ('value' in e) note(`value of ${key}`, e.value);
    }
  };
  sample();
  const timer = setInterval(sample, EVERY_MS);
  const stop = () => {
    clearInterval(timer);
    return [...found].filter(([, r]) => r.back || r.values.length > MAX_VALUES)
      .map(([key, r]) => `${key}: ${r.values.slice(0, 5).join(', then ')}`).slice(0, 5);
  };
  return {stop};
})()
