"""What SSO's search for λ costs: evaluations of msign, from the last root or anew.

  python -m benchmarks.sso_solver            # a table; --json for the numbers

Trains a model of benchmarks.optimizers with SSO. `last step` starts each search at the
last step's root and slope, as SSO does; `−⟨Θ, N⟩` forgets both before each step.
Columns: evaluations, mean over matrices; those of the slowest one, which chips that
exchange matrices wait for; the largest |h| that is left; held-out loss in nats per
token at the end. Means over the steps after the first tenth; medians over seeds [min,
max].
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ablations, harness, optimizers
from m2jax import optim
from m2jax.optim import optimizer as optimizer_lib
from m2jax.optim.sso import SphereState
from m2jax.train import step as train_step

WIDTH, LAYERS, RATE = 64, 2, 0.04
STARTS = ('last step', '−⟨Θ, N⟩')
METRICS = ('evaluations', 'evaluations_max', 'residual_max')
LIMITS = ((2e-4, 20), (1e-3, 20), (2e-4, 3), (2e-4, 2), (2e-4, 1))


def forget(state: train_step.TrainState) -> train_step.TrainState:
  """The state without the last step's root and slope."""

  def one(x):
    if not isinstance(x, SphereState):
      return x
    return x._replace(slope=jax.tree.map(jnp.zeros_like, x.slope))

  kept = jax.tree.map(
    one, state.opt_state, is_leaf=lambda x: isinstance(x, SphereState)
  )
  return dataclasses.replace(state, opt_state=kept)


@functools.cache
def prepare(tolerance: float, max_evaluations: int, steps: int):
  """Model, step function and key → state."""
  cfg = optimizers.model(WIDTH, LAYERS)
  settings = optimizers.settings('sso', RATE, steps)
  rule = dataclasses.replace(
    settings.sso, tolerance=tolerance, max_evaluations=max_evaluations
  )
  settings = dataclasses.replace(settings, sso=rule)
  tx = optim.make(settings, cfg)
  config = train_step.StepConfig(micro_rows=optimizers.ROWS)
  step = train_step.make_step(cfg, tx, train_step.nll, config)
  start = optimizer_lib.initializer(settings, cfg)
  new = jax.jit(lambda key: train_step.new_state(cfg, tx, key, initialize=start))
  return cfg, step, new


def run(limits, start: str, seed: int, steps: int, text) -> dict[str, Any]:
  """Trains; means of the metrics, and the loss."""
  cfg, step, new = prepare(*limits, steps)
  state, found = new(jax.random.key(seed)), []
  batches = optimizers.batches(text.train, seed)
  for batch in itertools.islice(batches, steps):
    if start != STARTS[0]:
      state = forget(state)
    state, metrics = step(state, batch)
    found.append([float(metrics[f'sphere/{name}']) for name in METRICS])
  held_out = itertools.islice(optimizers.batches(text.held_out, 0), 4)
  losses = [float(optimizers.look(cfg, state.variables, b)[0]) for b in held_out]
  means = np.mean(found[steps // 10 :], axis=0)
  row = {'tolerance': limits[0], 'most': limits[1], 'start': start, 'seed': seed}
  return {**row, **dict(zip(METRICS, means, strict=True)), 'loss': np.mean(losses)}


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Markdown."""
  names = ['tolerance', 'most', 'start', 'evaluations', 'slowest', '|h|', 'loss']
  lines = ['| ' + ' | '.join(names) + ' |', '|' + '---|' * len(names)]
  for key in dict.fromkeys((r['tolerance'], r['most'], r['start']) for r in rows):
    mine = [r for r in rows if (r['tolerance'], r['most'], r['start']) == key]
    cells = [f'{key[0]:g}', str(key[1]), key[2]]
    for name, digits in (*zip(METRICS, (2, 1, 5), strict=True), ('loss', 3)):
      low, middle, high = np.quantile([r[name] for r in mine], (0, 0.5, 1))
      cells.append(f'{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]')
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main() -> None:
  parser = harness.parser(__doc__)
  parser.add_argument('--steps', type=int, default=100)
  parser.add_argument('--limits', type=int, nargs='+', default=range(len(LIMITS)))
  args = parser.parse_args()
  text = ablations.read(200)
  rows = [
    run(LIMITS[limit], start, seed, args.steps, text)
    for limit in args.limits
    for start in STARTS
    for seed in args.seeds
    if LIMITS[limit][1] > 1 or start == STARTS[1]  # one evaluation is the formula
  ]
  harness.show(args, rows, table)


if __name__ == '__main__':
  main()
