"""Prints a run's trajectories, also while it is running: the newest first.

  python -m experiments.trajectories --workdir=workdir/forge
  python -m experiments.trajectories --workdir=workdir/forge --count=10 \
    --phase=rl --outcome=failure --family=dead_end
"""

from __future__ import annotations

import pathlib

import rich.text
from absl import flags

from experiments import common
from m2jax.observe import console as console_lib
from m2jax.observe import transcript
from m2jax.observe.printable import printable
from m2jax.pool import database
from m2jax.pool.reader import Reader, StoredTrajectory

POOL = flags.DEFINE_string('pool', None, 'URL of the pool; default WORKDIR/pool.db.')
COUNT = flags.DEFINE_integer('count', 3, 'Most trajectories to print.', lower_bound=1)
PHASE = flags.DEFINE_enum('phase', 'any', ['any', 'rl', 'eval'], 'Only of this phase.')
OUTCOME = flags.DEFINE_enum(
  'outcome', 'any', ['any', 'success', 'failure'], 'Only with this verdict.'
)
FAMILY = flags.DEFINE_string('family', None, 'Only tasks of this family.')

_STYLES = {
  'task': 'bold',
  'thinking': 'dim',
  'call': 'cyan',
  'observation': 'green',
  'answer': 'bold yellow',
}


def main():
  reader = Reader(database.open_read_only(POOL.value or _database(common.workdir())))
  found = reader.newest_trajectories(
    COUNT.value,
    evaluation={'any': None, 'rl': False, 'eval': True}[PHASE.value],
    success={'any': None, 'success': True, 'failure': False}[OUTCOME.value],
    family=FAMILY.value,
  )
  if not found:
    raise common.BadInput('no such trajectory yet: fewer conditions find more')
  console = console_lib.Console(soft_wrap=True)
  for stored in found:
    _print(console, stored, reader)


def _database(workdir: pathlib.Path) -> pathlib.Path:
  for path in (workdir / 'pool.db', workdir / 'evaluation.db'):
    if path.exists():
      return path
  raise common.BadInput(
    f'--workdir={workdir}: no pool.db or evaluation.db; give the workdir of '
    'experiments.forge or experiments.evaluate'
  )


def _print(console, stored: StoredTrajectory, reader: Reader) -> None:
  t = stored.trajectory
  console.rule(style='dim')
  facts = [t.family, f'success {t.success:g}', t.end_reason, f'{t.wall_s:.1f} s']
  if t.item >= 0:
    facts.insert(0, f'item {t.item}.{t.rank}')
  if stored.reward is not None:
    facts.append(f'reward {stored.reward.total:.3f}')
  console.print(_text(' · '.join(facts), 'bold'))
  console.print(_text(f'{t.task}\n{t.session}', 'dim'))
  if t.error:
    console.print(_text(t.error, 'red'))
  advantages = {turn.turn: turn.advantage for turn in reader.turns(t.session)}
  for step in transcript.steps(t.messages):
    label = f'{step.kind:>11}  '
    if step.kind in ('call', 'answer') and advantages.get(step.turn) is not None:
      label = f'{advantages[step.turn]:+.2f} {step.kind:>5}  '.rjust(len(label))
    text = step.text.replace('\n', '\n' + ' ' * len(label))
    shown = _text(text, _STYLES.get(step.kind, ''))
    console.print(_text(label, 'dim').append_text(shown))


def _text(text: str, style: str) -> rich.text.Text:
  """Text of a model, a tool or a task."""
  return rich.text.Text(printable(text), style=style)


if __name__ == '__main__':
  common.run(main)
