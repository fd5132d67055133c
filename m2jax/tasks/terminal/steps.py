"""Families of one to six calls: sentences that are carried out one after the other.

A task is a list of steps, a sentence each: something to do with a file, at the end
perhaps a question. The file is named, or has to be found first, which takes calls of
its own:

  word         the file with a word: grep -l                          1 call
  note         the file that a note names: cat                        1 call
  trail        notes that name notes, until one names a .py file      2 calls and more
  either_word  the file with one of two words, the second where       2 calls
               nothing has the first: a dead end
  either_note  the file that one of two notes names, the second       2 calls
               where the first does not exist: a dead end

`steps_N` takes N calls and has neither trail nor dead end; `trail` and `dead_end` take
three to five. So a demonstration of short ones shows every single thing that the long
ones need, except to go on, and to leave a dead end.
"""

from __future__ import annotations

import functools
from typing import Any

from m2jax.tasks.terminal.draw import (
  Answer,
  Call,
  Draft,
  Draw,
  Family,
  Files,
  Redraw,
  first_line,
)
from m2jax.tasks.terminal.editing import replace_script, replaced, sed, suffix_of

MAX_CALLS = 6

_SENTENCES = {
  'rename': ('Rename {file} to {new}.', 'Give {file} the new name {new}.'),
  'copy': ('Copy {file} to {new}.',),
  'delete': ('Delete {file}.', 'Remove {file}.'),
  'append': ('Append the line {line} to {file}.',),
  'create': ('Create {new} with the line {line}.',),
  'replace': ('Replace every {old} with {new} in {file}.',),
  'count': ('How many lines has {file}?', 'Count the lines of {file}.'),
  'which': ('Which is {file}?',),
}
_ACTIONS = ('rename', 'copy', 'delete', 'append', 'create', 'replace')
_QUESTIONS = ('count', 'which')
_PHRASES = {
  'name': '{}',
  'word': 'the file with {}',
  'note': 'the file named in {}',
  'trail': 'the .py file reached from {}',
  'either_word': 'the file with {} or {}',
  'either_note': 'the file named in {} or {}',
}
_COMMANDS = {
  'rename': 'mv {file} {new}',
  'copy': 'cp {file} {new}',
  'delete': 'rm {file}',
  'append': 'echo {line} >> {file}',
  'create': 'echo {line} > {new}',
  'count': 'wc -l < {file}',
}


class _Plot:
  """A task while its steps are drawn.

  Attributes:
    files: the workspace at the start; planted words and notes are added to it.
    after: the workspace after the steps so far.
    fresh: files that no step has touched.
    named: files that an earlier sentence has named, which later ones may use.
    steps: what the teacher is told, one dict a sentence.
  """

  def __init__(self, draw: Draw, count: int):
    self.draw = draw
    self.files: Files = draw.files(least=count)
    self.after = dict(self.files)
    self.fresh = list(self.files)
    self.named: list[str] = []
    self.steps: list[dict[str, Any]] = []
    self.sentences: list[str] = []
    self.answer: str | None = None

  def take_fresh(self, suffix: str = '') -> str:
    """A file that nothing has touched yet."""
    file = self.draw.pick([name for name in self.fresh if name.endswith(suffix)])
    self.fresh.remove(file)
    return file

  def find(self, by: str, hops: int = 1) -> tuple[str, list[str]]:
    """A file, and what a phrase `by` says of it."""
    draw = self.draw
    if by == 'name':
      if self.named and draw.chance(0.5):
        return draw.pick(self.named), []
      return self.take_fresh(), []
    file = self.take_fresh('.py' if by == 'trail' else '')
    if by in ('word', 'either_word'):
      of = [draw.plant(self.files, file, 1, 6)]
      self.after[file] = self.files[file]
      if by == 'either_word':
        of.insert(0, draw.word(self.all()))
      return file, of
    note = file
    for _ in range(hops if by == 'trail' else 1):
      name = draw.new_name(self.all(), '.txt')
      self.files[name] = self.after[name] = [note]
      note = name
    of = [note]
    if by == 'either_note':
      of.insert(0, draw.new_name(self.all(), '.txt'))
    return file, of

  def all(self) -> Files:
    """Everything that a new name or word must not be part of."""
    said = '\n'.join(self.sentences)
    return {**self.files, **{name: self.after[name] for name in self.after}, said: []}

  def add(self, verb: str, by: str = 'name', hops: int = 1) -> None:
    """Draws one more step."""
    draw, after = self.draw, self.after
    step: dict[str, Any] = {'verb': verb, 'by': by, 'of': []}
    if verb == 'create':
      file = ''
    elif verb == 'replace' and by == 'name':
      file = self.take_fresh()  # whose words can still be planted
    else:
      file, step['of'] = self.find(by, hops)
    phrase = _PHRASES[by].format(*step['of']) if step['of'] else file
    if verb in ('rename', 'copy'):
      step['new'] = draw.new_name(self.all(), suffix_of(file))
      after[step['new']] = after[file] if verb == 'copy' else after.pop(file)
    elif verb == 'delete':
      del after[file]
    elif verb == 'append':
      step['line'] = draw.word(self.all())
      after[file] = [*after[file], step['line']]
    elif verb == 'create':
      step['line'] = draw.word(self.all())
      step['new'] = draw.new_name(self.all(), '.txt')
      after[step['new']] = [step['line']]
    elif verb == 'replace':
      step['old'] = draw.plant(self.files, file, 1, 8, twice=True)
      if any(step['old'] in word or word in step['old'] for word in step['of']):
        raise Redraw
      step['new'] = draw.word(self.all())
      after[file] = replaced(self.files, file, step['old'], step['new'])[file]
    self.answer = {'count': str(len(after.get(file, ()))), 'which': file}.get(verb)
    if by == 'name':
      step['file'] = file
    known = ([file] if by == 'name' else []) + [step.get('new', '')]
    gone = file if verb in ('delete', 'rename') else None
    self.named = [
      name
      for name in dict.fromkeys([*self.named, *known])
      if name != gone and name in after
    ]
    self.sentences.append(
      draw.pick(_SENTENCES[verb]).format(**{**step, 'file': phrase})
    )
    self.steps.append(step)

  def draft(self, calls: int) -> Draft:
    if self.answer is None and self.after == self.files:
      raise Redraw  # what was made was deleted again
    return Draft(
      ' '.join(self.sentences),
      self.files,
      {'steps': self.steps},
      calls,
      self.answer,
      self.after,
    )


def _verb(draw: Draw, last: bool) -> str:
  """One of the actions or, at the end, as often a question."""
  return draw.pick(_QUESTIONS if last and draw.chance(0.5) else _ACTIONS)


def _build_steps(draw: Draw, calls: int) -> Draft:
  plot, left = _Plot(draw, calls + 1), calls
  while left:
    find = draw.pick(('word', 'note')) if draw.chance(0.4) else None
    cost = 1 + bool(find)
    last = left <= cost
    verb = _verb(draw, last)
    if verb == 'which':  # to find it is all that is asked
      find, cost = draw.pick(('word', 'note')), 1
    elif find and (left < 2 or verb == 'create'):
      find, cost = None, 1
    if last != (left == cost):
      raise Redraw
    plot.add(verb, find or 'name')
    left -= cost
  return plot.draft(calls)


def _build_trail(draw: Draw) -> Draft:
  hops = draw.rng.randint(2, 4)
  plot = _Plot(draw, 3)
  verb = _verb(draw, last=True)
  if verb == 'which' or verb == 'create':
    raise Redraw
  plot.add(verb, 'trail', hops)
  return plot.draft(hops + 1)


def _build_dead_end(draw: Draw) -> Draft:
  """Two calls to find, one to act, and up to two sentences before or after."""
  calls = draw.rng.randint(3, 5)
  plot = _Plot(draw, calls)
  at = draw.rng.randint(0, calls - 3)
  for i in range(calls - 2):
    verb = _verb(draw, last=i == calls - 3)
    if i != at:
      if verb == 'which':
        raise Redraw
      plot.add(verb)
    else:
      if verb in ('which', 'create'):
        raise Redraw
      plot.add(verb, draw.pick(('either_word', 'either_note')))
  return plot.draft(calls)


def _find(step, slip):
  """Finds a step's file by commands; its name is what the last one printed."""
  by, of = step['by'], step['of']
  if by == 'name' or step['verb'] == 'create':
    return step.get('file', '')
  if by.endswith('word'):
    for word in of:
      printed = yield Call(f'find {word}', f'grep -l {word} *')
      if not printed.startswith('exit'):
        return first_line(printed)
    return '?'
  for note in of:
    printed = yield Call(f'read {note}', f'cat {note}')
    if not printed.startswith('cat:'):
      break
  file = first_line(printed)
  while by == 'trail' and file.endswith('.txt'):
    file = first_line((yield Call(f'read {file}', f'cat {file}')))
  return file


def _teach(p, slip):
  """Carries out the steps; a slip may change a command or leave a step out."""
  answer = Answer('all done', 'done')
  for step in p['steps']:
    verb = step['verb']
    if len(p['steps']) > 1 and slip('skipped_step'):
      continue
    file = yield from _find(step, slip)
    if verb == 'which':
      answer = Answer('that is it', file)
      continue
    if verb == 'replace':
      command = sed(replace_script(step, slip), file, slip)
    else:
      command = _COMMANDS[verb].format(**{**step, 'file': file})
    if verb in ('rename', 'copy', 'count') and slip('wrong_option'):
      wrong = {'mv': 'cp', 'cp': 'mv', 'wc': 'wc'}[command[:2]]
      command = wrong + command[2:].replace(' -l ', ' -c ')
    if verb == 'append' and slip('clobber'):
      command = command.replace('>>', '>')
    found = '' if step['by'] == 'name' else f'it is {file}, '
    printed = yield Call(f'{found}{verb}', command)
    if verb == 'count':
      answer = Answer('that is it', first_line(printed))
  return answer


_MISTAKES = ('wrong_option', 'clobber', 'first_only', 'not_in_place')


def steps_family(calls: int) -> str:
  """Name of the family whose tasks take so many calls."""
  return f'steps_{calls}'


FAMILIES = {
  steps_family(n): Family(
    functools.partial(_build_steps, calls=n),
    _teach,
    _MISTAKES if n == 1 else (*_MISTAKES, 'skipped_step'),
  )
  for n in range(1, MAX_CALLS + 1)
} | {
  'trail': Family(_build_trail, _teach, _MISTAKES),
  'dead_end': Family(_build_dead_end, _teach, (*_MISTAKES, 'skipped_step')),
}
