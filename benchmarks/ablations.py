"""Ablations of M2's design choices: loss, retrieval by distance, expert balance.

  python -m benchmarks.ablations             # a table; --json for the numbers
  python -m benchmarks.ablations --steps 60 --seeds 0

Trains the variants of configs/ablations.py on the same batches from Python's standard
library. A quarter of the rows is plain text; the others contain needles: for each slot
one value token, then, at a given distance, the slot's question token, and directly
after it the same value as the answer. Values are common tokens of the text, which are
removed from the rest of these rows; question tokens occur nowhere else. Answers have 8
times the weight of other tokens in training.

Measured on held-out files: the loss on plain rows, in nats per token of the run's
tokenizer; retrieval, the fraction of answers that are the most probable token (chance
among a slot's values is 1/8); and MaxVio = (max load − mean load) / mean load of the
experts, averaged over layers, of all plain rows together, and of single training
batches over the last quarter of the steps. Cells are medians over seeds [min, max]. The
elapsed time is printed; the defaults take about 15 minutes on two idle CPU cores, which
run two variants at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import pathlib
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from configs import ablations
from m2jax import forest
from m2jax import model as model_lib
from m2jax.data import corpus
from m2jax.layers import attention, head
from m2jax.moe import router
from m2jax.optim import (
  AdamConfig,
  ByKind,
  MuonConfig,
  OptimizerConfig,
  optimizer,
)
from m2jax.optim.schedules import ScheduleConfig
from m2jax.text import tokenizer
from m2jax.train import step as train_step

CONTEXT, ROWS, VOCABULARY = 128, 16, 1024
SLOTS, VALUES = 8, 8  # values per slot
DISTANCES = (8, 24, 56, 104)  # from a value to its question; windows have 16
QUESTIONS = range(VOCABULARY - SLOTS, VOCABULARY)  # ids that do not occur in text
ANSWER_WEIGHT = 8
HELD_OUT_BATCHES = 8


class Text(NamedTuple):
  """Token streams of training and held-out files, and the value tokens.

  Attributes:
    train, held_out: [tokens] int32.
    values: [SLOTS, VALUES] ids.
  """

  train: np.ndarray
  held_out: np.ndarray
  values: np.ndarray


def texts(files: int) -> tuple[list[str], list[str]]:
  """Files of the standard library: some for training, and held-out ones."""
  exclude = ('test', 'tests', 'site-packages', 'dist-packages')
  domain = corpus.DomainConfig(sysconfig.get_path('stdlib'), ('.py',), exclude)
  found, held_out = corpus.load({'python': domain}, 0.1)
  order = np.random.default_rng(0).permutation(len(found.source))[:files]
  train = [found.source[int(i)].text for i in order]
  return train, [held_out[i].text for i in range(min(len(held_out), files))]


def stream(tok: tokenizer.Tokenizer, documents: Sequence[str]) -> np.ndarray:
  """The documents' tokens, one after the other: [tokens] int32."""
  encoded = [[tok.bos_id, *tok.encode(t, special=False), tok.eos_id] for t in documents]
  return np.concatenate(encoded).astype(np.int32)


def read(files: int) -> Text:
  """Trains a tokenizer on the standard library and encodes it."""
  train, held_out = texts(files)
  tok = tokenizer.train(train[::4], VOCABULARY - SLOTS)
  ids = stream(tok, train)
  common = np.argsort(-np.bincount(ids), kind='stable')
  middle = common[150 : 150 + SLOTS * VALUES]  # neither punctuation nor rare words
  values = np.random.default_rng(0).permutation(middle).reshape(SLOTS, VALUES)
  return Text(ids, stream(tok, held_out), values)


class Needles(NamedTuple):
  """A row.

  Attributes:
    tokens: [CONTEXT].
    answers: index of each answer.
    distances: distance from each value to its question.
  """

  tokens: np.ndarray
  answers: np.ndarray
  distances: np.ndarray


def needles(rng: np.random.Generator, text: np.ndarray, values: np.ndarray) -> Needles:
  """Inserts a value, question and answer of every slot into (enough) plain `text`."""
  row = np.full(CONTEXT, -1, np.int32)
  answers, distances = [], []
  for number, slot in enumerate(rng.permutation(SLOTS)):
    distance = DISTANCES[::-1][
      number % len(DISTANCES)
    ]  # long ones first, while there is space
    while True:
      at = int(rng.integers(CONTEXT - distance - 1))
      places = [at, at + distance, at + distance + 1]
      if np.all(row[places] < 0):
        break
    value = rng.choice(values[slot])
    row[places] = value, QUESTIONS[slot], value
    answers.append(places[-1])
    distances.append(distance)
  free = row < 0
  row[free] = text[~np.isin(text, values)][: free.sum()]
  return Needles(row, np.array(answers), np.array(distances))


def pack(rows: Sequence[np.ndarray]) -> forest.Forest:
  """One chain per row, so that there is one compiled shape."""
  return forest.chain(rows, row_tokens=CONTEXT, rows=ROWS, row_terms=CONTEXT)


def batches(text: Text, seed: int) -> Iterator[forest.Forest]:
  """Yields training batches indefinitely."""
  rng = np.random.default_rng([seed, 1])

  def piece(size):
    start = rng.integers(len(text.train) - size)
    return text.train[start : start + size]

  while True:
    plain = [piece(CONTEXT) for _ in range(ROWS // 4)]
    found = [
      needles(rng, piece(4 * CONTEXT), text.values) for _ in range(ROWS - len(plain))
    ]
    batch = pack([*plain, *(row.tokens for row in found)])
    answers = np.zeros((ROWS, CONTEXT), bool)
    for number, row in enumerate(found, start=len(plain)):
      answers[number, row.answers] = True
    at_terms = np.take_along_axis(answers, np.asarray(batch.term_token), axis=1)
    weight = np.asarray(batch.weight) * np.where(at_terms, ANSWER_WEIGHT, 1)
    weight = weight.astype(np.float32)
    yield dataclasses.replace(batch, weight=weight)


@functools.partial(jax.jit, static_argnums=0)
def _look(cfg, variables, batch):
  """Σ −log p, number of terms, expert loads [L, E] and best next tokens [B, S]."""
  keys = attention.forest_keys(cfg, batch)
  hidden, routing, *_ = model_lib.trunk(
    cfg, variables, batch.tokens, keys, multiplicity=batch.multiplicity
  )
  logits = head.logits(variables['params'], hidden)
  scores = jax.nn.log_softmax(logits[:, :-1])
  logprob = jnp.take_along_axis(scores, batch.tokens[:, 1:, None], axis=2)[..., 0]
  return -jnp.sum(logprob), logprob.size, routing.load, jnp.argmax(logits, axis=-1)


def evaluate(cfg, variables, text: Text) -> dict[str, Any]:
  """Held-out loss, balance and retrieval, on the same rows for all variants."""
  rng = np.random.default_rng(12345)
  total, terms, loads = 0.0, 0, 0.0
  right: dict[int, list[bool]] = {distance: [] for distance in DISTANCES}
  for _ in range(HELD_OUT_BATCHES):
    starts = rng.integers(len(text.held_out) - 4 * CONTEXT, size=ROWS)
    plain = [text.held_out[start : start + CONTEXT] for start in starts]
    loss, number, load, _ = jax.device_get(_look(cfg, variables, pack(plain)))
    total, terms, loads = total + float(loss), terms + int(number), loads + load
    rows = [
      needles(rng, text.held_out[start : start + 4 * CONTEXT], text.values)
      for start in starts
    ]
    best = _look(cfg, variables, pack([row.tokens for row in rows]))[3]
    for row, tokens in zip(rows, np.asarray(best), strict=True):
      for answer, distance in zip(row.answers, row.distances, strict=True):
        right[int(distance)].append(tokens[answer - 1] == row.tokens[answer])
  return {
    'loss': total / terms,
    'retrieval': {str(d): float(np.mean(found)) for d, found in right.items()},
    'max_violation': float(jnp.mean(router.max_violation(jnp.asarray(loads)))),
  }


def train(variant: str, seeds: Sequence[int], steps: int, path: str) -> list[dict]:
  """Trains a variant; returns one result per seed."""
  with np.load(path) as file:
    text = Text(**file)
  cfg = ablations.model(variant, VOCABULARY)
  schedule = ScheduleConfig(
    'wsd',
    warmup_steps=steps // 15,
    total_steps=steps,
    decay_steps=steps // 3,
    final_fraction=0.1,
  )
  tx = optimizer.make(
    OptimizerConfig(
      by_kind=ByKind(matrix='muon', expert='muon'),
      muon=MuonConfig(learning_rate=0.02),
      adam=AdamConfig(learning_rate=3e-3),
      schedule=schedule,
    )
  )
  rate = ablations.bias_update_rate(variant)
  config = train_step.StepConfig(micro_rows=ROWS, bias_update_rate=rate)
  step = train_step.make_step(cfg, tx, train_step.nll, config)
  results = []
  for seed in seeds:
    started, cpu = time.monotonic(), time.process_time()
    state = train_step.new_state(cfg, tx, jax.random.key(seed))
    violations = []
    for number, batch in zip(range(steps), batches(text, seed), strict=False):
      state, metrics = step(state, batch)
      if number >= steps - steps // 4:
        violations.append(float(metrics['max_violation']))
    found = evaluate(cfg, state.variables, text)
    found['max_violation_batch'] = float(np.mean(violations))
    spent = {'seconds': time.monotonic() - started, 'cpu_s': time.process_time() - cpu}
    results.append({'variant': variant, 'seed': seed, **spent, **found})
    print(f'{variant}, seed {seed}: {spent["seconds"]:.0f} s', file=sys.stderr)
  return results


def table(results: Sequence[Mapping[str, Any]]) -> str:
  """The results as a table: medians [min, max] over the seeds of each variant."""
  distances = [f'retrieval at {d}' for d in DISTANCES]
  names = ['variant', 'loss', *distances, 'MaxVio held out', 'MaxVio batch']
  lines = []

  def cell(values, digits):
    low, middle, high = np.quantile(values, (0, 0.5, 1))
    spread = f' [{low:.{digits}f}, {high:.{digits}f}]' if len(values) > 1 else ''
    return f'{middle:.{digits}f}{spread}'

  for variant in dict.fromkeys(r['variant'] for r in results):
    mine = [r for r in results if r['variant'] == variant]
    cells = [variant, cell([r['loss'] for r in mine], 3)]
    cells += [cell([r['retrieval'][str(d)] for r in mine], 2) for d in DISTANCES]
    cells += [cell([r[name] for r in mine], 2) for name in _VIOLATIONS]
    lines.append(cells)
  return harness.markdown(names, lines)


_VIOLATIONS = ('max_violation', 'max_violation_batch')


def main() -> None:
  parser = harness.parser(__doc__)
  parser.add_argument('--steps', type=int, default=360)
  parser.add_argument('--variants', nargs='+', default=list(ablations.VARIANTS))
  parser.add_argument('--files', type=int, default=200)
  parser.add_argument('--jobs', type=int, default=2, help='variants at a time')
  args = parser.parse_args()
  if args.steps < 15:
    parser.error(f'--steps={args.steps} is too few: pass at least 15')
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, 'text.npz')
    np.savez(path, **read(args.files)._asdict())
    one = functools.partial(train, seeds=args.seeds, steps=args.steps, path=str(path))
    spawn = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(args.jobs, spawn) as pool:
      results = sum(pool.map(one, args.variants), [])
  harness.show(args, results, table)


if __name__ == '__main__':
  main()
