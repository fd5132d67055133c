"""A countdown or a stopwatch; the verifier sets the page's clock."""

from __future__ import annotations

import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, fill, text, texts

_COUNTDOWNS = ('Egg timer', 'Tea timer', 'Speech timer', 'Oven clock', 'Break timer')
_STOPWATCHES = ('Stopwatch', 'Lap timer', 'Race clock', 'Swim timer', 'Shift clock')
_STATES = (('Ready', 'Running', 'Paused', 'Done'), ('Idle', 'Counting', 'Held', 'Over'))


def draw(rng: random.Random) -> app.App:
  """A countdown or a stopwatch."""
  countdown = rng.random() < 0.5
  ready, running, paused, done = rng.choice(_STATES)
  config = {
    **{'countdown': countdown, 'ready': ready, 'running': running},
    **{'paused': paused, 'done': done},
    'pausing': rng.choice(('Pause', 'Hold', 'Stop')),
    'newest': rng.random() < 0.5,
    **dict.fromkeys(('padded', 'ends', 'pause', 'reset'), True),
  }
  mutants = {'padded': 'runs', 'pause': 'pause', 'reset': 'reset'}
  mutants |= {'ends': 'ends'} if countdown else {'newest': 'laps'}
  return app.App(
    kind='timer',
    title=rng.choice(_COUNTDOWNS if countdown else _STOPWATCHES),
    about='a countdown.' if countdown else 'a stopwatch with laps.',
    rules=_rules(config),
    criteria=_criteria(config, rng),
    view=[fill('Seconds', '90'), click('Start'), ['clock', None, 5500]]
    if countdown
    else [click('Start'), ['clock', None, 5500], click('Lap')],
    config=config,
    mutants=mutants,
    clock=True,
  )


def _rules(c):
  first = (
    'A text field with the label "Seconds" has the whole number of seconds to count. '
    '"Start" counts down from there; a paused countdown goes on.'
    if c['countdown']
    else '"Start" counts seconds up from 0; a paused stopwatch goes on.'
  )
  rules = [
    first,
    f'Buttons "Start", "{c["pausing"]}" and "Reset". "Reset" stops and sets the '
    f'time to '
    '00:00' + ('; the next Start reads the field again.' if c['countdown'] else '.'),
    'An element with data-testid="time" shows '
    + ('what is left' if c['countdown'] else 'the time that has passed')
    + ' as MM:SS, at first 00:00; '
    + (
      'each second that is complete is subtracted.'
      if c['countdown']
      else 'only complete seconds count.'
    ),
    f'An element with data-testid="status" says "{c["ready"]}" at first and after '
    f'Reset, '
    f'"{c["running"]}" while it counts, "{c["paused"]}" when it was paused'
    + (f', and "{c["done"]}" when nothing is left.' if c['countdown'] else '.'),
  ]
  if not c['countdown']:
    order = 'above' if c['newest'] else 'below'
    rules.append(
      'A button "Lap" adds the time that is shown, in an element with '
      f'data-testid="lap", {order} the earlier ones. "Reset" removes them.'
    )
  return rules


def _said(seconds):
  return f'{seconds // 60:02}:{seconds % 60:02}'


def _criteria(c, rng):
  total = rng.randint(100, 250)

  def wait(seconds):
    return ['clock', None, seconds * 1000]

  def time(passed):
    return text('time', _said(total - passed if c['countdown'] else passed))

  half = ['clock', None, 500]
  begin = [fill('Seconds', str(total))] if c['countdown'] else []
  begin += [click('Start'), half]
  a, b, d = (rng.randint(5, 30) for _ in range(3))
  pause = [click(c['pausing']), text('status', c['paused'])]
  found = [
    Criterion(
      'runs',
      'it counts',
      [text('status', c['ready']), text('time', '00:00'), *begin, wait(a), time(a)]
      + [text('status', c['running']), wait(60), time(a + 60)],
    ),
    Criterion(
      'pause',
      'it pauses and goes on',
      [*begin, wait(a), *pause, wait(d), time(a), click('Start'), wait(b), time(a + b)],
    ),
    Criterion(
      'reset',
      'it is reset',
      [*begin, wait(a), click('Reset'), wait(b), text('time', '00:00')]
      + [text('status', c['ready']), *begin, wait(d), time(d)],
    ),
    Criterion(
      'twice',
      'a second Start changes nothing',
      [*begin, wait(a), click('Start'), wait(b), time(a + b)],
    ),
  ]
  if c['countdown']:
    steps = [*begin, wait(total - 2), time(total - 2), text('status', c['running'])]
    steps += [wait(3), text('time', '00:00'), text('status', c['done'])]
    steps += [wait(5), text('time', '00:00')]
    found.append(Criterion('ends', 'it ends at 0', steps))
  else:
    laps = [_said(a), _said(a + b), _said(a + b + d)]
    steps = [*begin]
    for seconds in (a, b, d):
      steps += [wait(seconds), click('Lap')]
    steps.append(texts('lap', laps[::-1] if c['newest'] else laps))
    found.append(Criterion('laps', 'laps are listed', steps))
  return found
