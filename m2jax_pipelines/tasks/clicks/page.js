// What an agent sees of a page, and where it can act. Evaluated by page.py with the
// name of a function and its argument; no text of the agent's becomes part of this code.
//
// `state` is {elements: []}, which the page cannot reach: the element of reference n is
// elements[n - 1], for the whole episode.
([name, argument]) => {
const functions = {
  // Makes the problem of a seed: {utterance, lines}; null if the page fails to.
  begin: ([state, seed]) => {
    core.EPISODE_MAX_TIME = 2 ** 31 - 1; // a policy may think; no discount is used
    if (window.jQuery) jQuery.fx.off = true; // no animation: a state per action
    Math.seedrandom(seed);
    try {
      core.startEpisodeReal();
    } catch {
      return null;
    }
    return { utterance: core.getUtterance(), lines: functions.view(state) };
  },

  // MiniWoB's reward without its discount of time; null before the episode's end.
  reward: () => (WOB_DONE_GLOBAL ? WOB_RAW_REWARD_GLOBAL : null),

  // The state after an action.
  look: (state) => ({ reward: functions.reward(), lines: functions.view(state) }),

  // The lines of the page: '[1] button OK' for what can be acted on, or plain text.
  view: (state) => {
    const limit = 48; // characters of a run of text
    const active =
      'a, button, input, select, textarea, .alink, .final, .folder, .file, ' +
      'h3[role=tab]';
    const hidden = '#query, #reward-display, #sync-task-cover, #click-canvas';
    const inline = new Set(['A', 'B', 'I', 'LABEL', 'SPAN']);
    const lines = [];
    let run = [];
    const clean = (text) => text.replace(/\s+/g, ' ').trim();
    const cut = (text) => (text.length > limit ? text.slice(0, limit) + '…' : text);
    const flush = () => {
      const text = clean(run.join(''));
      if (text) lines.push(cut(text));
      run = [];
    };
    const visible = (element) => {
      const box = element.getBoundingClientRect();
      return box.width > 0 && box.height > 0 &&
        getComputedStyle(element).visibility === 'visible';
    };
    const kind = (element) => {
      const tag = element.tagName;
      if (tag === 'INPUT')
        return { checkbox: 'checkbox', radio: 'radio', submit: 'button' }[element.type]
          || 'text';
      if (tag !== 'BUTTON' && element.closest('[role=tab]')) return 'tab';
      return { SELECT: 'list', TEXTAREA: 'textarea', BUTTON: 'button' }[tag] ||
        (element.matches('.final') ? 'button' : element.matches('.folder') ? 'folder'
          : element.matches('.file') ? 'file' : 'link');
    };
    const name = (element) => {
      if (element.tagName === 'SELECT')
        return [...element.options].map((option) => clean(option.text)).join(' | ');
      if (!element.matches('input, textarea')) return clean(element.textContent);
      const label = element.labels && element.labels[0];
      const before = element.previousElementSibling;
      const row = element.closest('tr');
      const head = row && row.querySelector('th');
      if (label) return clean(label.textContent.replace(element.textContent, ''));
      if (head) return clean(head.textContent);
      return before && before.tagName === 'LABEL' ? clean(before.textContent) : '';
    };
    const value = (element) => {
      if (element.tagName === 'SELECT')
        return [...element.selectedOptions].map((o) => clean(o.text)).join(' | ');
      if (element.type === 'checkbox' || element.type === 'radio')
        return element.checked ? 'on' : '';
      if (element.type === 'password') return '*'.repeat(element.value.length);
      if (element.matches('input, textarea')) return clean(element.value);
      const on = '[aria-selected=true], [aria-expanded=true], .selected';
      return element.matches(on) || element.closest('li[aria-selected=true]')
        ? 'on' : '';
    };
    const show = (element) => {
      let ref = state.elements.indexOf(element) + 1;
      if (!ref) ref = state.elements.push(element);
      const parts = [`[${ref}]`, kind(element), name(element)];
      const set = value(element);
      if (set) parts.push('=', cut(set));
      if (element.disabled) parts.push('(disabled)');
      lines.push(parts.filter(Boolean).join(' '));
    };
    // A text that names a control is shown with the control only.
    const names = (element) =>
      element.matches('label, th') &&
      (element.control || (element.nextElementSibling &&
        (element.nextElementSibling.matches('input') ||
          element.nextElementSibling.querySelector('input'))));
    const walk = (node) => {
      if (node.nodeType === Node.TEXT_NODE) return run.push(node.data);
      if (node.nodeType !== Node.ELEMENT_NODE) return;
      if (node.matches(hidden) || node.matches('script, style')) return;
      if (node.tagName === 'BR') return flush();
      if (getComputedStyle(node).display === 'none') return;
      if (node.matches(active)) {
        flush();
        if (visible(node)) show(node);
        return;
      }
      if (names(node)) {
        flush();
        node.querySelectorAll(active).forEach((inner) => visible(inner) && show(inner));
        return;
      }
      if (node.tagName === 'TD' && clean(run.join(''))) run.push(' | ');
      const block = !inline.has(node.tagName) && node.tagName !== 'TD';
      if (block) flush();
      node.childNodes.forEach(walk);
      if (block) flush();
    };
    walk(document.body);
    flush();
    return lines;
  },

  // What a reference is: 'field', 'list', 'other', or '' if there is none.
  kind: ([state, ref]) => {
    const element = state.elements[ref - 1];
    if (!element) return '';
    if (element.tagName === 'SELECT') return 'list';
    const field = 'textarea, input:not([type=checkbox], [type=radio], [type=submit])';
    return element.matches(field) ? 'field' : 'other';
  },

  // Where to click for a reference: {x, y}, or {error}. `kind`: what it must be, or ''.
  locate: ([state, ref, kind]) => {
    const element = state.elements[ref - 1];
    if (!element || !element.isConnected) return { error: 'is not on the page' };
    if (kind && functions.kind([state, ref]) !== kind) return { error: `is no ${kind}` };
    if (element.disabled) return { error: 'is disabled' };
    element.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    const boxes = [...element.getClientRects()].filter((b) => b.width && b.height);
    if (!boxes.length) return { error: 'is not visible' };
    // The middle, or another point that nothing covers.
    for (const box of boxes)
      for (const across of [0.5, 0.1, 0.3, 0.7, 0.9])
        for (const down of [0.5, 0.1, 0.3, 0.7, 0.9]) {
          const x = box.x + box.width * across;
          const y = box.y + box.height * down;
          const top = document.elementFromPoint(x, y);
          if (top === element || element.contains(top)) return { x, y };
        }
    return { error: 'is covered' };
  },

  // Selects what a field contains; false if the click did not put the focus there.
  ready: ([state, ref]) => {
    const element = state.elements[ref - 1];
    if (document.activeElement !== element || element.disabled) return false;
    element.select();
    return true;
  },

  // Chooses an option of a list by its text; adds it if several can be chosen.
  choose: ([state, ref, text]) => {
    const element = state.elements[ref - 1];
    if (functions.kind([state, ref]) !== 'list') return { error: 'is no list' };
    if (!element.isConnected) return { error: 'is not on the page' };
    if (element.disabled) return { error: 'is disabled' };
    const wanted = (option) => option.text.replace(/\s+/g, ' ').trim() === text;
    const option = [...element.options].find(wanted);
    if (!option) return { error: 'has no such option' };
    option.selected = true;
    for (const type of ['input', 'change'])
      element.dispatchEvent(new Event(type, { bubbles: true }));
    return {};
  },
};
return functions[name](argument);
}
