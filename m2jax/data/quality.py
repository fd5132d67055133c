"""Quality scores of documents, and a small classifier that computes them.

A scorer is any callable document → number, higher is better: a `Classifier`, a rule, a
reward model behind a function. The mixture only uses the order of the numbers (their
`ranks`), so that scorers may have any scale.

The classifier is a logistic regression over hashed n-grams of words, trained on
documents labelled good or bad:

  x_f = 1/√m for each of the m buckets that an n-gram of the document hashes to,
  p = σ(w·x + b),   minimise mean cross-entropy + l2/2 · ‖w‖².

  classifier = quality.fit(texts, labels)
  classifier.save('quality.npz')
  score = quality.score_one(document, quality.Classifier.load('quality.npz'))
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m2jax.data import documents
from m2jax.data.documents import Document

Scorer = Callable[[Document], float]

_VERSION = 1
# words, numbers, and runs of one punctuation mark, for text and code
_WORD = re.compile(r'[^\W\d_]+|\d+|(?:([^\w\s])\1*)|_+|\n[ \t]*')


def features(text: str, *, buckets: int, longest: int) -> np.ndarray:
  """The distinct buckets of the text's n-grams of 1 … `longest` words.

  CRC-32 is the same in every process and release. Case is ignored; line breaks with
  their indentation are words, because layout distinguishes code and tables from noise.
  """
  words = [m[0].lower().encode() for m in _WORD.finditer(text)]
  found = set()
  for i in range(len(words)):
    state = 0
    for word in words[i : i + longest]:
      state = zlib.crc32(word + b'\0', state)
      found.add(state % buckets)
  return np.array(sorted(found), np.int64)


@dataclasses.dataclass(frozen=True)
class Classifier:
  """A scorer: p(good | document).

  Attributes:
    weights: [buckets] float32.
    bias: the logit's bias.
    longest: maximum words of an n-gram.
  """

  weights: np.ndarray
  bias: float
  longest: int = 2

  def __call__(self, document: Document) -> float:
    return self.probability(document.text)

  def probability(self, text: str) -> float:
    """p(good | text), in (0, 1)."""
    found = features(text, buckets=len(self.weights), longest=self.longest)
    logit = self.bias + self.weights[found].sum() / math.sqrt(max(len(found), 1))
    return float(1 / (1 + np.exp(-logit)))

  def save(self, path: str | os.PathLike) -> None:
    """Writes an .npz file."""
    with open(path, 'wb') as file:  # np.savez would add a suffix to the name
      np.savez_compressed(
        file,
        version=_VERSION,
        weights=self.weights,
        bias=self.bias,
        longest=self.longest,
      )

  @classmethod
  def load(cls, path: str | os.PathLike) -> Classifier:
    """Reads a classifier from a file of `save`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is not a classifier of this version.
    """
    try:
      with np.load(path) as file:
        version = int(file['version'])
        if version == _VERSION:
          return cls(file['weights'], float(file['bias']), int(file['longest']))
    except (KeyError, ValueError, EOFError) as error:
      raise ValueError(f'{path} is not a quality classifier: {error!r}') from error
    raise ValueError(
      f'{path}: classifier version {version} is not supported, only {_VERSION}'
    )


def fit(
  texts: Sequence[str],
  labels: Sequence[bool],
  *,
  buckets: int = 2**16,
  longest: int = 2,
  l2: float = 1e-4,
  steps: int = 200,
) -> Classifier:
  """Trains a classifier. The minimum is unique, so that no seed is needed.

  Args:
    texts: documents.
    labels: True is good. Both classes have the same total weight.
    buckets, longest: see `features`.
    l2: strength of the penalty on the weights; the bias has none.
    steps: maximum steps of L-BFGS, which stops when the gradient vanishes.

  Raises:
    ValueError: the labels are all equal, or not one per text.
  """
  good = np.asarray(labels, bool)
  if len(good) != len(texts) or good.all() or not good.any():
    raise ValueError(
      f'{len(texts)} texts and {len(good)} labels, {good.sum()} of them good: need one '
      'label per text, and both classes'
    )
  found = [features(text, buckets=buckets, longest=longest) for text in texts]
  column = jnp.asarray(np.concatenate(found))
  row = jnp.asarray(np.repeat(np.arange(len(found)), [len(f) for f in found]))
  value = jnp.asarray(
    np.concatenate([np.full(len(f), max(len(f), 1) ** -0.5) for f in found])
  )
  sign = jnp.asarray(np.where(good, 1.0, -1.0))
  weight = jnp.asarray(np.where(good, 0.5 / good.sum(), 0.5 / (~good).sum()))

  def loss(params):
    logit = jax.ops.segment_sum(
      params['weights'][column] * value, row, len(texts), indices_are_sorted=True
    )
    entropy = jnp.sum(weight * jax.nn.softplus(-sign * (logit + params['bias'])))
    return entropy + 0.5 * l2 * jnp.sum(params['weights'] ** 2)

  params = {'weights': jnp.zeros(buckets), 'bias': jnp.zeros(())}
  params = _minimise(loss, params, steps)
  weights = np.asarray(params['weights'], np.float32)
  return Classifier(weights, float(params['bias']), longest)


def _minimise(loss, params, steps: int):
  """L-BFGS with line search, until the gradient norm is 1e-6 or for `steps` steps."""
  optimizer = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def unfinished(carry):
    _, _, step, norm = carry
    return (step < steps) & (norm > 1e-6)

  def advance(carry):
    params, state, step, _ = carry
    value, grad = value_and_grad(params, state=state)
    updates, state = optimizer.update(
      grad, state, params, value=value, grad=grad, value_fn=loss
    )
    norm = optax.tree.norm(grad)
    return optax.apply_updates(params, updates), state, step + 1, norm

  @jax.jit
  def run(params):
    carry = params, optimizer.init(params), 0, jnp.array(jnp.inf)
    return jax.lax.while_loop(unfinished, advance, carry)[0]

  return run(params)


def load(name: str) -> tuple[Scorer, str]:
  """Loads a scorer; returns it with a fingerprint.

  Args:
    name: path of a saved `Classifier`, or `module:function`, whose fingerprint is the
      name.

  Raises:
    FileNotFoundError: neither exists; names it.
    ValueError: the file is not a classifier.
  """
  module, colon, attribute = name.rpartition(':')
  if os.path.exists(name) or not colon:
    scorer = Classifier.load(name)
    print_ = documents.fingerprint(scorer.weights, scorer.bias, scorer.longest)
    return scorer, print_
  try:
    return getattr(importlib.import_module(module), attribute), name
  except (ModuleNotFoundError, AttributeError) as error:
    raise FileNotFoundError(f'scorer {name}: {error}') from error


def score_one(document: Document, scorer: Scorer) -> float:
  """The score of one document.

  Raises:
    ValueError: the scorer did not return a finite number; names the document.
  """
  value = scorer(document)
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not math.isfinite(number):
    raise ValueError(
      f'the scorer returned {value!r} for document {document.name}: must be a finite '
      'number'
    )
  return number


def ranks(scores: Sequence[float]) -> np.ndarray:
  """[n] in (0, 1): fraction of documents with a lower score; ties count half."""
  scores = np.asarray(scores, np.float64)
  ordered = np.sort(scores)
  below = np.searchsorted(ordered, scores, side='left')
  up_to = np.searchsorted(ordered, scores, side='right')
  return (below + up_to) / (2 * max(len(scores), 1))
