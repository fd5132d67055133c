"""Records of lineages that never were, written as evolve.record describes them."""

from __future__ import annotations

import json
import random

from m2jax.evolve import gate

HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>\u202etrail</b>'
CONFIG = {
  'gate': {'alpha': 0.2, 'test': 'sign', 'looks': [16, 64], 'min_effect': 0.02},
  'archive': {'method': 'clade'},
  'budget': {
    **{'rounds': 300, 'seconds': 7200.0, 'tokens': 0, 'failures': 10, 'patience': 0}
  },
}


def line(kind, **fields):
  return {'schema': 1, 'kind': kind, 'time_s': 1.7e9, **fields}


def cost(tokens=100, seconds=1.5, episodes=0):
  return {'tokens': tokens, 'seconds': seconds, 'episodes': episodes}


def begin(config=CONFIG, **changes):
  files = {'scaffold.json': '{\n  "temperature": 1.0\n}\n'}
  return line(
    'begin',
    **dict(
      config=config, proposer={'kind': 'random_search'}, files=files, digest='d0',
      tools=[], splits={'development': ['dev/0'], 'second': ['s/0'], 'sealed': ['x/0']},
    )
    | changes,
  )  # fmt: skip


def baseline(good=8, bad=8):
  scores = [['dev/0', i, float(i < good)] for i in range(good + bad)]
  failed = [{'score': 0.0, 'end_reason': 'answer', 'text': 'user: a task'}]
  spent = cost(1600, 2.0, good + bad)
  return line('baseline', round=0, scores=scores, failures=failed, cost=spent)


def proposal(number, parent=0, **changes):
  value = round(1 - number / 1000, 3)
  diff = (
    '--- a/scaffold.json\n+++ b/scaffold.json\n@@ -2 +2 @@\n'
    f'-  "temperature": 1.0\n+  "temperature": {value}\n'
  )
  return line(
    'proposal',
    round=number,
    **dict(
      parent=parent, changes={'sampling.temperature': value}, diff=diff, error='',
      files={'scaffold.json': f'{{\n  "temperature": {value}\n}}\n'},
      digest=f'd{number}', note=f'cooler {number}', memory='cooler is better',
      criticism='too bold', source='', cost=cost(),
    )
    | changes,
  )  # fmt: skip


def checked(number, *problems):
  return line('checked', round=number, problems=list(problems), readded=0.0)


def smoke(number):
  ends = ['answer', 'answer']
  return line('smoke', round=number, ends=ends, cost=cost(200, 0.5, 2))


def look(number, pairs, which=0, incumbent=0, **changes):
  """`pairs`: (incumbent's, candidate's score)."""
  rows = [[f'dev/{i}', i, before, after] for i, (before, after) in enumerate(pairs)]
  failed = [{'score': 0.0, 'end_reason': 'answer', 'text': f'round {number} fails'}]
  return line(
    'look',
    round=number,
    **dict(
      look=which, pairs=rows, incumbent=incumbent, failures=failed,
      cost=cost(1600, 3.0, 16), incumbent_cost=cost(1600, 3.0, 16),
    )
    | changes,
  )  # fmt: skip


def decision(number, decided, phase='gate', reason='better', **numbers):
  return line(
    'decision', round=number, decision=decided, phase=phase, reason=reason, **numbers
  )


def second(number, good=3, n=4):
  scores = [[f's/{i}', i, float(i < good)] for i in range(n)]
  return line('second', round=number, scores=scores, mean=good / n, cost=cost(9, 1, n))


def sealed():
  return line(
    'sealed',
    results={
      'start': [[f'x/{i}', i, float(i < 4)] for i in range(10)],
      'incumbent': [[f'x/{i}', i, float(i < 7)] for i in range(10)],
    },
    **{'means': {'start': 0.4, 'incumbent': 0.7}, 'effect': 0.3, 'low': 0.05},
    **{'high': 0.55, 'cost': cost(2000, 4.0, 20)},
  )


def small():
  """Kept, reverted, rejected by the static checks, no proposal; a round in progress."""
  better = [(0.0, 1.0)] * 12 + [(1.0, 1.0)] * 4
  worse = [(1.0, 0.0)] * 10 + [(1.0, 1.0)] * 5 + [(1.0, None)]
  return [
    begin(),
    baseline(),
    second(0, 2),
    *(proposal(1, note=HOSTILE, criticism=HOSTILE), checked(1), smoke(1)),
    look(1, better),
    decision(
      *(1, 'keep'), pairs=16, effect=0.75, low=0.5, high=0.94, evidence=8.3, needed=7.9
    ),
    second(1),
    *(proposal(2, parent=1), checked(2), smoke(2)),
    look(2, worse, incumbent=1),
    decision(
      *(2, 'revert', 'gate', 'hopeless'), pairs=16, effect=-0.6, low=-0.8, high=-0.4,
      evidence=0.0, needed=8.0,
    ),
    proposal(3, diff='', files={}, changes={'seed': 7}, note='bait: a seed'),
    checked(3, 'seed: an unknown field'),
    decision(3, 'reject', 'checked', 'seed: an unknown field'),
    proposal(4, error='the model does not answer', diff='', files={}, changes={}),
    decision(4, 'reject', 'proposal', 'the model does not answer'),
    proposal(5),
    checked(5),
  ]  # fmt: skip


def long(rounds=300, seed=0):
  """A lineage of many rounds, with parents all over the archive, that has ended."""
  rng = random.Random(seed)
  lines, nodes, incumbent, rate = [begin(), baseline()], [0], 0, 0.4
  for number in range(1, rounds + 1):
    parent = rng.choice([incumbent, incumbent, rng.choice(nodes)])
    lines.append(proposal(number, parent))
    if rng.random() < 0.3:
      problem = 'rules.py: import of os is not allowed'
      lines += [
        checked(number, problem),
        decision(number, 'reject', 'checked', problem),
      ]
      continue
    kept = rng.random() < 0.03
    goal = min(rate + 0.1 * kept, 1.0)
    draw = lambda p: float(rng.random() < p)
    pairs = [(draw(rate), draw(goal if kept else rate - 0.1)) for _ in range(16)]
    d = [after - before for before, after in pairs]
    low, high = gate.interval(d)
    numbers = dict(pairs=16, effect=sum(d) / 16, low=low, high=high, evidence=3.0)
    lines += [checked(number), smoke(number), look(number, pairs, 0, incumbent)]
    decided = 'keep' if kept else 'revert'
    lines.append(decision(number, decided, needed=8.0, **numbers))
    nodes.append(number)
    if kept:
      incumbent, rate = number, goal
      lines.append(second(number, round(rate * 20), 20))
  stop = line('stop', reason=f'rounds: {rounds} of {rounds}')
  return [*lines, stop, sealed()]


def write(workdir, lines, mode='w'):
  """Writes lines to a workdir's record; a line may be a text."""
  with open(workdir / 'record.jsonl', mode) as file:
    for one in lines:
      file.write((one if isinstance(one, str) else json.dumps(one)) + '\n')
  return workdir
