"""Judges a submission: score, medal and reward. It parses text and runs no code.

truth.json has id → value of the test rows, spec.json the metric and the thresholds:

  worse than or equal to the baseline, or not a valid submission    0
  between the baseline and bronze                                   up to 0.4
  bronze, silver, gold (MLE-bench, arXiv 2410.07095)                0.5, 0.75, 1

The baseline is the better one of the sample submission and the constant solution.
"""

import csv
import io
import json
import math
import os
import stat
import sys

TESTS = os.environ.get('M2JAX_TESTS', os.path.dirname(os.path.abspath(__file__)))
MAX_BYTES = 4 << 20
REWARDS = {'bronze': 0.5, 'silver': 0.75, 'gold': 1.0}
_MAX_LABEL_CHARS = 64


class Wrong(Exception):
  """The submission is not valid; the message is the reason."""


def label(text):
  """A label; numbers are labels too, 3.0 the same as 3."""
  try:
    number = float(text)
  except ValueError:
    return text
  return str(int(number)) if number.is_integer() else str(number)


def parse(data, ids, numbers):
  """id → value of the bytes of a submission. Raises Wrong."""
  try:
    rows = list(csv.reader(io.StringIO(data.decode('utf-8-sig'), newline='')))
  except (UnicodeDecodeError, csv.Error) as error:
    raise Wrong(f'not CSV in UTF-8: {error}') from None
  rows = [[cell.strip() for cell in row] for row in rows if any(map(str.strip, row))]
  if not rows or sorted(rows[0]) != ['id', 'target']:
    raise Wrong('the first line must be id,target')
  place, found = rows[0].index('id'), {}
  for number, row in enumerate(rows[1:], 2):
    if len(row) != 2:
      raise Wrong(f'row {number} has {len(row)} columns, not 2')
    own, text = row[place], row[1 - place]
    if own not in ids:
      raise Wrong(f'row {number}: no id of test.csv')
    if own in found:
      raise Wrong(f'row {number}: a second row with its id')
    found[own] = _value(text, number, numbers)
  if len(found) < len(ids):
    raise Wrong(f'{len(ids) - len(found)} ids of test.csv are missing')
  return found


def _value(text, number, numbers):
  if not numbers:
    if not text or len(text) > _MAX_LABEL_CHARS:
      raise Wrong(f'row {number}: no label of 1 to {_MAX_LABEL_CHARS} characters')
    return label(text)
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not abs(value) < 1e15:
    raise Wrong(f'row {number}: not a finite number')
  return value


def accuracy(truth, found):
  return sum(a == b for a, b in zip(truth, found, strict=True)) / len(truth)


def macro_f1(truth, found):
  """Mean of the F1 scores of the classes in `truth`."""
  scores = []
  for one in set(truth):
    hits = sum(a == b == one for a, b in zip(truth, found, strict=True))
    scores.append(2 * hits / (truth.count(one) + found.count(one)))
  return sum(scores) / len(scores)


def rmse(truth, found):
  return math.sqrt(
    sum((a - b) ** 2 for a, b in zip(truth, found, strict=True)) / len(truth)
  )


def mae(truth, found):
  return sum(abs(a - b) for a, b in zip(truth, found, strict=True)) / len(truth)


def rmsle(truth, found):
  """The RMSE of log(1 + x); negative predictions count as 0."""
  return rmse([math.log1p(a) for a in truth], [math.log1p(max(b, 0)) for b in found])


def ranks(values):
  """Ranks from 1; equal values share the mean of theirs."""
  order = sorted(range(len(values)), key=values.__getitem__)
  found, start = [0.0] * len(values), 0
  while start < len(order):
    end = start
    while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
      end += 1
    for place in order[start : end + 1]:
      found[place] = (start + end) / 2 + 1
    start = end + 1
  return found


def auc(truth, found):
  """The area under the ROC curve of scores; the positive class is 1."""
  ones = [rank for rank, a in zip(ranks(found), truth, strict=True) if a == 1]
  below = sum(ones) - len(ones) * (len(ones) + 1) / 2
  return below / (len(ones) * (len(truth) - len(ones)))


def spearman(truth, found):
  """The correlation of the ranks; 0 if all predictions are equal."""
  a, b = ranks(truth), ranks(found)
  middle = (len(a) + 1) / 2
  both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
  size = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
  return both / math.sqrt(size) if size else 0.0


def ari(truth, found):
  """The adjusted Rand index of two partitions (Hubert and Arabie 1985)."""

  def pairs(values):
    counts = {}
    for value in values:
      counts[value] = counts.get(value, 0) + 1
    return sum(n * (n - 1) / 2 for n in counts.values())

  both, a, b = pairs(list(zip(truth, found, strict=True))), pairs(truth), pairs(found)
  expected = a * b / (len(truth) * (len(truth) - 1) / 2)
  most = (a + b) / 2
  return (both - expected) / (most - expected) if most != expected else 0.0


# Name → (function, higher is better, predictions are numbers).
METRICS = {
  'accuracy': (accuracy, True, False),
  'macro_f1': (macro_f1, True, False),
  'ari': (ari, True, False),
  'auc': (auc, True, True),
  'spearman': (spearman, True, True),
  'rmse': (rmse, False, True),
  'rmsle': (rmsle, False, True),
  'mae': (mae, False, True),
}


def score(data, truth, metric):
  """The score of the bytes of a submission. Raises Wrong."""
  function, _, numbers = METRICS[metric]
  found = parse(data, truth, numbers)
  ids = list(truth)
  wanted = [truth[i] if numbers else label(str(truth[i])) for i in ids]
  return function(wanted, [found[i] for i in ids])


def reward(value, spec):
  """(reward, medal or '') of a score."""
  sign = 1 if METRICS[spec['metric']][1] else -1
  ours = sign * value
  for medal in ('gold', 'silver', 'bronze'):
    if ours >= sign * spec[medal]:
      return REWARDS[medal], medal
  low, high = sign * spec['baseline'], sign * spec['bronze']
  return max(0.0, 0.4 * (ours - low) / (high - low)), ''


def read(tree):
  """The bytes of the submission, which is a file and no link. Raises Wrong."""
  flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
  try:
    fd = os.open(os.path.join(tree, 'submission.csv'), flags)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
      raise Wrong('submission.csv is not a file of its own')
    with open(fd, 'rb') as file:
      data = file.read(MAX_BYTES + 1)
  except OSError as error:
    raise Wrong(f'submission.csv cannot be read: {error.strerror}') from None
  if len(data) > MAX_BYTES:
    raise Wrong(f'submission.csv has more than {MAX_BYTES} bytes')
  return data


def load(name):
  with open(os.path.join(TESTS, name), encoding='utf-8') as file:
    return json.load(file)


def main():
  spec, truth = load('spec.json'), load('truth.json')
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  # From here on, running out of memory or time is the doing of the agent's files.
  print('m2jax: ready', flush=True)
  paid, details = 0.0, {}
  try:
    value = score(
      read(os.environ.get('M2JAX_TREE', '/workspace')), truth, spec['metric']
    )
    paid, medal = reward(value, spec)
    details = {'score': value, 'medal': medal}
    details['reason'] = f'{spec["metric"]} {value:.6g}, medal: {medal or "none"}'
  except Wrong as wrong:
    details['reason'] = f'invalid submission: {wrong}'
  for name, text in (('details.json', json.dumps(details)), ('reward.txt', str(paid))):
    with open(os.path.join(logs, name), 'w', encoding='utf-8') as file:
      file.write(text)


if __name__ == '__main__':
  sys.exit(main())
