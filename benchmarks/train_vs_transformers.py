"""Compares a train step of a small M2 with the same step of transformers on torch.

  pip install torch transformers      # here or in another environment
  python -m benchmarks.train_vs_transformers
  python -m benchmarks.train_vs_transformers --torch_python=/elsewhere/bin/python --json

Both sides train the same weights (exported by `checkpoint.huggingface`) on the same
plain causal rows, in fp32, with the same AdamW settings on every parameter. A step is
forward, backward and update; m2jax's step is `train.step.make_step` with unrolled
layers, like torch's. Each side runs in its own process (m2jax_worker.py and
transformers_worker.py) on --threads cores; the two alternate step by step, so that
other load on the machine affects both. On a CPU m2jax's process is set up as every job
sets up its own (`m2jax.startup`), and glibc retains freed memory in huge pages for
transformers, too. It runs with sdpa attention; all of its experts implementations and
all forms of AdamW are tried first, and the fastest combination is used. The losses of
the first steps must agree.

`of the matmul floor` is the fraction of a step that its counted operations (those that
the result needs) would take at the speed of a plain dense matmul of T tokens, measured
in the same run. The parts of m2jax's step are timed separately, value and gradient
together: `attention` and `experts` are the kernels of all layers, `head` is the output
matrix with its softmax, `optimizer` is the update, and `rest` is the remainder of the
step. CPU seconds depend less than wall seconds on other load.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags, logging

from benchmarks import harness, m2jax_worker, prefix_tree_rows, sides

# A separate set: tests also import programs with flags of the same names.
FLAGS = flags.FlagValues()
_STEPS = flags.DEFINE_integer(
  'steps', 9, 'timed steps per side', lower_bound=1, flag_values=FLAGS
)
_ROWS = flags.DEFINE_integer(
  'rows', 8, 'rows per batch', lower_bound=1, flag_values=FLAGS
)
_ROW_TOKENS = flags.DEFINE_integer(
  'row_tokens', 512, 'tokens per row', lower_bound=2, flag_values=FLAGS
)
_LAYERS = flags.DEFINE_integer(
  'layers', 4, 'layers of the model', lower_bound=1, flag_values=FLAGS
)
_THREADS = flags.DEFINE_integer(
  'threads', 2, 'CPU cores of each side', lower_bound=1, flag_values=FLAGS
)
_DEVICE = flags.DEFINE_enum(
  'device', 'auto', ['auto', 'cpu'], 'auto: a GPU if any', flag_values=FLAGS
)
_DTYPE = flags.DEFINE_enum(
  'dtype',
  'float32',
  ['float32', 'bfloat16'],
  'activations; torch: autocast',
  flag_values=FLAGS,
)
_TORCH_PYTHON = flags.DEFINE_string(
  'torch_python',
  sys.executable,
  'Python that has torch and transformers',
  flag_values=FLAGS,
)
_EXPERTS = flags.DEFINE_list(
  'experts',
  ['grouped_mm', 'eager', 'batched_mm'],
  'implementations to try',
  flag_values=FLAGS,
)
_UPDATES = flags.DEFINE_list(
  'updates',
  ['fused', 'foreach', 'loop'],
  'forms of torch.optim.AdamW to try',
  flag_values=FLAGS,
)
_EXPERTS_GB = flags.DEFINE_float(
  'experts_gb',
  3.0,
  'skip batched_mm if it would copy more GB of expert weights',
  flag_values=FLAGS,
)
flags.DEFINE_bool('json', False, 'print JSON', flag_values=FLAGS)

# Of transformers, what `startup.prepare` sets for m2jax.
TUNABLES = ':'.join(
  [
    'glibc.malloc.arena_max=1',
    'glibc.malloc.hugetlb=1',
    'glibc.malloc.mmap_threshold=1073741824',
    'glibc.malloc.trim_threshold=4294967296',
  ]
)
PARTS = ('attention', 'experts', 'head', 'optimizer', 'rest')
PAUSE_S = 0.3  # until threads that spin for work are asleep
LOSS_TOLERANCE = {'float32': 1e-4, 'bfloat16': 5e-2}


def settings() -> m2jax_worker.Settings:
  """The settings of both sides, from the flags."""
  names = (f.name for f in dataclasses.fields(m2jax_worker.Settings))
  return m2jax_worker.Settings(**{name: FLAGS[name].value for name in names})


def model_config():
  return m2jax_worker.model_config(settings())


def operations(cfg) -> float:
  """FLOPs that the result of a step requires."""
  rows, length = _ROWS.value, _ROW_TOKENS.value
  pairs = rows * length * (length + 1) // 2
  return prefix_tree_rows.Operations(rows * length, pairs).flops(cfg)


def side(name: str, command: list[str], **environment: str) -> sides.Side:
  """A worker on the cores of its side."""
  environment['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'  # torch uses the GPU, too
  if _DEVICE.value == 'cpu':
    environment['JAX_PLATFORMS'] = 'cpu'
  return sides.Side(name, command, sides.cores(_THREADS.value), environment)


def check_torch() -> None:
  """Exits with a message if torch or transformers is missing."""
  code = 'import torch; from transformers import MiniMaxM2ForCausalLM'
  try:
    done = subprocess.run(
      [_TORCH_PYTHON.value, '-c', code], capture_output=True, text=True
    )
    problem = done.stderr.strip().split('\n')[-1] if done.returncode else None
  except OSError as e:
    problem = str(e)
  if problem:
    raise SystemExit(
      f'{_TORCH_PYTHON.value}: {problem}\n'
      'The comparison needs torch and transformers >= 5. Run `pip install torch '
      'transformers` here, or in another environment and pass its Python as '
      '--torch_python=…/bin/python.'
    )


def experts_gb(cfg) -> float:
  """GB that batched_mm copies in a forward pass: each token's expert weights."""
  each = 3 * cfg.embed_dim * cfg.expert_dim * cfg.experts_per_token
  return 4e-9 * each * cfg.num_layers * _ROWS.value * _ROW_TOKENS.value


def fastest_torch(side: sides.Side, cfg) -> tuple[dict, dict]:
  """The settings of the fastest step, and seconds or the problem of each one tried."""
  found = {}
  for name in _EXPERTS.value:
    for optimizer in _UPDATES.value:
      label = f'{name}, {optimizer}'
      if name == 'batched_mm' and experts_gb(cfg) > _EXPERTS_GB.value:
        found[label] = f'skipped: would copy {experts_gb(cfg):.0f} GB of weights'
        continue
      made = side.ask('make', experts=name, optimizer=optimizer)
      steps = [] if 'error' in made else [side.ask('step') for _ in range(4)]
      problem = next((a['error'] for a in [made, *steps] if 'error' in a), None)
      found[label] = problem or min(a['seconds'] for a in steps[1:])
      logging.info('transformers, %s: %s', label, found[label])
  ran = {k: v for k, v in found.items() if isinstance(v, float)}
  if not ran:
    raise SystemExit(f'transformers failed with every experts implementation: {found}')
  name, optimizer = min(ran, key=ran.get).split(', ')
  return dict(experts=name, optimizer=optimizer), found


def torch_command(directory: str) -> list[str]:
  """The command of transformers_worker with the weights in `directory`."""
  given = settings()
  adam = m2jax_worker.optimizer_config().adam
  passed = dict(
    tokens=m2jax_worker.rows_of_tokens(given).tolist(),
    threads=given.threads,
    device=_DEVICE.value,
    dtype=given.dtype,
    learning_rate=adam.learning_rate,
    b1=adam.b1,
    b2=adam.b2,
    eps=adam.eps,
  )
  worker = pathlib.Path(__file__).with_name('transformers_worker.py')
  # Without -P, transformers would import benchmarks/kernels.py as a library.
  return [_TORCH_PYTHON.value, '-P', str(worker), directory, json.dumps(passed)]


def m2jax_command() -> list[str]:
  given = json.dumps(dataclasses.asdict(settings()))
  return [sys.executable, '-m', m2jax_worker.__name__, given]


def alternate(workers: list[sides.Side]) -> dict[str, list[dict]]:
  """Answers of each side to its steps, two of them to compile and to warm up."""
  answers = {worker.name: [] for worker in workers}
  for number in range(_STEPS.value + 2):
    for worker in workers:
      answers[worker.name].append(worker.ask('step'))
      time.sleep(PAUSE_S)
    times = (f'{name} {a[-1]["seconds"]:.3f} s' for name, a in answers.items())
    logging.info('step %d of %d: %s', number + 1, _STEPS.value + 2, ', '.join(times))
  return answers


def compare() -> dict:
  """Runs both sides; returns everything that `show` prints."""
  check_torch()
  cfg = model_config()
  with tempfile.TemporaryDirectory() as directory:
    ours = side('m2jax', m2jax_command())
    weights = os.path.join(directory, 'weights')
    us = ours.ask('save', directory=weights)
    theirs = side('transformers', torch_command(weights), GLIBC_TUNABLES=TUNABLES)
    chosen, tried = fastest_torch(theirs, cfg)
    them = theirs.ask('make', **chosen)
    if {us['device'], them['device']} not in ({'cpu'}, {'gpu', 'cuda'}):
      raise SystemExit(
        f'jax runs on {us["device"]} and torch on {them["device"]}; install both with '
        'GPU support, or pass --device=cpu'
      )
    answers = alternate([ours, theirs])
    theirs.close()
    parts = ours.ask('parts')
    ours.close()
  first = [a[0]['loss'] for a in answers.values()]
  if not abs(first[0] - first[1]) <= LOSS_TOLERANCE[_DTYPE.value]:
    raise SystemExit(
      f'the two sides compute different losses in the first step: m2jax {first[0]}, '
      f'transformers {first[1]}; allowed is {LOSS_TOLERANCE[_DTYPE.value]}'
    )
  return report(cfg, answers, parts) | dict(
    device=us['device'],
    versions=[us['version'], them['version']],
    transformers=chosen,
    tried=tried,
  )


def report(cfg, answers, parts) -> dict:
  """Figures from the answers to 'step' and to 'parts'."""
  tokens = _ROWS.value * _ROW_TOKENS.value
  results = {}
  for name, steps in answers.items():
    wall = [a['seconds'] for a in steps[2:]]
    results[name] = dict(
      step_s=statistics.median(wall),
      fastest_s=min(wall),
      cpu_s=statistics.median(a['cpu_s'] for a in steps[2:]),
      tokens_s=tokens / statistics.median(wall),
      losses=[a['loss'] for a in steps],
    )
  parts = dict(parts)
  speed = parts.pop('matmul_flops_s')
  step_s = results['m2jax']['step_s']
  parts['rest'] = step_s - sum(parts.values())
  pairs = zip(answers['transformers'][2:], answers['m2jax'][2:], strict=True)
  return dict(
    tokens=tokens,
    sides=results,
    speed_up=results['m2jax']['tokens_s'] / results['transformers']['tokens_s'],
    speed_ups=[a['seconds'] / b['seconds'] for a, b in pairs],
    matmul_gflop_s=speed / 1e9,
    step_gflop=operations(cfg) / 1e9,
    matmul_fraction=operations(cfg) / speed / step_s,
    parts_s=parts,
  )


def show(found: dict) -> None:
  print(f'{found["device"]}; {", ".join(found["versions"])}')
  print('transformers: sdpa,', ', '.join(found['transformers'].values()))
  for label, seconds in found['tried'].items():
    result = f'{seconds:.3f} s' if isinstance(seconds, float) else seconds
    print(f'  tried {label:<20} {result}')
  line = '{:<14}{:>10}{:>10}{:>12}{:>10}'
  print(line.format('', 'tokens/s', 'step s', 'fastest s', 'CPU s'))
  for name, side in found['sides'].items():
    seconds = (f'{side[k]:.3f}' for k in ('step_s', 'fastest_s', 'cpu_s'))
    print(line.format(name, f'{side["tokens_s"]:.0f}', *seconds))
  low, high = min(found['speed_ups']), max(found['speed_ups'])
  print(f'm2jax / transformers: {found["speed_up"]:.2f} ({low:.2f} to {high:.2f})')
  print(
    f'{found["step_gflop"]:.1f} GFLOP a step at {found["matmul_gflop_s"]:.0f} GFLOP/s:'
    f' {found["matmul_fraction"]:.2f} of the matmul floor'
  )
  for name in PARTS:
    seconds = found['parts_s'][name]
    share = seconds / found['sides']['m2jax']['step_s']
    print(f'  {name:<12}{1e3 * seconds:>8.1f} ms{100 * share:>6.0f} %')


if __name__ == '__main__':
  harness.main(FLAGS, compare, show)
