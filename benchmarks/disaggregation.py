"""Latency of short requests while long prompts are prefilled: together and apart.

  python -m benchmarks.disaggregation [--json]

Short requests and long prompts arrive at random times (Poisson), the same in each
arrangement; --long_rate=0 is the quiet case, which is always measured, too:

  together   one engine on two cores, with one prefill call (at most 512 tokens) between
             two decode calls, and with --budget tokens
  apart      a decode engine on one core, and a prefill engine in a process of its own
             on the other, pages handed over through a Unix socket

Measured for the short requests: time from submission to the first tokens, and the time
between two deliveries (of up to --decode_steps tokens); for the long ones, to the first
tokens. The arrangements take turns, so that other load on the machine affects all.
Prints, in ms, medians over --rounds rounds of each round's percentile, with the range
of the 99th. The model has 13.5M parameters in fp32 (rollout_workload.py).
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile

import numpy as np
from absl import flags, logging

from benchmarks import harness, sides
from benchmarks.rollout import checked

# A separate set: tests also import programs with flags of the same names.
FLAGS = flags.FlagValues()


def _flag(kind: str, name: str, default, help_: str, **more):
  return getattr(flags, f'DEFINE_{kind}')(
    name, default, help_, flag_values=FLAGS, **more
  )


_ROUNDS = _flag('integer', 'rounds', 5, 'rounds', lower_bound=1)
_SECONDS = _flag('float', 'seconds', 10.0, 'in which requests arrive')
_SHORT_RATE = _flag('float', 'short_rate', 3.0, 'short requests a second')
_LONG_RATE = _flag('float', 'long_rate', 1.5, 'long prompts a second')
_SHORT = _flag('integer', 'short', 64, 'tokens of a short prompt')
_LONG = _flag('integer', 'long', 1536, 'tokens of a long prompt')
_NEW = _flag('integer', 'new', 64, 'tokens of the response to a short one')
_LONG_NEW = _flag('integer', 'long_new', 8, 'tokens of the response to a long one')
_BUDGET = _flag('integer', 'budget', 2048, 'prefill tokens between decode calls')
_DECODE_STEPS = _flag('integer', 'decode_steps', 4, 'of a decode call', upper_bound=4)
_SEED = _flag('integer', 'seed', 0, 'of the arrivals')
_flag('bool', 'json', False, 'print JSON')

_ONE_CALL = 1  # a budget that the first prefill call exhausts


def kinds(long_rate: float) -> dict[str, dict]:
  short = dict(rate=_SHORT_RATE.value, prompt=_SHORT.value, new=_NEW.value)
  long = dict(rate=long_rate, prompt=_LONG.value, new=_LONG_NEW.value)
  return dict(short=short, long=long)


def start(directory: str) -> dict[str, sides.Side]:
  """The three processes: together, prefill and decode."""
  cores = sides.cores(2)
  if len(cores) < 2:
    raise SystemExit('this needs two cores')
  command = [sys.executable, '-m', 'benchmarks.disaggregation_worker']
  environment = {'JAX_PLATFORMS': 'cpu'}
  places = dict(together=cores, prefill=cores[1:], decode=cores[:1])
  workers = {
    name: sides.Side(name, command, place, environment)
    for name, place in places.items()
  }
  address = f'unix:{pathlib.Path(directory) / "prefill"}'
  checked(workers['prefill'], 'prefill', address=address)
  steps = _DECODE_STEPS.value
  budgets = [_ONE_CALL, _BUDGET.value]
  made = dict(address=None, decode_steps=steps, budgets=budgets)
  checked(workers['together'], 'make', **made)
  made = dict(address=address, decode_steps=steps, budgets=[_ONE_CALL])
  answer = checked(workers['decode'], 'make', **made)
  logging.info('the decode engine prefills up to %d tokens', answer['local_tokens'])
  return workers


def percentiles(answer: dict) -> dict[str, float]:
  """The percentiles of a round, in ms."""
  short, long = (
    [r for r in answer['requests'] if r['kind'] == kind] for kind in ('short', 'long')
  )
  samples = {
    'first': [r['first_s'] for r in short],
    'gap': [gap for r in short for gap in r['gaps_s']],
    'long first': [r['first_s'] for r in long],
  }
  found = {
    f'{name} p{q}': 1e3 * float(np.percentile(values, q))
    for name, values in samples.items()
    for q in (50, 99)
    if values
  }
  counts = {k: v for k, v in answer.items() if k != 'requests'}
  return found | counts | dict(short=len(short), long=len(long))


def measure() -> dict[str, dict[str, list[dict]]]:
  """(load, arrangement) → the percentiles of each round."""
  found: dict[str, dict[str, list[dict]]] = {}
  loads = {'quiet': 0.0, 'heavy prefill': _LONG_RATE.value}
  arrangements = {
    'together, a prefill call': ('together', _ONE_CALL),
    f'together, {_BUDGET.value} tokens': ('together', _BUDGET.value),
    'apart': ('decode', _ONE_CALL),
  }
  with tempfile.TemporaryDirectory() as directory:
    workers = start(directory)
    for number in range(_ROUNDS.value):
      for index, (load, rate) in enumerate(loads.items()):
        seed = _SEED.value + 2 * number + index  # no prompt twice
        for name, (side, budget) in arrangements.items():
          played = dict(budget=budget, seconds=_SECONDS.value, seed=seed)
          answer = checked(workers[side], 'play', **played, kinds=kinds(rate))
          results = found.setdefault(load, {}).setdefault(name, [])
          results.append(percentiles(answer))
          logging.info('%s, %s: %s', load, name, results[-1])
    for side in ('together', 'decode', 'prefill'):
      workers[side].close()
  return found


def show(found: dict[str, dict[str, list[dict]]]) -> None:
  line = '{:<15}{:<26}{:>7}{:>8}  {:<16}{:>7}{:>8}  {:<16}{:>8}'
  print(line.format('', '', 'gap', 'gap', '', 'first', 'first', '', 'long'))
  print(line.format('ms', '', 'p50', 'p99', '', 'p50', 'p99', '', 'first'))
  for load, arrangements in found.items():
    for name, rounds in arrangements.items():

      def median(field, rounds=rounds):
        values = [r[field] for r in rounds if field in r]
        return f'{statistics.median(values):.0f}' if values else ''

      def spread(field, rounds=rounds):
        values = [r[field] for r in rounds]
        return f'({min(values):.0f} to {max(values):.0f})'

      columns = [median('gap p50'), median('gap p99'), spread('gap p99')]
      columns += [median('first p50'), median('first p99'), spread('first p99')]
      print(line.format(load, name, *columns, median('long first p50')))
  heavy = found['heavy prefill']
  apart = heavy.pop('apart')
  for name, rounds in heavy.items():
    for field in ('gap p99', 'first p99', 'long first p50'):
      ratios = [a[field] / b[field] for a, b in zip(rounds, apart, strict=True)]
      print(
        f'{field}, {name} / apart: {statistics.median(ratios):.2f} '
        f'({min(ratios):.2f} to {max(ratios):.2f})'
      )


if __name__ == '__main__':
  harness.main(FLAGS, measure, show)
