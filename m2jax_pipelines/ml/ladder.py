"""Ladders: scripted solutions of a problem, run in a sandbox as an agent's would be.

Their scores set the medals of a task, as a leaderboard sets those of MLE-bench: bronze,
silver and gold are the best 40, 20 and 10 % of the ladder, by linear interpolation.
"""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence

import numpy as np

from m2jax import sandbox
from m2jax_pipelines.ml import grade
from m2jax_pipelines.ml.problems import Data, Problem, Row

SUBMISSION = 'submission.csv'
QUANTILES = {'bronze': 0.6, 'silver': 0.8, 'gold': 0.9}
KIT = """\
import csv
import os

import numpy as np
from sklearn import (
  cluster, decomposition, ensemble, linear_model, mixture, naive_bayes, neighbors, svm,
  tree,
)
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def read(name):
  with open(name, newline='') as file:
    return list(csv.DictReader(file))


def numbers(rows):
  names = [n for n in (rows[0] if rows else ()) if n not in ('id', 'target', 'text')]
  return np.array([[float(row[n]) for n in names] for row in rows])


def labels(rows):
  found = [row.get('target', '') for row in rows]
  try:
    return np.array([float(value) for value in found])
  except ValueError:
    return np.array(found)


def scaled(model):
  return make_pipeline(StandardScaler(), model)


def predict(model, targets=None):
  return model.fit(X, y if targets is None else targets).predict(T)


def proba(model):
  return model.fit(X, y).predict_proba(T)[:, 1]


def groups(model, values):
  return model.fit_predict(values)


def text(model, **options):
  model = make_pipeline(CountVectorizer(**options), model)
  return model.fit([r['text'] for r in train], y).predict([r['text'] for r in test])


def seasonal(degree, harmonics, last=10**9):
  def terms(weeks):
    year = 2 * np.pi * weeks / 52.18
    waves = [f(k * year) for k in range(1, harmonics + 1) for f in (np.sin, np.cos)]
    return np.stack([(weeks / 1000) ** d for d in range(degree + 1)] + waves, axis=1)

  weights = np.linalg.lstsq(terms(X[-last:, 0]), y[-last:], rcond=None)[0]
  return terms(T[:, 0]) @ weights


def around(rows, reach):
  side = 16
  order = sorted(range(len(rows)), key=lambda i: [
    int(rows[i][n]) for n in ('patch', 'row', 'column')])
  noisy = np.array([float(rows[i]['noisy']) for i in order]).reshape(-1, side, side)
  wide = np.pad(noisy, [(0, 0), (reach, reach), (reach, reach)], 'reflect')
  steps = range(2 * reach + 1)
  shifted = [wide[:, i : i + side, j : j + side].ravel() for i in steps for j in steps]
  found = np.empty((len(rows), len(shifted)))
  found[order] = np.stack(shifted, axis=1)
  return found


def denoise(model):
  return model.fit(around(train, 2), y).predict(around(test, 2))


train = read('train.csv') if os.path.exists('train.csv') else []
test = read('test.csv')
X, y, T = numbers(train), labels(train), numbers(test)
if T.size:
  scaler = StandardScaler().fit(X if len(X) else T)
  U, Z = scaler.transform(X) if len(X) else X, scaler.transform(T)
values = {expression}
with open('submission.csv', 'w', newline='') as file:
  out = csv.writer(file)
  out.writerow(['id', 'target'])
  out.writerows(zip([row['id'] for row in test], values))
"""


@dataclasses.dataclass(frozen=True)
class Ladder:
  """What a ladder scored.

  Attributes:
    scores: rung → score.
    best: the name of the best rung.
    spec: metric and thresholds, for the verifier.
  """

  scores: Mapping[str, float]
  best: str
  spec: Mapping[str, str | float]


class BrokenRung(RuntimeError):
  """A rung has no valid submission, or the ladder no order; says which and why."""


def script(expression: str) -> str:
  """The program of a rung."""
  return KIT.replace('{expression}', expression)


def table(rows: Sequence[Row]) -> bytes:
  """Rows as CSV."""
  text = io.StringIO()
  out = csv.DictWriter(text, rows[0], lineterminator='\n')
  out.writeheader()
  out.writerows(rows)
  return text.getvalue().encode()


def files(problem: Problem, data: Data) -> dict[str, bytes]:
  """The agent's files."""
  sample = (
    0
    if grade.METRICS[problem.metric][2]
    else data.train and sorted({str(row['target']) for row in data.train})[0] or 'a'
  )
  rows = [{'id': row['id'], 'target': sample} for row in data.test]
  found = {'test.csv': table(data.test), 'sample_submission.csv': table(rows)}
  return {'train.csv': table(data.train), **found} if data.train else found


def truth(data: Data) -> dict[str, float | str]:
  """id → value, for the verifier."""
  return {row['id']: v for row, v in zip(data.test, data.truth, strict=True)}


async def climb(problem: Problem, data: Data, box: sandbox.Sandbox) -> Ladder:
  """Runs all rungs in a sandbox that has the agent's files.

  Raises:
    BrokenRung: a rung fails, or too many score the same.
  """
  scores, wanted = {}, truth(data)
  for name, expression in problem.ladder.items():
    await box.write('rung.py', script(expression).encode())
    done = await box.exec(f'rm -f {SUBMISSION}; exec python3 rung.py')
    if done.returncode:
      raise BrokenRung(f'{name}: exit {done.returncode}: {done.stderr.strip()[-300:]}')
    try:
      written = await box.read(SUBMISSION)
      scores[name] = await asyncio.to_thread(
        grade.score, written, wanted, problem.metric
      )
    except (FileNotFoundError, grade.Wrong) as error:
      raise BrokenRung(f'{name}: {error}') from error
  sample = files(problem, data)['sample_submission.csv']
  return judged(problem, scores, grade.score(sample, wanted, problem.metric))


def judged(problem: Problem, scores: Mapping[str, float], sample: float) -> Ladder:
  """The medals of a ladder; see the module. Raises BrokenRung."""
  sign = 1 if grade.METRICS[problem.metric][1] else -1
  ordered = sign * np.array(list(scores.values()))
  spec = {n: sign * float(np.quantile(ordered, q)) for n, q in QUANTILES.items()}
  constant = next(iter(scores.values()))
  spec['baseline'] = sign * max(sign * constant, sign * sample)
  steps = [sign * spec[name] for name in ('baseline', *QUANTILES)]
  if not all(a < b for a, b in zip(steps, steps[1:], strict=False)):
    raise BrokenRung(f'the thresholds are not in order: {spec}')
  best = max(scores, key=lambda name: sign * scores[name])
  return Ladder(dict(scores), best, {'metric': problem.metric, **spec})
