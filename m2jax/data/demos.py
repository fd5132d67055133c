"""Demonstrations: token sequences with a loss on some of the tokens.

A demonstration is a whole episode: the environment's tokens (prompt, observations) are
context, the teacher's tokens are trained. On disk it is a JSON line
`{"tokens": […], "loss_mask": […]}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence

import numpy as np

from m2jax.forest import Sample
from m2jax.text import json_lines


def sample(tokens: Sequence[int], loss_mask: Sequence[int]) -> Sample:
  """A `forest.Sample` that trains the tokens with a true mask.

  Args:
    tokens: [S] ids.
    loss_mask: [S], 0 or 1. Token 0 cannot be trained: nothing predicts it.

  Raises:
    ValueError: lengths differ, the mask of token 0 is true, or none is.
  """
  tokens = np.asarray(tokens, np.int32)
  mask = np.asarray(loss_mask, bool)
  if tokens.ndim != 1 or tokens.shape != mask.shape:
    raise ValueError(f'tokens {tokens.shape} and loss_mask {mask.shape} must be [S]')
  trained = np.flatnonzero(mask)
  if len(trained) == 0:
    raise ValueError('loss_mask trains no token')
  if trained[0] == 0:
    raise ValueError('loss_mask trains token 0, which nothing predicts')
  start = int(trained[0])
  weights = None if mask[start:].all() else mask[start:].astype(np.float32)
  return Sample(tokens, start, weights=weights)


def loss_mask(demo: Sample) -> np.ndarray:
  """[S] bool: which tokens of `demo` are trained."""
  response = len(demo.tokens) - demo.prompt_length
  weights = np.ones(response) if demo.weights is None else demo.weights
  return np.concatenate([np.zeros(demo.prompt_length, bool), np.asarray(weights) > 0])


def write(path: str | os.PathLike, demos: Iterable[Sample]):
  """Writes demonstrations as JSON lines."""
  with open(path, 'w', encoding='utf-8') as file:
    for demo in demos:
      mask = loss_mask(demo).astype(int).tolist()
      line = {'tokens': np.asarray(demo.tokens).tolist(), 'loss_mask': mask}
      file.write(json.dumps(line) + '\n')


def read(path: str | os.PathLike) -> list[Sample]:
  """Reads demonstrations from a file of `write`.

  Raises:
    ValueError: a line is not a demonstration; names it.
  """
  demos = []
  with open(path, 'rb') as file:
    for number, line in json_lines.lines(file):
      if not line.strip():
        continue
      try:
        record = json_lines.loads(line)
        demos.append(sample(record['tokens'], record['loss_mask']))
      except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise ValueError(f'{path}, line {number}: not a demonstration: {e!r}') from e
  return demos
