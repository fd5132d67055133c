"""GNMR on small models: loss, and how much of the work ran at higher precision.

  python -m benchmarks.gnmr                    # the tables; --json for the numbers
  python -m benchmarks.gnmr --scenarios faults --seeds 0 --steps 40

Four scenarios, of 8 layers, on real text (facts/algorithms.md §2):

  activations   from random weights on Python's standard library, with activations that
                are saved for the weights' gradients rounded to 4 bits; recovery: 8.
  wrong_scale   the same in emulated block FP8; during some steps the scales of one
                layer's weights are wrong by a factor of 8. Recovery: float32.
  saturation    the same, but the layer's quantiser saturates at a twentieth of each
                tile's maximum.
  fine_tuning   weights pre-trained at float32 on the library's code are fine-tuned on
                Python's reference manual, in block FP8; recovery: float32.

Policies: which layers take the recovery path. `low` none, `high` all; `gnmr A` by the
controller with α = A, and α = β = 1.36·A for the first 2.5 % of the steps and for
Δ-GNMR, which are the paper's 1.5 where A is its 1.1 (δ 5, at most a quarter of the
layers at a time); `static` always the quarter of the layers whose gradients are largest
in the first step; `random A` each layer and step by chance, with the share that
`gnmr A` has promoted with the same seed. All policies of a scenario run the same
compiled step: the route is its data.

Columns: `loss` in nats per token on held-out text after all steps, computed on the
recovery path; `promoted` the share of (layer, step) on the recovery path; `cap hits`
the share of steps with more candidates than the cap; `faulty steps recovered` the share
of the faulty layer's steps that were on the recovery path; `step` the median time of a
step over that of `high`. On a CPU low precision is emulated and not faster. Cells are
medians over seeds [min, max].
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ablations, harness, optimizers
from m2jax import config as model_config
from m2jax import model as model_lib
from m2jax import optim
from m2jax.config import Matmuls
from m2jax.optim import gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.text import tokenizer
from m2jax.train import step as train_step

WIDTH, LAYERS = 32, 8
ACTIVE = LAYERS // 4
LOW, HIGH, FAULTY = range(3)  # indices into Model.paths
RATES = {
  'activations': 5e-3,
  'wrong_scale': 5e-3,
  'fine_tuning': 2e-3,
  'saturation': 5e-3,
}
POLICIES = ('low', 'high', 'gnmr 1.1', 'random 1.1', 'gnmr 2', 'random 2', 'static')
WRONG_SCALE = 8.0
QUANTISED = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


@dataclasses.dataclass(frozen=True)
class Model(model_config.ModelConfig):
  """A model with a third path, for layers that have a fault."""

  fault: Matmuls = model_config.PLAIN

  @property
  def paths(self) -> tuple[Matmuls, ...]:
    return self.matmuls, self.recovery, self.fault


def model(scenario: str) -> Model:
  """The model of `benchmarks.optimizers`, at a scenario's precisions."""
  int4, int8 = (Matmuls(f'activations_int{bits}') for bits in (4, 8))
  fp8 = Matmuls('block_fp8')
  low, high, fault = {
    'activations': (int4, int8, int4),
    'wrong_scale': (fp8, model_config.PLAIN, fp8),
    'saturation': (fp8, model_config.PLAIN, Matmuls('block_fp8', clip=0.05)),
    'fine_tuning': (fp8, model_config.PLAIN, fp8),
  }[scenario]
  base = dataclasses.replace(optimizers.model(WIDTH, LAYERS), unroll_layers=False)
  return Model(**vars(base) | dict(matmuls=low, recovery=high, fault=fault))


def faults(scenario: str, seed: int, steps: int) -> np.ndarray:
  """Which layer has a fault in which step, [steps, LAYERS]: three layers, one after
  the other, for a sixteenth of the steps each."""
  found = np.zeros((steps, LAYERS), bool)
  if scenario in ('wrong_scale', 'saturation'):
    layers = np.random.default_rng([seed, 3]).permutation(LAYERS)[:3]
    for number, layer in enumerate(layers, start=1):
      start = number * steps // 4
      found[start : start + max(1, steps // 16), layer] = True
  return found


class Text(NamedTuple):
  """Token streams: Python code, and the reference manual."""

  code: np.ndarray
  code_held_out: np.ndarray
  manual: np.ndarray
  manual_held_out: np.ndarray


@functools.cache
def read(files: int) -> Text:
  """Streams by one tokenizer, trained on both texts; a tenth of the topics held out."""
  train, held_out = ablations.texts(files)
  topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
  held = topics[::10]
  topics = [topic for number, topic in enumerate(topics) if number % 10]
  tok = tokenizer.train([*train[::4], *topics[::4]], ablations.VOCABULARY)
  return Text(*(ablations.stream(tok, t) for t in (train, held_out, topics, held)))


class Programs(NamedTuple):
  """Compiled parts of a scenario.

  Attributes:
    new: key → state at the start.
    micro, apply: `train_step.Programs`.
    norms: Sums → gradient norms of the layers.
    loss: (variables, forest) → nats per token on the recovery path.
  """

  new: Callable[..., Any]
  micro: Callable[..., Any]
  apply: Callable[..., Any]
  norms: Callable[..., Any]
  loss: Callable[..., Any]


@functools.lru_cache(maxsize=1)
def programs(scenario: str, steps: int) -> Programs:
  cfg = model(scenario)
  optimizer = optim.OptimizerConfig(
    adam=optim.AdamConfig(learning_rate=RATES[scenario]),
    schedule=optim.ScheduleConfig(
      'cosine', max(1, steps // 20), total_steps=steps, final_fraction=0.1
    ),
  )
  tx = optimizer_lib.make(optimizer, cfg)
  parts = train_step.programs(
    cfg, tx, train_step.nll, train_step.StepConfig(micro_rows=optimizers.ROWS)
  )

  @jax.jit
  def loss(variables, batch):
    out = model_lib.forward(
      dataclasses.replace(cfg, matmuls=cfg.recovery), variables, batch
    )
    total, _ = train_step.nll(train_step.at_terms(out.logprob, batch), batch)
    return total / jnp.sum(batch.weight)

  return Programs(
    jax.jit(functools.partial(train_step.new_state, cfg, tx)),
    parts.micro,
    parts.apply,
    jax.jit(lambda sums: gnmr.block_norms(sums.gradients['layers'])),
    loss,
  )


@jax.jit
def scaled(variables, paths, scale):
  """Variables with a route, where a layer's quantised weights are `scale` times theirs:
  what the matmuls see if the scales of their blocks are wrong."""
  layers = variables['params']['layers']

  def wrong(name, leaf):
    factor = scale.astype(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
    return leaf * factor if name in QUANTISED else leaf

  layers = {name: wrong(name, leaf) for name, leaf in layers.items()}
  params = {**variables['params'], 'layers': layers}
  return {**variables, 'params': params, 'route': paths}


@functools.cache
def controller(config: gnmr.GnmrConfig):
  return jax.jit(functools.partial(gnmr.update, config))


def gnmr_config(policy: str, steps: int) -> gnmr.GnmrConfig:
  """Thresholds of a policy `gnmr A`; those of the paper for other policies."""
  name, _, alpha = policy.partition(' ')
  alpha = float(alpha) if name == 'gnmr' else 1.1
  return gnmr.GnmrConfig(
    max_active=ACTIVE,
    alpha=alpha,
    first_alpha=alpha * 1.5 / 1.1,
    first_steps=steps // 40,
    beta=alpha * 1.5 / 1.1,
  )


def route_of(policy: str, rng, norms: np.ndarray | None, chosen, share: float):
  """The layers on the recovery path in a step, [LAYERS] bool.

  Args:
    policy: one of POLICIES.
    rng: the generator that 'random' draws from.
    norms: each layer's norm in the first step; None before it.
    chosen: the controller's choice.
    share: the share of layers that 'random' chooses.
  """
  if policy == 'static' and norms is not None:
    return np.argsort(np.argsort(-norms)) < ACTIVE
  if policy.startswith('random'):
    return rng.random(LAYERS) < share
  if policy.startswith('gnmr'):
    return np.asarray(chosen)
  return np.full(LAYERS, policy == 'high')


@functools.cache
def pretrained(seed: int, steps: int, files: int):
  """Variables after training on code, all layers on the recovery path."""
  parts = programs('fine_tuning', steps)
  state = parts.new(jax.random.key(seed))
  route = jnp.full(LAYERS, HIGH)
  batches = optimizers.batches(read(files).code, seed)
  for batch in itertools.islice(batches, steps):
    state, _ = parts.apply(
      state, parts.micro({**state.variables, 'route': route}, batch)
    )
  return jax.device_get(state.variables)


def train(
  scenario: str, policy: str, seed: int, steps: int, share: float, files: int
) -> dict[str, Any]:
  """Trains once; returns the run's entries in the table."""
  parts, text = programs(scenario, steps), read(files)
  state = parts.new(jax.random.key(seed))
  streams = text.code, text.code_held_out
  if scenario == 'fine_tuning':
    start = pretrained(seed, steps, files)
    state = dataclasses.replace(state, variables=jax.tree.map(jnp.array, start))
    streams = text.manual, text.manual_held_out
  config = gnmr_config(policy, steps)
  control, chosen, first = gnmr.init(config, LAYERS), np.zeros(LAYERS, bool), None
  fault, rng = faults(scenario, seed, steps), np.random.default_rng([seed, 5])
  routes, hits, times, risks = [], [], [], []
  batches = optimizers.batches(streams[0], seed + 100)
  for number, batch in zip(range(steps), batches, strict=False):
    started = time.perf_counter()
    route = route_of(policy, rng, first, chosen, share)
    paths = np.where(route, HIGH, np.where(fault[number], FAULTY, LOW))
    scale = np.where((paths == FAULTY) & (scenario == 'wrong_scale'), WRONG_SCALE, 1.0)
    sums = parts.micro(scaled(state.variables, paths, scale), batch)
    norms = parts.norms(sums)
    state, _ = parts.apply(state, sums)
    control, chosen = controller(config)(control, norms)
    jax.block_until_ready((state, chosen))
    first = np.asarray(norms) if first is None else first
    times.append((time.perf_counter() - started) * 1e3)
    routes.append(route)
    hits.append(int(control.candidates) > ACTIVE)
    risks.append(np.asarray(control.risk).tolist())
  held_out = itertools.islice(
    optimizers.batches(streams[1], 0), optimizers.HELD_OUT_BATCHES
  )
  loss = float(np.mean([float(parts.loss(state.variables, b)) for b in held_out]))
  print(f'{scenario} {policy} seed {seed}: {loss:.4f}', file=sys.stderr)
  routes, uses = np.array(routes), policy.startswith('gnmr')
  return {
    'scenario': scenario,
    'policy': policy,
    'seed': seed,
    'steps': steps,
    'loss': loss if np.isfinite(loss) else float('inf'),
    'promoted': float(routes.mean()),
    'cap_hits': float(np.mean(hits)) if uses else None,
    'recovered': float(routes[fault].mean()) if fault.any() else None,
    'step_ms': float(np.median(times)),
    'risk': risks if uses else None,
  }


def rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """A row of the table for each policy of a scenario."""
  found = []
  for scenario, policy in dict.fromkeys((r['scenario'], r['policy']) for r in results):
    here = [r for r in results if r['scenario'] == scenario]
    mine = [r for r in here if r['policy'] == policy]
    high = {r['seed']: r for r in here if r['policy'] == 'high'}
    of_low = {r['seed']: r['loss'] for r in here if r['policy'] == 'low'}
    row = {'scenario': scenario, 'policy': policy}
    for name in ('loss', 'promoted', 'cap_hits', 'recovered'):
      row[name] = [r[name] for r in mine if r[name] is not None]
    pairs = [(r, of_low[r['seed']]) for r in mine if r['seed'] in of_low]
    row['from_low'] = [r['loss'] - low for r, low in pairs]
    row['step'] = [
      r['step_ms'] / high[r['seed']]['step_ms'] for r in mine if r['seed'] in high
    ]
    found.append(row)
  return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
  """Markdown of `rows`."""
  names = {
    'loss': ('loss', 4),
    'from_low': ('loss − that of low', 4),
    'promoted': ('promoted', 3),
    'cap_hits': ('cap hits', 3),
    'recovered': ('faulty steps recovered', 2),
    'step': ('step', 2),
  }
  titles = ['scenario', 'policy', *(title for title, _ in names.values())]
  lines = []
  for row in found:
    cells = [row['scenario'], row['policy']]
    cells += [cell(row[name], digits) for name, (_, digits) in names.items()]
    lines.append(cells)
  return harness.markdown(titles, lines)


def cell(values: Sequence[float], digits: int) -> str:
  """Median [min, max]; empty without values."""
  if not values:
    return ''
  low, middle, high = np.quantile(values, (0, 0.5, 1))
  spread = f' [{low:.{digits}f}, {high:.{digits}f}]' if low < high else ''
  return f'{middle:.{digits}f}{spread}'


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
  """Results of all runs; those in the results file are not repeated."""
  kept = harness.Results(args.results)

  def once(scenario, policy, seed):
    key, share = (scenario, policy, seed, args.steps), 0.0
    if key not in kept and policy.startswith('random'):
      budget = policy.replace('random', 'gnmr')
      share = once(scenario, budget, seed)['promoted']
    return kept.once(key, lambda: train(*key, share, args.files))

  runs = itertools.product(args.scenarios, args.policies, args.seeds)
  return [once(*run) for run in runs]


def main() -> None:
  parser = harness.parser(__doc__, results=True)
  parser.add_argument('--steps', type=int, default=120)
  parser.add_argument('--scenarios', nargs='+', default=list(RATES), choices=RATES)
  parser.add_argument('--policies', nargs='+', default=list(POLICIES))
  parser.add_argument('--files', type=int, default=100)
  args = parser.parse_args()
  harness.show(args, measure(args), lambda results: table(rows(results)))


if __name__ == '__main__':
  main()
