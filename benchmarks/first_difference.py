"""Where engine and learner first differ about a trajectory: layer, operation and token.

  python -m benchmarks.first_difference --workdir=RUN [--trajectory=SESSION] [--step=N]
    [--numerics=invariant] [--dtype=bfloat16] [--json]

Weights are a checkpoint's of the run, on both sides, whichever sampled the trajectory.
The learner makes one pass over the merged forest of its completions. The engine
computes each completion in calls of the run's shapes: the prompt in chunks, then a
token a call. Callbacks show what each operation computes, and XLA does not fuse over
what is shown; log-probabilities are computed without callbacks, too. A difference that
is only there is one of fusion.

Prints each operation that differs, in order, with the number of its tokens that do, the
first of them and the largest difference; the first line is the answer.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from experiments import common
from m2jax import forest, model, platforms
from m2jax.checkpoint import CheckpointError, policy
from m2jax.checks import InvalidSetting
from m2jax.config import ModelConfig
from m2jax.kernels.token_logprobs import normaliser
from m2jax.layers import taps
from m2jax.records import Completion
from m2jax.rollout.engine import contexts, forward
from m2jax.rollout.engine.calls import Calls
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.sharding import ONE_DEVICE
from m2jax.viewer.run import Run

LOGPROB = 'log-probability'
_BEFORE, _AFTER = 'embedding', 'final norm'  # the layers
# (layer, operation) → values of a sequence's tokens
Values = dict[tuple[int, str], np.ndarray]
# operation → its values in the order of the layers
Shown = dict[str, list[np.ndarray]]


class Difference(NamedTuple):
  """An operation whose values differ.

  Attributes:
    layer: its layer; -1 for those outside of layers.
    operation: its name, as `layers.taps` has it.
    differing, of: tokens that differ, and all.
    completion, token: the first of them, and its position.
    largest: the largest |learner − engine|.
  """

  layer: int
  operation: str
  differing: int
  of: int
  completion: int
  token: int
  largest: float


def differences(
  cfg: ModelConfig,
  variables,
  config: EngineConfig,
  completions: Sequence[Completion],
  of_engine=None,
) -> tuple[list[Difference], float]:
  """Operations that differ, in order; the largest difference of log-probabilities
  without callbacks. `of_engine`: weights of the engine, if others."""
  served = model.without_modules(cfg, of_engine or variables)[1]
  cfg, variables = model.without_modules(cfg, variables)
  tokens = [np.asarray(c.tokens, np.int32) for c in completions]
  replay = Replay(cfg, config, served)
  found, unseen = collections.defaultdict(list), []
  for shows in (True, False):
    ours = learned(cfg, variables, tokens, shows)
    for i, (c, (values, logprob)) in enumerate(zip(completions, ours, strict=True)):
      theirs, engine_logprob = replay(tokens[i], len(c.prompt_ids), shows)
      own = logprob[len(c.prompt_ids) :]
      if not shows:
        unseen.append(np.max(np.abs(own - engine_logprob), initial=0.0))
        continue
      for key, x in theirs.items():
        found[key].append((i, 0, _gap(values[key][: len(x)], x)))
      found[cfg.num_layers, LOGPROB].append(
        (i, len(c.prompt_ids), np.abs(own - engine_logprob))
      )
  out = [_summary(*key, gaps) for key, gaps in found.items()]
  return [d for d in out if d.differing], float(max(unseen))


def _gap(a, b):
  """[n]: each token's largest difference."""
  wide = [np.asarray(x, np.float64).reshape(len(x), -1) for x in (a, b)]
  return np.max(np.abs(wide[0] - wide[1]), axis=1, initial=0.0)


def _summary(layer: int, operation: str, gaps) -> Difference:
  first = next(
    ((i, start + int(np.argmax(gap > 0))) for i, start, gap in gaps if gap.any()),
    (-1, -1),
  )
  every = np.concatenate([gap for *_, gap in gaps])
  counts = int((every > 0).sum()), len(every)
  return Difference(layer, operation, *counts, *first, float(every.max(initial=0.0)))


@contextlib.contextmanager
def _listening(shows: bool, shown: Shown) -> Iterator[None]:
  """Programs traced inside append to `shown` what their operations compute."""
  listener = lambda name, x: shown.setdefault(name, []).append(np.asarray(x))
  with taps.to(listener) if shows else contextlib.nullcontext():
    yield


def _by_layer(shown: Shown, layers: int) -> Values:
  """In order: what comes before the layers, the layers, and what comes after."""
  if not shown:
    return {}
  inside = [name for name in shown if name not in (_BEFORE, _AFTER)]
  found = {(i, name): shown[name][i] for i in range(layers) for name in inside}
  return {(-1, _BEFORE): shown[_BEFORE][0], **found, (layers, _AFTER): shown[_AFTER][0]}


def learned(
  cfg: ModelConfig, variables, sequences: Sequence[np.ndarray], shows: bool
) -> Iterator[tuple[Values, np.ndarray]]:
  """Yields the learner's values and log-probabilities for each sequence."""
  merged = forest.merge([forest.Sample(t) for t in sequences], rows=1)
  run = jax.jit(lambda variables, batch: model.forward(cfg, variables, batch).logprob)
  shown: Shown = {}
  with _listening(shows, shown):
    logprob = np.asarray(run(variables, merged))[0]
    jax.effects_barrier()
  values, child = _by_layer(shown, cfg.num_layers), {}
  for i in range(merged.num_tokens):
    child[int(merged.parent[0, i]), int(merged.tokens[0, i])] = i
  for sequence in sequences:
    path = [-1]
    for token in sequence.tolist():
      path.append(child[path[-1], token])
    at = np.array(path[1:])
    yield {key: x[at] for key, x in values.items()}, logprob[at]


class Replay:
  """An engine's calls, with given tokens in place of those that it would draw."""

  def __init__(self, cfg: ModelConfig, config: EngineConfig, variables):
    """Takes the shapes of the smallest calls of the config."""
    self._rows, (_, self._chunk) = config.decode_rows[0], config.prefill_shapes[0]
    config = dataclasses.replace(
      *(config,),
      slots=self._rows,
      pages=0,
      decode_rows=(self._rows,),
      prefill_shapes=((1, self._chunk),),
      draft_tokens=0,
      record_experts=False,
    )
    engine = Engine(cfg, config)
    self._calls = Calls(cfg, config, ONE_DEVICE, engine.keeps_contexts)
    self._params = engine.load_params(variables)
    self._pages = engine.init_decode_state().pages
    programs = lambda: (jax.jit(self._prefill), jax.jit(self._decode))
    self._programs = {shows: programs() for shows in (True, False)}
    self._shown: Shown = {}  # the programs append to it whenever they run
    self._table = np.arange(1, 1 + config.context_pages, dtype=np.int32)

  def __call__(
    self, tokens: np.ndarray, prompt: int, shows: bool
  ) -> tuple[Values, np.ndarray]:
    """Values of all tokens but the last, and the response's log-probabilities."""
    prefill, decode = self._programs[shows]
    found, logprobs, pages = collections.defaultdict(list), [], self._pages
    starts = [*range(0, prompt - 1, self._chunk), *range(prompt - 1, len(tokens) - 1)]
    shown = self._shown
    with _listening(shows, shown):
      for i in starts:
        shown.clear()
        if i < prompt - 1:
          now = tokens[i : min(i + self._chunk, prompt - 1)]
          pages = prefill(self._params, pages, self._call(now, i, 1, self._chunk))
        else:
          now = tokens[i : i + 1]
          call = self._call(now, i, self._rows, 1)
          pages, logprob = decode(self._params, pages, call, tokens[i + 1])
          logprobs.append(logprob)
        jax.effects_barrier()
        for key, x in _by_layer(shown, self._calls.cfg.num_layers).items():
          found[key].append(x[: len(now)])
    values = {key: np.concatenate(parts) for key, parts in found.items()}
    return values, np.array(logprobs)

  def _call(self, tokens, start: int, rows: int, size: int) -> forward.Rows:
    """A call whose first row has the tokens; the others are padding."""
    padded = np.zeros((rows, size), np.int32)
    padded[0, : len(tokens)] = tokens
    first = (np.arange(rows) == 0).astype(np.int32)
    tables = first[:, None] * self._table
    return forward.Rows(padded, first * start, first * len(tokens), tables)

  def _prefill(self, params, pages, rows):
    return self._calls.extend(params, pages, rows)[1]

  def _decode(self, params, pages, rows, token):
    cfg, cached = self._calls.cfg, pages
    if self._calls.contexts:
      cached = contexts.take(pages, rows.tables, cfg.num_layers)
    hidden, cached = self._calls.extend(params, cached, rows)
    logits = self._calls.logits(params, hidden[:, 0])
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    logprob = scaled[0, token] - normaliser(scaled, cfg.invariant)[1][0]
    if self._calls.contexts:
      at = rows.tables, rows.starts, rows.counts
      cached = contexts.put_back(pages, cached, *at, 1)
    return cached, logprob


def table(found: dict[str, Any]) -> str:
  lines = [
    [
      'all' if d['layer'] < 0 else str(d['layer']),
      d['operation'],
      f'{d["differing"]} of {d["of"]}',
      f'{d["token"]} of completion {d["completion"]}',
      f'{d["largest"]:.2g}',
    ]
    for d in found['differences']
  ]
  head = ['layer', 'operation', 'tokens that differ', 'first token', 'largest']
  said = harness.markdown(head, lines) if lines else 'Every operation is equal.'
  unseen = found['logprob_without_callbacks']
  return f'{said}\n\nLog-probabilities without callbacks differ by {unseen:.2g} nats.'


def main() -> None:
  parser = harness.parser(__doc__, seeds=False, workdir=True)
  parser.add_argument('--trajectory', default='', help='session, or its beginning')
  parser.add_argument('--step', type=int, help='of the checkpoint; default: the latest')
  parser.add_argument('--numerics', help="default: the run's")
  parser.add_argument('--dtype', help="of activations; default: the run's")
  args = parser.parse_args()
  platforms.own_only()
  with common.interruptible():
    try:
      found = measure(args)
    except (CheckpointError, InvalidSetting) as error:
      common.fail(error)
  harness.show(args, found, table)


def measure(args) -> dict[str, Any]:
  workdir = pathlib.Path(args.workdir)
  loaded = policy.load(workdir, args.step)
  changes = {'numerics': args.numerics, 'dtype': args.dtype}
  changes = {name: value for name, value in changes.items() if value}
  cfg = dataclasses.replace(loaded.model, **changes)
  values = json.loads((workdir / 'config.json').read_text())['engine']
  as_tuples = lambda x: tuple(map(as_tuples, x)) if isinstance(x, list) else x
  config = EngineConfig(**{name: as_tuples(value) for name, value in values.items()})
  with contextlib.closing(Run(workdir)) as run:
    for session in run.reader.sessions_like(args.trajectory):
      recorded = [c for _, c in run.reader.recorded(session) if c is not None]
      if recorded:
        break
    else:
      raise SystemExit(f'--trajectory={args.trajectory}: none with its token ids')
  found, unseen = differences(cfg, loaded.variables, config, recorded)
  return {
    'session': session,
    'step': loaded.step,
    'numerics': cfg.numerics,
    'dtype': cfg.dtype,
    'differences': [d._asdict() for d in found],
    'logprob_without_callbacks': unseen,
  }


if __name__ == '__main__':
  main()
