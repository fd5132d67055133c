"""Families of several steps, where the output of one call determines the next call.

Most combine a way to find a file (by its content, a definition, its size, or notes that
lead to it) with an action on that file.
"""

from __future__ import annotations

from m2jax.tasks.terminal.draw import (
  Answer,
  Call,
  Draft,
  Draw,
  Family,
  Files,
  Redraw,
  a_word,
  files_with,
  first_line,
)
from m2jax.tasks.terminal.editing import (
  DONE,
  replace_script,
  replaced,
  sed,
  suffix_of,
)
from m2jax.tasks.terminal.reading import (
  extreme_command,
  pick_extreme,
  plant_definition,
)


def _draw_action(
  draw: Draw, files: Files, target: str, phrase: str, calls: int
) -> Draft:
  """Draws an action on `target`, to which the instruction refers by `phrase`."""
  action = draw.pick(('count', 'rename', 'append', 'delete'))
  if action == 'count':
    ask = draw.pick(('How many lines has {}?', 'Count the lines of {}.'))
    answer = str(len(files[target]))
    return Draft(ask.format(phrase), files, {'action': action}, calls, answer)
  after, argument = dict(files), ''
  if action == 'delete':
    del after[target]
    ask = draw.pick(('Delete {}.', 'Remove {}.'))
  elif action == 'rename':
    argument = draw.new_name(files, suffix_of(target))
    after[argument] = after.pop(target)
    ask = 'Rename {} to {}.'
  else:
    argument = draw.word(files)
    after[target] = [*files[target], argument]
    ask = draw.pick(('Append the line {1} to {0}.', 'Add the line {1} to {0}.'))
  params = {'action': action, 'argument': argument}
  return Draft(ask.format(phrase, argument), files, params, calls, after=after)


def _do(p, file: str, slip):
  """Teaches the last step: the action on the file that was found."""
  action = p['action']
  if action == 'count':
    printed = yield Call(
      f'it is {file}, count', f'wc {"-c" if slip("wrong_option") else "-l"} < {file}'
    )
    return Answer('that is it', first_line(printed))
  command = {
    'delete': f'rm {file}',
    'rename': f'mv {file} {p.get("argument")}',
    'append': f'echo {p.get("argument")} >> {file}',
  }[action]
  if action == 'append' and slip('clobber'):
    command = command.replace('>>', '>')
  yield Call(f'it is {file}, {action}', command)
  return DONE


def _build_act_on_found(draw: Draw) -> Draft:
  files = draw.files()
  if draw.chance(0.5):
    file, word = plant_definition(draw, files)
    verb = 'defines'
  else:
    file = draw.any_file(files)
    word = draw.plant(files, file, 1, 6)
    verb = 'contains'
  draft = _draw_action(draw, files, file, f'the file that {verb} {word}', 2)
  draft.params |= {'word': word, 'verb': verb}
  return draft


def _find(p, slip) -> str:
  pattern = p['word']
  if p['verb'] == 'defines' and not slip('wrong_pattern'):
    pattern = f'"def {pattern}"'
  return f'grep -l {pattern} *'


def _teach_act_on_found(p, slip):
  file = first_line((yield Call('find the file', _find(p, slip))))
  if slip('skipped_step'):
    return Answer('that is it', file)
  return (yield from _do(p, file, slip))


def _build_act_on_extreme(draw: Draw) -> Draft:
  files = draw.files()
  which, file = pick_extreme(draw, files)
  draft = _draw_action(draw, files, file, f'the {which} file', 2)
  draft.params |= {'which': which}
  return draft


def _teach_act_on_extreme(p, slip):
  file = first_line((yield Call('sort by size', extreme_command(p['which'], slip))))
  if slip('skipped_step'):
    return Answer('that is it', file)
  return (yield from _do(p, file, slip))


def _build_follow_notes(draw: Draw) -> Draft:
  files = draw.files()
  target = draw.pick([name for name in files if name.endswith('.py')])
  hops = draw.rng.randint(1, draw.config.max_hops)
  note = target
  for _ in range(hops):
    name = draw.new_name(files, '.txt')
    files[name] = [note]
    note = name
  phrase = f'the .py file reached from {note}'
  draft = _draw_action(draw, files, target, phrase, hops + 1)
  draft.params |= {'note': note}
  return draft


def _teach_follow_notes(p, slip):
  file = first_line((yield Call('read the note', f'cat {p["note"]}')))
  while file.endswith('.txt') and not slip('skipped_step'):
    file = first_line((yield Call(f'read {file} too', f'cat {file}')))
  return (yield from _do(p, file, slip))


_CHECK = """\
got=$(sed -n "s/^ *{name} = //p" {file})
if [ "$got" != {value} ]; then
  echo "{file}: {name} is $got, want {value}"
  exit 1
fi
echo ok"""


def _build_fix_check(draw: Draw) -> Draft:
  files = draw.files()
  file, name, bad = draw.add_constant(files)
  good = str(draw.number(11, 999))
  if good == bad:
    raise Redraw
  check = draw.new_name(files, '.sh')
  files[check] = _CHECK.format(file=file, name=name, value=good).split('\n')
  after = replaced(files, file, f'{name} = {bad}', f'{name} = {good}')
  ask = draw.pick(
    ('{} fails. Fix the file that it names.', 'Make {} pass; do not edit the check.')
  )
  return Draft(ask.format(check), files, {'check': check}, 3, after=after)


def _teach_fix_check(p, slip):
  run = f'sh {p["check"]}'
  printed = first_line((yield Call('run the check', run)))
  file, bad, good = (a_word(printed, i).strip(':,') for i in (0, 3, 5))
  if slip('swapped'):
    bad, good = good, bad
  yield Call(f'{bad} must be {good}', sed(f's/{bad}/{good}/', file, slip))
  yield Call('check again', run)
  return DONE


def _build_replace_in_found(draw: Draw) -> Draft:
  files = draw.files()
  file = draw.any_file(files)
  word = draw.plant(files, file, 1, 6)
  old = draw.plant(files, file, 1, 8, twice=True)
  if old in word or word in old or len(files_with(files, word)) != 1:
    raise Redraw
  new = draw.word(files)
  ask = draw.pick(
    (
      'In the file that contains {}, replace every {} with {}.',
      'Find the file with {} and change all {} to {}.',
    )
  )
  params = {'word': word, 'verb': 'contains', 'old': old, 'new': new}
  after = replaced(files, file, old, new)
  return Draft(ask.format(word, old, new), files, params, 2, after=after)


def _teach_replace_in_found(p, slip):
  file = first_line((yield Call('find the file', _find(p, slip))))
  yield Call(f'it is {file}, replace', sed(replace_script(p, slip), file, slip))
  return DONE


FAMILIES = {
  'act_on_found': Family(
    _build_act_on_found,
    _teach_act_on_found,
    ('wrong_pattern', 'skipped_step', 'wrong_option', 'clobber'),
  ),
  'act_on_extreme': Family(
    _build_act_on_extreme,
    _teach_act_on_extreme,
    ('wrong_end', 'unsorted', 'skipped_step', 'wrong_option', 'clobber'),
  ),
  'follow_notes': Family(
    _build_follow_notes,
    _teach_follow_notes,
    ('skipped_step', 'wrong_option', 'clobber'),
  ),
  'fix_check': Family(_build_fix_check, _teach_fix_check, ('swapped', 'not_in_place')),
  'replace_in_found': Family(
    _build_replace_in_found, _teach_replace_in_found, ('first_only', 'not_in_place')
  ),
}
