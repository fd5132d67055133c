"""Families of one to six calls: sentences that are carried out in order.

A task is a list of steps, one sentence each: an action on a file, or a question in the
last step. The file is named, or has to be found first, which takes additional calls:

  word    the file with a word: grep -l
  words   the file with one of two words: grep -l for the first
  note    the .py file to which a note leads: cat
  notes   the .py file to which one of two notes leads: cat of the first

`steps_N` takes N calls. A note names the file, or another note that does. The first of
two words or notes is the right one, except that a question may start with a dead end:
no file has the first word, or the first note does not exist, and the second has to be
tried. In a `trail` three to five notes lead to the file, four to six calls including
the action; in a `dead_end`, of three to five calls, one or two words or notes are dead
ends before the right one, and an action follows. So short chains contain each skill
that long ones need, but neither their combinations nor their length.
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
  'word': 'the file with {}',
  'words': 'the file with {}',
  'note': 'the .py file from {}',
  'notes': 'the .py file from {}',
}
_COMMANDS = {
  'rename': 'mv {file} {new}',
  'copy': 'cp {file} {new}',
  'delete': 'rm {file}',
  'append': 'echo {line} >> {file}',
  'create': 'echo {line} > {new}',
  'count': 'wc -l < {file}',
}


class _Builder:
  """A task while its steps are drawn.

  Attributes:
    files: the workspace at the start; planted words and notes are added to it.
    after: the workspace after the steps so far.
    fresh: files that no step has touched.
    named: files that an earlier sentence has named, which later ones may use.
    steps: the teacher's script, one dict per sentence.
    answer: the answer to the last step, if it is a question.
  """

  def __init__(self, draw: Draw, count: int):
    self.draw = draw
    self.files: Files = draw.files(least=count)
    self.after = dict(self.files)
    self.fresh = list(self.files)
    self.named: list[str] = []
    self.steps: list[dict[str, Any]] = []
    self.answer: str | None = None

  def take_fresh(self, suffix: str = '') -> str:
    """Draws a file that no step has touched."""
    file = self.draw.pick([name for name in self.fresh if name.endswith(suffix)])
    self.fresh.remove(file)
    return file

  def find(self, by: str, hops: int, dead_ends: int) -> tuple[str, list[str]]:
    """Draws a file, and the words or notes by which a phrase identifies it."""
    draw = self.draw
    if by == 'name':
      if self.named and draw.chance(0.5):
        return draw.pick(self.named), []
      return self.take_fresh(), []
    if by in ('word', 'words'):
      file = self.take_fresh()
      of = [draw.plant(self.files, file, 1, 6)]
      self.after[file] = self.files[file]
    else:
      file = note = self.take_fresh('.py')
      for _ in range(hops):
        name = draw.new_name(self.all(), '.txt')
        self.files[name] = self.after[name] = [note]
        note = name
      of = [note]
    if by in ('words', 'notes'):
      for _ in range(dead_ends or 1):
        known = self.all() | dict.fromkeys(of, [])
        other = draw.word(known) if by == 'words' else draw.new_name(known, '.txt')
        of.insert(0 if dead_ends else 1, other)
    return file, of

  def all(self) -> Files:
    """All texts in which a new name or word must not occur."""
    asked = '\n'.join(step['ask'] for step in self.steps)
    return {**self.files, **self.after, asked: []}

  def add(self, verb: str, by: str = 'name', hops: int = 1, dead_ends: int = 0) -> None:
    """Adds a step.

    Args:
      verb: a key of `_SENTENCES`.
      by: how the file is found: 'name' or a key of `_PHRASES`.
      hops: number of notes that lead to the file.
      dead_ends: words or notes before the right one; if 0, one wrong one follows it.
    """
    draw, after = self.draw, self.after
    step: dict[str, Any] = {'verb': verb, 'by': by, 'of': []}
    if verb == 'create':
      file = ''
    elif verb == 'replace' and by == 'name':
      file = self.take_fresh()  # its words can still be replaced
    else:
      file, step['of'] = self.find(by, hops, dead_ends)
    phrase = _PHRASES[by].format(' or '.join(step['of'])) if step['of'] else file
    if verb in ('rename', 'copy'):
      step['new'] = draw.new_name(self.all(), file[file.rindex('.') :])
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
      after[file] = [
        line.replace(step['old'], step['new']) for line in self.files[file]
      ]
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
    step['ask'] = draw.pick(_SENTENCES[verb]).format(**{**step, 'file': phrase})
    self.steps.append(step)

  def draft(self, calls: int) -> Draft:
    if self.answer is None and self.after == self.files:
      raise Redraw  # the steps cancel each other
    return Draft(
      ' '.join(step['ask'] for step in self.steps),
      self.files,
      {'steps': self.steps},
      calls,
      self.answer,
      self.after,
    )


def _verb(draw: Draw, last: bool) -> str:
  """Draws an action or, in the last step, a question with probability 1/2."""
  return draw.pick(_QUESTIONS if last and draw.chance(0.5) else _ACTIONS)


def _build_steps(draw: Draw, calls: int) -> Draft:
  builder, left = _Builder(draw, calls + 1), calls
  while left:
    by, hops = 'name', 0
    if draw.chance(0.35):
      by = draw.pick(tuple(_PHRASES))
      hops = draw.rng.randint(1, 2) if by == 'note' else 1
    dead_end = by in ('words', 'notes') and draw.chance(0.5)
    verb = _verb(draw, last=left <= 1 + hops + dead_end)
    if verb == 'which':  # only asks to find the file
      by, hops = draw.pick(tuple(_PHRASES)), 1
      dead_end = by in ('words', 'notes') and draw.chance(0.5)
    elif verb != 'count':
      dead_end = False
    cost = (verb != 'which') + hops + dead_end
    if (
      cost > left
      or (verb == 'create' and by != 'name')
      or (cost < left and verb in _QUESTIONS)
    ):
      continue
    builder.add(verb, by, hops, int(dead_end))
    left -= cost
  return builder.draft(calls)


def _build_trail(draw: Draw) -> Draft:
  hops = draw.rng.randint(3, 5)
  builder = _Builder(draw, 3)
  verb = _verb(draw, last=True)
  if verb == 'which' or verb == 'create':
    raise Redraw
  builder.add(verb, 'note', hops)
  return builder.draft(hops + 1)


def _build_dead_end(draw: Draw) -> Draft:
  """Two or three calls to find a file, one to act, possibly one before or after."""
  dead_ends, sentences = draw.rng.randint(1, 2), draw.rng.randint(1, 2)
  builder = _Builder(draw, sentences + 1)
  at = draw.rng.randrange(sentences)
  for i in range(sentences):
    verb = _verb(draw, last=i == sentences - 1)
    if i != at:
      if verb == 'which':
        raise Redraw
      builder.add(verb)
    else:
      if verb in ('which', 'create'):
        raise Redraw
      builder.add(verb, draw.pick(('words', 'notes')), dead_ends=dead_ends)
  return builder.draft(dead_ends + 1 + sentences)


def _find(step):
  """Finds a step's file by commands; returns the name that the last one printed."""
  command = 'grep -l {} *' if step['by'] in ('word', 'words') else 'cat {}'
  thought = step['ask'].rstrip('.?')
  for one in step['of']:
    printed = yield Call(thought, command.format(one))
    if not printed.startswith(('exit', 'cat:')):
      break
    thought = 'not there, try the other'
  file = first_line(printed)
  while file.endswith('.txt') and command.startswith('cat'):
    file = first_line((yield Call(f'go on to {file}', command.format(file))))
  return file


def _teach(p, slip):
  """Carries out the steps; a slip may change a command or skip a step.

  The thought before a step repeats its sentence, so that the next step follows from the
  last thought.
  """
  answer = Answer('all done', 'done')
  for step in p['steps']:
    verb = step['verb']
    if len(p['steps']) > 1 and slip('skipped_step'):
      continue
    file, thought = step.get('file', ''), step['ask'].rstrip('.?')
    if step['of']:
      file = yield from _find(step)
      thought = f'it is {file}'
    if verb == 'which':
      answer = Answer('that is it', file)
      continue
    if verb == 'replace':
      flag = '' if slip('first_only') else 'g'
      in_place = '' if slip('not_in_place') else '-i '
      command = f'sed {in_place}s/{step["old"]}/{step["new"]}/{flag} {file}'
    else:
      command = _COMMANDS[verb].format(**{**step, 'file': file})
    if verb in ('rename', 'copy', 'count') and slip('wrong_option'):
      wrong = {'mv': 'cp', 'cp': 'mv', 'wc': 'wc'}[command[:2]]
      command = wrong + command[2:].replace(' -l ', ' -c ')
    if verb == 'append' and slip('clobber'):
      command = command.replace('>>', '>')
    printed = yield Call(thought, command)
    if verb == 'count':
      answer = Answer('that is it', first_line(printed))
  return answer


_MISTAKES = ('wrong_option', 'clobber', 'first_only', 'not_in_place')


FAMILIES = {
  f'steps_{n}': Family(
    functools.partial(_build_steps, calls=n),
    _teach,
    _MISTAKES if n == 1 else (*_MISTAKES, 'skipped_step'),
  )
  for n in range(1, MAX_CALLS + 1)
} | {
  'trail': Family(_build_trail, _teach, _MISTAKES),
  'dead_end': Family(_build_dead_end, _teach, (*_MISTAKES, 'skipped_step')),
}
