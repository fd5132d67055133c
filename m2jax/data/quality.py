"""Scores of documents: a small classifier, and the seat that any reward can take.

A scorer is any callable document → number, higher is better: a `Classifier`, a rule, a
reward model behind a function. The mixture only asks for the order of the numbers (it
works on `ranks`), so that scorers of any scale can take the seat.

The classifier is a logistic regression over hashed n-grams of words, trained on
documents that somebody called good or bad:

  x_f = 1/√m for each of the m buckets that an n-gram of the document hashes to,
  p = σ(w·x + b),   minimise mean cross-entropy + l2/2 · ‖w‖².

  classifier = quality.fit(texts, labels)
  classifier.save('quality.npz')
  scores = quality.score(source, quality.Classifier.load('quality.npz'))
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m2jax.data import documents
from m2jax.data.documents import Document

Scorer = Callable[[Document], float]

_VERSION = 1
# words, numbers, and each run of one other mark: text and code alike
_WORD = re.compile(r'[^\W\d_]+|\d+|(?:([^\w\s])\1*)|_+|\n[ \t]*')


def features(text: str, *, buckets: int, longest: int) -> np.ndarray:
  """The buckets that the text's n-grams of 1 … `longest` words hash to, each once.

  CRC-32 is the same in every process and release. Case is kept out, line breaks with
  their indentation are words: layout tells code and tables from noise.
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
  """p(good | document): a scorer.

  Attributes:
    weights: [buckets] float32.
    bias: of the logit.
    longest: words of the longest n-gram.
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
    with open(path, 'wb') as file:  # np.savez would change a name without suffix
      np.savez_compressed(
        file,
        version=_VERSION,
        weights=self.weights,
        bias=self.bias,
        longest=self.longest,
      )

  @classmethod
  def load(cls, path: str | os.PathLike) -> Classifier:
    """Reads what `save` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is no classifier of this version.
    """
    try:
      with np.load(path) as file:
        version = int(file['version'])
        if version == _VERSION:
          return cls(file['weights'], float(file['bias']), int(file['longest']))
    except (KeyError, ValueError, EOFError) as error:
      raise ValueError(f'{path} is no quality classifier: {error!r}') from error
    raise ValueError(f'{path}: a classifier of version {version}, not {_VERSION}')


def fit(
  texts: Sequence[str],
  labels: Sequence[bool],
  *,
  buckets: int = 2**16,
  longest: int = 2,
  l2: float = 1e-4,
  steps: int = 200,
) -> Classifier:
  """Trains a classifier: the minimum is unique, so nothing depends on a seed.

  Args:
    texts: documents.
    labels: true is good. Both kinds weigh alike, however many there are of each.
    buckets, longest: see `features`.
    l2: strength of the penalty on the weights, not on the bias.
    steps: most steps of L-BFGS; it stops where the gradient vanishes.

  Raises:
    ValueError: the labels are all the same, or not one for each text.
  """
  good = np.asarray(labels, bool)
  if len(good) != len(texts) or good.all() or not good.any():
    raise ValueError(
      f'{len(texts)} texts and {len(good)} labels, {good.sum()} of them good: want a '
      'label for each text, and both kinds'
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
  """L-BFGS with line search, to a gradient of 1e-6 or for `steps` steps."""
  optimizer = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def going(carry):
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
    return jax.lax.while_loop(going, advance, carry)[0]

  return run(params)


def load(name: str) -> tuple[Scorer, str]:
  """The scorer of a name, and a fingerprint of it.

  Args:
    name: path of a saved `Classifier`, or `module:function`; of a function the
      fingerprint is the name.

  Raises:
    FileNotFoundError: there is neither; names it.
    ValueError: the file is no classifier.
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


def score(source: Sequence[Document], scorer: Scorer) -> np.ndarray:
  """[n] float64 of every document.

  Raises:
    ValueError: the scorer gave no finite number; names the document.
  """
  return np.array([score_one(document, scorer) for document in _each(source)])


def score_one(document: Document, scorer: Scorer) -> float:
  """The score of one document; errors as `score`."""
  value = scorer(document)
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not math.isfinite(number):
    raise ValueError(
      f'the scorer gave {value!r} for document {document.name}: want a finite number'
    )
  return number


def _each(source: Sequence[Document]) -> Iterator[Document]:
  # by index: a source need not say where it ends in any other way
  return (source[i] for i in range(len(source)))


def ranks(scores: Sequence[float]) -> np.ndarray:
  """[n] in (0, 1): share of documents with a lower score, half of those that tie."""
  scores = np.asarray(scores, np.float64)
  ordered = np.sort(scores)
  below = np.searchsorted(ordered, scores, side='left')
  up_to = np.searchsorted(ordered, scores, side='right')
  return (below + up_to) / (2 * max(len(scores), 1))


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
  """Probability that a good document scores above a bad one; a tie counts half."""
  good = np.asarray(labels, bool)
  ordered = ranks(scores) * len(good)  # mean rank, counted from 0.5
  wins = ordered[good].sum() - good.sum() ** 2 / 2
  return float(wins / (good.sum() * (~good).sum()))
