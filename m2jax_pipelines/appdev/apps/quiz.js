let questions = [], at = 0, chosen = null, score = 0, missed = [];
function draw() {
  if (at >= questions.length) return end();
  const q = questions[at];
  const next = button('Next', answer, {disabled: CONFIG.guarded && chosen === null});
  const options = q.options.map((option, i) => {
    const radio = h('input', {type: 'radio', name: 'answer', checked: chosen === i,
      onchange: () => { chosen = i; next.disabled = false; }});
    return h('label', {className: 'row'}, radio, option);
  });
  const count = CONFIG.progress.replace('{at}', at + 1)
    .replace('{all}', questions.length);
  root.replaceChildren(h('p', {'data-testid': 'progress'}, count),
    h('h2', {'data-testid': 'question'}, q.question), ...options, next);
}
function answer() {
  const q = questions[at];
  if (chosen === q.answer || !CONFIG.judged) score += 1;
  else missed.push(q.question);
  at += 1;
  chosen = null;
  draw();
}
function end() {
  const passed = score * 100 >= CONFIG.mark * questions.length || !CONFIG.passing;
  root.replaceChildren(
    h('p', {'data-testid': 'score'}, `Score: ${score} of ${questions.length}`),
    h('p', {'data-testid': 'verdict'}, passed ? CONFIG.passed : CONFIG.failed));
  if (CONFIG.review)
    root.append(h('ul', {}, ...missed.map((m) => h('li', {'data-testid': 'missed'}, m))));
  root.append(button('Again', () => {
    [at, chosen, score, missed] = [0, null, CONFIG.again ? 0 : score, []];
    draw();
  }));
}
fetch('questions.json').then((a) => a.json()).then((data) => {
  questions = data;
  draw();
});
