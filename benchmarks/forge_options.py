"""The main job with each option of optimizer and precision, from start to end.

  python -m benchmarks.forge_options         # a table; --json for the numbers
  python -m benchmarks.forge_options --names plain "all four" --seeds 0 1 2

Runs `configs/forge.py:smoke`, SFT and RL of a tiny M2 in the real environment, as a
program of its own for each option, with the flags of `OPTIONS` in both phases; the
router's bias is always on. Other flags, `--config.sft.loop.steps=100`, are for every
run. Few steps: the table shows whether the options run together, not what they are
worth (docs/optimizers.md, docs/low_precision.md).

`SFT loss` is that of the first and the last record, `updates` of RL; `mismatch` the
mean of |log-probability of the learner − of the engine| over tokens that the same
weights have sampled; σ/R least and largest over all steps; `msigns` evaluations a step,
mean over RL; `promoted` the share of the layers, mean over steps; MaxVio of the last
step of SFT; `step` the median seconds of a step of SFT over those of the first option:
GNMR compiles a program for each set of promoted layers. Cells are medians over seeds.
"""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import harness
from m2jax.observe import metrics

SSO = ('{part}.optimizer.name=sso',)
FP8 = ('model.matmuls.kind=block_fp8',)
GNMR = ('{part}.optimizer.gnmr.max_active=1',)
OPTIONS = {
  'plain': (),
  'SSO': SSO,
  'block FP8': FP8,
  'block FP8, GNMR': (*FP8, *GNMR),
  'all four': (*SSO, *FP8, *GNMR),
}
PARTS = ('sft', 'rl')


def flags(name: str) -> list[str]:
  """The job's flags for both phases."""
  settings = [s.format(part=part) for s in OPTIONS[name] for part in PARTS]
  return [f'--config.{setting}' for setting in dict.fromkeys(settings)]


def run(name: str, seed: int, more: Sequence[str]) -> dict[str, Any]:
  """Figures of one run.

  Raises:
    RuntimeError: the job failed; with the end of its output.
  """
  with tempfile.TemporaryDirectory() as temporary:
    workdir = pathlib.Path(temporary, 'run')
    command = [sys.executable, '-m', 'experiments.forge', f'--workdir={workdir}']
    command += ['--config=configs/forge.py:smoke', f'--config.seed={seed}']
    command += ['--config.sft.loop.log_every=1', *flags(name), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
      raise RuntimeError(f'{name}, seed {seed}:\n{(done.stdout + done.stderr)[-3000:]}')
    sft, rl = (metrics.read(workdir, part) for part in PARTS)
    return {'name': name, 'seed': seed, **figures(sft, rl)}


def figures(
  sft: Sequence[Mapping[str, Any]], rl: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Figures from both phases' records; None where the option has no such metric."""

  def over(records, name, of):
    found = [r[name] for r in records if name in r]
    return float(of(found)) if found else None

  times = np.diff([r['used_s'] for r in sft])
  return {
    'first_loss': sft[0]['loss'],
    'last_loss': sft[-1]['loss'],
    'updates': rl[-1]['step'],
    'mismatch': over(rl, 'mismatch/mean', np.mean),
    'sigma_min': over([*sft, *rl], 'sphere/sigma_min', np.min),
    'sigma_max': over([*sft, *rl], 'sphere/sigma_max', np.max),
    'msigns': over(rl, 'sphere/evaluations', np.mean),
    'promoted_sft': over(sft, 'gnmr/promoted', np.mean),
    'promoted_rl': over(rl, 'gnmr/promoted', np.mean),
    'max_violation': sft[-1]['max_violation'],
    'step_s': float(np.median(times)),
  }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Markdown."""
  names = list(dict.fromkeys(row['name'] for row in rows))

  def median(name, key):
    found = [r[key] for r in rows if r['name'] == name and r[key] is not None]
    return float(np.median(found)) if found else None

  def cell(name, key, form):
    value = median(name, key)
    return '' if value is None else f'{value:{form}}'

  heads = ['options', 'SFT loss', 'updates', 'mismatch', 'σ/R', 'msigns']
  heads += ['promoted in SFT', 'in RL', 'MaxVio', 'step']
  groups = {
    'Learning': ['SFT loss', 'updates', 'mismatch', 'MaxVio', 'step'],
    'Norms and GNMR': ['σ/R', 'msigns', 'promoted in SFT', 'in RL'],
  }
  lines = []
  for name in names:
    pair = [cell(name, key, '.4f') for key in ('sigma_min', 'sigma_max')]
    cells = [
      name,
      f'{median(name, "first_loss"):.3f} → {median(name, "last_loss"):.3f}',
    ]
    cells += [cell(name, 'updates', '.0f'), cell(name, 'mismatch', '.1e')]
    cells += [' … '.join(filter(None, pair)), cell(name, 'msigns', '.1f')]
    cells += [cell(name, key, '.2f') for key in ('promoted_sft', 'promoted_rl')]
    cells += [cell(name, 'max_violation', '.2f')]
    cells += [f'{median(name, "step_s") / median(names[0], "step_s"):.2f}']
    lines.append(cells)
  return harness.markdown(heads, lines, groups)


def main() -> None:
  parser = harness.parser(__doc__, results=True)
  parser.add_argument('--names', nargs='+', default=list(OPTIONS), choices=OPTIONS)
  parser.set_defaults(seeds=[0])
  args, more = parser.parse_known_args()
  kept, found = harness.Results(args.results), []
  for name in args.names:
    for seed in args.seeds:
      one = functools.partial(run, name, seed, more)
      found.append(kept.once((name, seed, more), one))
      print(f'{name}, seed {seed}: done', file=sys.stderr)
  harness.show(args, found, table)


if __name__ == '__main__':
  main()
