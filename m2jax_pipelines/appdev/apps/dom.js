const root = document.getElementById('app');
const h = (tag, props = {}, ...children) => {
  const e = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith('on')) e.addEventListener(key.slice(2), value);
    else if (key in e) e[key] = value;
    else e.setAttribute(key, value);
  }
  e.append(...children);
  return e;
};
let ids = 0;
const field = (label, control) => {
  control.id = `field-${ids++}`;
  return h('p', {className: 'field'}, h('label', {htmlFor: control.id}, label), control);
};
const button = (name, onclick, props = {}) =>
  h('button', {type: 'button', onclick, ...props}, name);
const shown = (id, tag = 'p') => h(tag, {'data-testid': id});
