"""Optimizers of the hidden matrices on text: loss, best rates by width, cost of a step.

  python -m benchmarks.optimizers              # the tables; --json for the numbers
  python -m benchmarks.optimizers --names adam muon sso --models 64x2 --rates 0.01 0.02

Trains small M2s on the same batches of Python's standard library. All optimizers have
the same grid of rates for the hidden matrices, which is extended by factors of 2 while
the best rate is at an end; Adam updates embedding, head and norms at one rate, without
weight decay. Each rate is tried with the first seed, and the best one of each optimizer
and width is repeated with all seeds. Variants of SSO:
`joint_heads` takes q, k and v as whole matrices, `fan_in_init` starts from the initial
values of the other optimizers. `muon_spectral` is Muon with heads apart and the scale
sqrt(out/in), the baseline of SSO's paper.

Columns: `loss` in nats per token on held-out files after all steps, with the schedule
at its end; `at Adam's time` the same run's loss when Adam's would have ended, by the
times of a step; `steps to Adam's` until the last loss of Adam's is reached, as a share
of its steps; MaxVio of the router over the last quarter; `activation` the largest |x|
of the residual stream, where it enters a block or the final norm; `evaluations` of
msign a step; `step` the time of a train step over Adam's, timed alternately. Cells are
medians over seeds [min, max].
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import ablations, harness
from m2jax import config as model_config
from m2jax import forest, optim
from m2jax import model as model_lib
from m2jax import params as params_lib
from m2jax.optim import optimizer as optimizer_lib
from m2jax.optim import schedules
from m2jax.optim.matrices import Matrices
from m2jax.optim.schedules import ScheduleConfig
from m2jax.train import step as train_step

CONTEXT, ROWS, HELD_OUT_BATCHES = 128, 8, 4
CURVE = 10  # evaluations of a run
ADAM_RATE = 3e-3  # of embedding, head and norms
NAMES = ('adam', 'muon', 'muon_spectral', 'nor_muon', 'hyperball', 'muon_sphere', 'sso')
VARIANTS = (*NAMES, 'joint_heads', 'fan_in_init')
RATES = (0.005, 0.01, 0.02, 0.04, 0.08)
MOST_EXTENSIONS = 5  # of the grid of an optimizer whose best rate is at an end


def model(width: int, layers: int) -> model_config.ModelConfig:
  """A small M2: heads of 16, 8 experts of half the width, of which 2 are active."""
  return dataclasses.replace(
    model_config.tiny(),
    vocab_size=ablations.VOCABULARY,
    num_layers=layers,
    embed_dim=width,
    num_heads=width // 16,
    num_kv_heads=max(1, width // 32),
    head_dim=16,
    rotary_dim=8,
    num_experts=8,
    experts_per_token=2,
    expert_dim=width // 2,
    num_mtp_modules=0,
  )


def settings(variant: str, rate: float, steps: int) -> optim.OptimizerConfig:
  """A variant at a rate of the hidden matrices."""
  muon = optim.MuonConfig(learning_rate=rate)
  if variant == 'muon_spectral':
    muon = dataclasses.replace(muon, scale='spectral', split_heads=True)
  sso = optim.SsoConfig(learning_rate=rate, split_heads=variant != 'joint_heads')
  name = {'muon_spectral': 'muon', 'joint_heads': 'sso', 'fan_in_init': 'sso'}
  return HiddenAdam(
    name=name.get(variant, 'hidden' if variant == 'adam' else variant),
    hidden=optim.AdamConfig(learning_rate=rate),
    adam=optim.AdamConfig(learning_rate=ADAM_RATE),
    muon=muon,
    nor_muon=optim.NorMuonConfig(learning_rate=rate),
    hyperball=optim.HyperballConfig(learning_rate=rate),
    sso=sso,
    muon_sphere=optim.MuonSphereConfig(learning_rate=rate),
    schedule=ScheduleConfig(
      'cosine',
      warmup_steps=max(1, steps // 20),
      total_steps=steps,
      final_fraction=0.1,
    ),
  )


@dataclasses.dataclass(frozen=True)
class HiddenAdam(optim.OptimizerConfig):
  """Uses Adam with a separate rate for the hidden matrices."""

  hidden: optim.AdamConfig = optim.AdamConfig()


def batches(stream: np.ndarray, seed: int) -> Iterator[forest.Forest]:
  """Yields batches of random pieces indefinitely."""
  rng = np.random.default_rng([seed, 7])
  while True:
    starts = rng.integers(len(stream) - CONTEXT, size=ROWS)
    rows = [stream[start : start + CONTEXT] for start in starts]
    yield forest.chain(rows, row_tokens=CONTEXT, rows=ROWS, row_terms=CONTEXT)


class Job(NamedTuple):
  """A run: what is trained, and how."""

  variant: str
  width: int
  layers: int
  rate: float
  steps: int


class Rated(NamedTuple):
  """Rate of the hidden matrices, and the optimizer's state."""

  rate: jax.Array
  inner: Any


def with_rate(
  config: optim.OptimizerConfig, cfg: model_config.ModelConfig
) -> optax.GradientTransformation:
  """`optimizer.make`, but the hidden matrices' rate is in the state: as a constant of
  the program it would have one compiled for each rate."""
  multiplier = schedules.multiplier(config.schedule)
  matrices = Matrices(params_lib.heads(cfg))

  def make(rate):
    def part(name, rule):
      base = rate if name == config.name else rule.learning_rate
      schedule = lambda step: base * multiplier(step)  # noqa: E731
      return rule.transformation(schedule, optax.identity(), matrices)

    rules = optimizer_lib.rules_in_use(config)
    parts = {name: part(name, rule) for name, rule in rules.items()}
    by_rule = optax.partition(
      parts, lambda params: optimizer_lib.labels(config, params)
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), by_rule)

  def init(params):
    rate = jnp.float32(getattr(config, config.name).learning_rate)
    return Rated(rate, make(rate).init(params))

  def update(gradients, state, params=None):
    updates, inner = make(state.rate).update(gradients, state.inner, params)
    return updates, Rated(state.rate, inner)

  return optax.GradientTransformation(init, update)


@functools.lru_cache(maxsize=8)
def compiled(job: Job):
  """Model, step function, and key → state at the start, for any rate."""
  cfg = model(job.width, job.layers)
  optimizer = settings(job.variant, job.rate, job.steps)
  tx = with_rate(optimizer, cfg)
  step = train_step.make_step(
    cfg, tx, train_step.nll, train_step.StepConfig(micro_rows=ROWS)
  )
  start = optimizer_lib.initializer(optimizer, cfg)
  if job.variant == 'fan_in_init':
    start = lambda params: params  # noqa: E731
  new = jax.jit(lambda key: train_step.new_state(cfg, tx, key, initialize=start))
  return cfg, step, new


def prepare(job: Job):
  """Model, step function, and seed → state at the start."""
  cfg, step, new = compiled(job._replace(rate=0.0))

  def start(seed):
    state = new(jax.random.key(seed))
    rated = state.opt_state._replace(rate=jnp.float32(job.rate))
    return dataclasses.replace(state, opt_state=rated)

  return cfg, step, start


def train(job: Job, seed: int, text: ablations.Text) -> dict[str, Any]:
  """Trains; returns losses along the way and the run's other table entries."""
  held_out = list(itertools.islice(batches(text.held_out, 0), HELD_OUT_BATCHES))
  cfg, step, new = prepare(job)
  state, curve, violations, evaluations = new(seed), [], [], []
  for number, batch in zip(range(job.steps), batches(text.train, seed), strict=False):
    state, metrics = step(state, batch)
    if number >= job.steps - job.steps // 4:
      violations.append(float(metrics['max_violation']))
    evaluations.append(float(metrics.get('sphere/evaluations', 0)))
    if (number + 1) % max(1, job.steps // CURVE) == 0 or number + 1 == job.steps:
      found = [look(cfg, state.variables, b) for b in held_out]
      curve.append((number + 1, float(np.mean([loss for loss, _ in found]))))
  loss = curve[-1][1]
  print(f'{job} seed {seed}: {loss:.3f}', file=sys.stderr)
  return {
    **job._asdict(),
    'seed': seed,
    'loss': loss if np.isfinite(loss) else float('inf'),
    'curve': curve,
    'max_violation': float(np.mean(violations)),
    'activation': float(max(top for _, top in found)),
    'evaluations': float(np.mean(evaluations)),
  }


@functools.partial(jax.jit, static_argnums=0)
def look(cfg, variables, batch):
  """Loss in nats per token, and the largest |x| of the residual stream."""
  out = model_lib.forward(cfg, variables, batch)
  loss = -jnp.sum(batch.weight * train_step.at_terms(out.logprob, batch))
  return loss / jnp.sum(batch.weight), out.activation_max


def step_times(jobs: Sequence[Job], text: ablations.Text) -> dict[str, float]:
  """Milliseconds of a train step by variant, medians; the jobs take turns."""
  batch = next(batches(text.train, 0))
  runs = {}
  for job in jobs:
    variant, (_, step, new) = job.variant, prepare(job)
    runs[variant] = step, step(new(0), batch)[0]
  times: dict[str, list[float]] = {variant: [] for variant in runs}
  for _ in range(15):
    for variant, (step, state) in runs.items():
      started = time.perf_counter()
      state = jax.block_until_ready(step(state, batch)[0])
      times[variant].append((time.perf_counter() - started) * 1e3)
      runs[variant] = step, state
  return {variant: float(np.median(values)) for variant, values in times.items()}


def reached(curve: Sequence[tuple[int, float]], loss: float) -> float:
  """Steps until a loss, interpolated; infinite if it is not reached."""
  for (step, value), (before, last) in zip(curve[1:], curve[:-1], strict=True):
    if value <= loss:
      share = (last - loss) / max(last - value, 1e-9)
      return before + min(max(share, 0.0), 1.0) * (step - before)
  return float('inf')


def rows(
  results: Sequence[Mapping[str, Any]], times: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
  """The best rate of each optimizer and model: a row of the table."""
  found = []
  shapes = dict.fromkeys((r['width'], r['layers']) for r in results)
  for width, layers in shapes:
    here = [r for r in results if (r['width'], r['layers']) == (width, layers)]
    best = {}
    for variant in dict.fromkeys(r['variant'] for r in here):
      mine = [r for r in here if r['variant'] == variant]
      best[variant] = [r for r in mine if r['rate'] == best_rate(mine)]
    adam = {r['seed']: r for r in best.get('adam', [])}
    step_ms = times[f'{width}x{layers}']
    for variant, mine in best.items():
      at_time, to_adam = [], []
      for r in mine:
        if r['seed'] not in adam:
          continue
        curve = np.array([(0, np.nan), *r['curve']])
        share = step_ms['adam'] / step_ms[variant]
        at = min(share, 1.0) * r['steps']
        at_time.append(float(np.interp(at, curve[1:, 0], curve[1:, 1])))
        to_adam.append(reached(r['curve'], adam[r['seed']]['loss']) / r['steps'])
      found.append(
        {
          'width': width,
          'layers': layers,
          'variant': variant,
          'rate': mine[0]['rate'],
          'loss': [r['loss'] for r in mine],
          'at_adams_time': at_time,
          'steps_to_adams': to_adam,
          'max_violation': [r['max_violation'] for r in mine],
          'activation': [r['activation'] for r in mine],
          'evaluations': [r['evaluations'] for r in mine],
          'step': step_ms[variant] / step_ms.get('adam', step_ms[variant]),
        }
      )
  return found


def search(
  rates: Sequence[float], run: Callable[[float], Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
  """Results of all rates, and of more while the best one is at an end."""
  tried = [run(rate) for rate in sorted(rates)]
  for _ in range(MOST_EXTENSIONS):
    losses = [result['loss'] for result in tried]
    best = losses.index(min(losses))
    if best == 0:
      tried.insert(0, run(tried[0]['rate'] / 2))
    elif best == len(tried) - 1:
      tried.append(run(tried[-1]['rate'] * 2))
    else:
      break
  return tried


def best_rate(results: Sequence[Mapping[str, Any]]) -> float:
  """The rate of the lowest loss of the first seed."""
  first = [r for r in results if r['seed'] == results[0]['seed']]
  return min(first, key=lambda r: r['loss'])['rate']


def table(found: Sequence[Mapping[str, Any]]) -> str:
  """Markdown of `rows`."""
  names = ['width × layers', 'optimizer', 'best rate', 'loss', "at Adam's time"]
  names += ["steps to Adam's", 'MaxVio', 'activation', 'evaluations', 'step']
  groups = {'Loss': names[2:6], 'State and cost': names[6:]}
  lines = []

  def cell(values, digits):
    if not values:
      return ''
    low, middle, high = np.quantile(values, (0, 0.5, 1))
    spread = f' [{low:.{digits}f}, {high:.{digits}f}]' if len(values) > 1 else ''
    return f'{middle:.{digits}f}{spread}'

  for row in found:
    cells = [f'{row["width"]} × {row["layers"]}', row['variant'], f'{row["rate"]:g}']
    cells += [cell(row['loss'], 3), cell(row['at_adams_time'], 3)]
    cells += [cell(row['steps_to_adams'], 2), cell(row['max_violation'], 2)]
    cells += [cell(row['activation'], 1), cell(row['evaluations'], 1)]
    cells += [f'{row["step"]:.2f}']
    lines.append(cells)
  return harness.markdown(names, lines, groups)


def measure(args: argparse.Namespace) -> tuple[list[dict], dict[str, dict]]:
  """Results of all runs, and times of a step by model; stored ones are not repeated."""
  text = ablations.read(args.files)
  kept = harness.Results(args.results)

  def run(job, seeds):
    return [
      kept.once((*job, seed), lambda s=seed: train(job, s, text)) for seed in seeds
    ]

  results, times = [], {}
  for shape in args.models:
    width, layers = (int(n) for n in shape.split('x'))
    jobs = [Job(name, width, layers, args.rates[0], args.steps) for name in args.names]
    for job in jobs:

      def at(rate, job=job):
        return run(job._replace(rate=rate), args.seeds[:1])[0]

      tried = search(args.rates, at)
      best = job._replace(rate=best_rate(tried))
      results += tried + run(best, args.seeds[1:])
    take = functools.partial(step_times, jobs, text)
    times[shape] = kept.once(('times', shape, args.steps, *sorted(args.names)), take)
  return results, times


def main() -> None:
  parser = harness.parser(__doc__, results=True)
  parser.add_argument('--steps', type=int, default=150)
  parser.add_argument('--names', nargs='+', default=list(VARIANTS), choices=VARIANTS)
  parser.add_argument('--rates', type=float, nargs='+', default=list(RATES))
  parser.add_argument(
    '--models',
    nargs='+',
    default=['32x2', '64x2', '128x2', '32x8'],
    help='WIDTHxLAYERS; a width is a multiple of 16',
  )
  parser.add_argument('--files', type=int, default=200)
  args = parser.parse_args()
  results, times = measure(args)
  found = rows(results, times)
  harness.show(args, results, lambda _: tables(results, found), rows=found)


def tables(results: Sequence[Mapping[str, Any]], found: Sequence[Mapping]) -> str:
  """The table, and below it the loss by rate of the first seed."""
  by_rate = [
    (r['width'], r['layers'], r['variant'], r['rate'], r['loss']) for r in results
  ]
  lines = [table(found), '', 'loss by rate, first seed:']
  for width, layers, variant in dict.fromkeys(r[:3] for r in by_rate):
    mine = {r[3]: r[4] for r in reversed(by_rate) if r[:3] == (width, layers, variant)}
    cells = ', '.join(f'{rate:g}: {mine[rate]:.3f}' for rate in sorted(mine))
    lines.append(f'  {width} × {layers} {variant}: {cells}')
  return '\n'.join(lines)


if __name__ == '__main__':
  main()
