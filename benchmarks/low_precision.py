"""Low precision on text: loss of training, and errors of log-probabilities in serving.

  python -m benchmarks.low_precision         # two tables; --json for the numbers
  python -m benchmarks.low_precision --seeds 0 --json > 0.json    # a seed at a time
  python -m benchmarks.low_precision --results 0.json 1.json      # their tables

Trains small M2s on the same batches of Python's standard library with each kind of
`ModelConfig.matmuls`, and with one optimizer (Muon, Adam for the rest). `loss` is in
nats per token on held-out files, `of plain` its relative difference from the loss of
plain matmuls with the same seed, `step` the time of a train step over theirs, timed
alternately: on a CPU it is the emulation's time and predicts nothing about other
devices.

The models of plain matmuls are then scored as the rollout engine would: keys and values
go through its pages. Serving is compared with fp32 everywhere for weights in bf16,
weights in block FP8 with and without quantised activations, and a cache in e4m3. `mean`
and `99 %` are of |Δ log p| over held-out tokens, `loss` the difference of the mean of
-log p, `bytes` those of the linear layers' weights, or of a token in the cache, as a
share of fp32's.

Cells are medians over seeds [min, max].
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ablations, harness, optimizers
from m2jax import config as model_config
from m2jax import optim
from m2jax.config import Matmuls, ModelConfig
from m2jax.kernels import block_fp8
from m2jax.kernels.block_fp8 import weights
from m2jax.layers import head
from m2jax.optim import optimizer as optimizer_lib
from m2jax.optim.schedules import ScheduleConfig
from m2jax.rollout.engine import forward
from m2jax.rollout.engine import pages as pages_lib
from m2jax.train import step as train_step

KINDS = {
  'plain': Matmuls(),
  'block_fp8': Matmuls('block_fp8'),
  'block_fp8, powers of two': Matmuls('block_fp8', power_of_two=True),
  'activations_int8': Matmuls('activations_int8'),
  'activations_int4': Matmuls('activations_int4'),
}
HELD_OUT_BATCHES = 8
PAGE_TOKENS = 16


class Serving(NamedTuple):
  """A way to serve.

  Attributes:
    weights: dtype of the linear layers' weights.
    matmuls: kind of `KINDS`.
    cache: dtype of keys and values.
  """

  weights: str = 'float32'
  matmuls: str = 'plain'
  cache: str = 'float32'


SERVING = {
  'weights bf16': Serving('bfloat16'),
  'weights FP8': Serving('block_fp8'),
  'weights and activations FP8': Serving('block_fp8', 'block_fp8'),
  'cache bf16': Serving(cache='bfloat16'),
  'cache FP8': Serving(cache='float8_e4m3fn'),
  'weights, activations and cache FP8': Serving(
    'block_fp8', 'block_fp8', 'float8_e4m3fn'
  ),
}


def model(kind: str) -> ModelConfig:
  """A small M2 whose matrices have several blocks a side."""
  return dataclasses.replace(
    model_config.tiny(),
    vocab_size=ablations.VOCABULARY,
    num_layers=2,
    embed_dim=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    expert_dim=160,
    num_mtp_modules=0,
    matmuls=KINDS[kind],
  )


@functools.lru_cache
def prepare(kind: str, steps: int):
  """Step function, and seed → state at the start."""
  cfg = model(kind)
  optimizer = optim.OptimizerConfig(
    name='muon',
    muon=optim.MuonConfig(learning_rate=0.02),
    adam=optim.AdamConfig(learning_rate=3e-3),
    schedule=ScheduleConfig(
      'cosine',
      warmup_steps=max(1, steps // 20),
      total_steps=steps,
      final_fraction=0.1,
    ),
  )
  tx = optimizer_lib.make(optimizer, cfg)
  step = train_step.make_step(
    cfg, tx, train_step.nll, train_step.StepConfig(micro_rows=optimizers.ROWS)
  )
  new = jax.jit(lambda key: train_step.new_state(cfg, tx, key))
  return step, lambda seed: new(jax.random.key(seed))


def held_out(text: ablations.Text) -> list:
  return list(itertools.islice(optimizers.batches(text.held_out, 0), HELD_OUT_BATCHES))


def train(kind: str, steps: int, seed: int, text: ablations.Text):
  """The loss after all steps, and the variables."""
  step, new = prepare(kind, steps)
  state = new(seed)
  for _, batch in zip(range(steps), optimizers.batches(text.train, seed), strict=False):
    state, _ = step(state, batch)
  losses = [optimizers.look(model(kind), state.variables, b) for b in held_out(text)]
  loss = float(np.mean([loss for loss, _ in losses]))
  print(f'{kind} seed {seed}: {loss:.4f}', file=sys.stderr)
  return loss, state.variables


def step_times(kinds: Sequence[str], steps: int, text: ablations.Text) -> dict:
  """Medians of a train step's seconds; the kinds take turns."""
  batch = next(optimizers.batches(text.train, 0))
  states = {kind: prepare(kind, steps)[1](0) for kind in kinds}
  times: dict[str, list[float]] = {kind: [] for kind in kinds}
  for _, kind in itertools.product(range(12), kinds):
    started = time.perf_counter()
    states[kind] = jax.block_until_ready(
      prepare(kind, steps)[0](states[kind], batch)[0]
    )
    times[kind].append(time.perf_counter() - started)
  return {kind: float(np.median(values[2:])) for kind, values in times.items()}


def in_dtype(variables: Mapping[str, Any], dtype: str) -> dict[str, Any]:
  """Variables with the linear layers' weights in a dtype."""
  if dtype == 'block_fp8':
    return block_fp8.quantize_variables(variables)
  return weights.map_weights(lambda w: w.astype(dtype), variables)


@functools.partial(jax.jit, static_argnums=0)
def logprobs(serving: Serving, variables, tokens) -> jax.Array:
  """[rows, CONTEXT − 1], through the engine's pages."""
  cfg = model(serving.matmuls)
  rows, count = tokens.shape
  n = -(-count // PAGE_TOKENS)
  tables = 1 + jnp.arange(rows * n, dtype=jnp.int32).reshape(rows, n)
  pages = pages_lib.empty(cfg, 1 + rows * n, PAGE_TOKENS, serving.cache)
  ends = jnp.zeros(rows, jnp.int32), jnp.full(rows, count, jnp.int32)
  given = forward.Rows(tokens, *ends, tables)
  hidden, _ = forward.extend(cfg, in_dtype(variables, serving.weights), pages, given)
  scores = jax.nn.log_softmax(head.logits(variables['params'], hidden[:, :-1]))
  return jnp.take_along_axis(scores, tokens[:, 1:, None], axis=2)[..., 0]


def serve(variables, text: ablations.Text) -> dict[str, dict[str, float]]:
  """Errors of every way to serve a model."""
  tokens = [jnp.asarray(batch.tokens) for batch in held_out(text)]
  score = lambda how: np.concatenate([logprobs(how, variables, t) for t in tokens])
  exact, found = score(Serving()), {}
  for name, how in SERVING.items():
    mine = score(how)
    error = np.abs(mine - exact)
    found[name] = {
      'mean': float(np.mean(error)),
      '99 %': float(np.quantile(error, 0.99)),
      'loss': float(np.mean(exact - mine)),
    }
  return found


def sizes(variables) -> dict[str, str]:
  """Bytes of each way to serve over those of fp32."""
  cfg = model('plain')

  def linear(dtype):
    made = jax.eval_shape(functools.partial(in_dtype, dtype=dtype), variables)
    layers = made['params']['layers']
    arrays = jax.tree.leaves({name: layers[name] for name in weights.NAMES})
    return sum(a.size * a.dtype.itemsize for a in arrays)

  def cache(dtype):
    pages = jax.eval_shape(lambda: pages_lib.empty(cfg, 1, PAGE_TOKENS, dtype))
    return (pages.k.size + pages.v.size) * pages.k.dtype.itemsize

  found = {}
  for name, how in SERVING.items():
    parts = [
      f'{what} {size(dtype) / size("float32"):.3f}'
      for what, size, dtype in (
        ('weights', linear, how.weights),
        ('cache', cache, how.cache),
      )
      if dtype != 'float32'
    ]
    found[name] = ', '.join(parts)
  return found


def cell(values: Sequence[float], form: str) -> str:
  """The median, and the range if there are several."""
  low, middle, high = np.quantile(values, (0, 0.5, 1))
  spread = f' [{low:{form}}, {high:{form}}]' if len(values) > 1 else ''
  return f'{middle:{form}}{spread}'


def markdown(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  rows = [names, ['---'] * len(names), *lines]
  return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def tables(found: Mapping[str, Any]) -> str:
  """Both tables in Markdown."""
  losses = found['losses']
  training = []
  for kind, mine in losses.items():
    pairs = zip(mine, losses['plain'], strict=True)
    of_plain = [a / b - 1 for a, b in pairs]
    step = found['step_s'][kind] / found['step_s']['plain']
    training.append([kind, cell(mine, '.4f'), cell(of_plain, '+.2%'), f'{step:.2f}'])
  serving = []
  for name in SERVING:
    mine = [one[name] for one in found['serving']]
    serving.append(
      [
        name,
        *(cell([m[key] for m in mine], '.4f') for key in ('mean', '99 %')),
        cell([m['loss'] for m in mine], '+.4f'),
        found['bytes'][name],
      ]
    )
  return '\n\n'.join(
    [
      markdown(['matmuls', 'loss', 'of plain', 'step'], training),
      markdown(['served with', 'mean', '99 %', 'loss', 'bytes'], serving),
    ]
  )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
  parser = harness.parser(__doc__)
  parser.add_argument('--kinds', nargs='+', choices=KINDS, default=['block_fp8'])
  parser.add_argument('--steps', type=int, default=100)
  parser.add_argument('--files', type=int, default=200)
  parser.add_argument('--results', nargs='+', type=pathlib.Path, default=[])
  args = parser.parse_args(arguments)
  if args.results:
    found = joined([json.loads(path.read_text()) for path in args.results])
  else:
    found = measured(args)
  print(json.dumps(found) if args.json else tables(found))
  return found


def measured(args: argparse.Namespace) -> dict[str, Any]:
  """What the tables show, of all seeds."""
  kinds = list(
    dict.fromkeys(['plain', *args.kinds])
  )  # what the others are compared with
  text = ablations.read(args.files)
  runs = {k: [train(k, args.steps, s, text) for s in args.seeds] for k in kinds}
  return {
    'losses': {kind: [loss for loss, _ in mine] for kind, mine in runs.items()},
    'step_s': step_times(kinds, args.steps, text),
    'serving': [serve(variables, text) for _, variables in runs['plain']],
    'bytes': sizes(runs['plain'][0][1]),
  }


def joined(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """The results of several runs, each of other seeds."""
  kinds = found[0]['losses']
  return {
    'losses': {kind: [x for f in found for x in f['losses'][kind]] for kind in kinds},
    'step_s': {k: float(np.median([f['step_s'][k] for f in found])) for k in kinds},
    'serving': [one for f in found for one in f['serving']],
    'bytes': found[0]['bytes'],
  }


if __name__ == '__main__':
  main()
