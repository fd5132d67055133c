"""How benchmarks.estimators adds up, and that its runs start and end as it says."""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import pytest

from benchmarks import estimators


def test_held_out_prompts_are_never_trained():
  """The two streams have no prompt in common; solutions are sorted."""
  streams = [estimators.prompts(np.random.default_rng(0), of) for of in (False, True)]
  train, held = (
    {p.tobytes() for p in itertools.islice(stream, 500)} for stream in streams
  )
  assert not train & held
  prompt = np.array([estimators.BEGIN, 5, 2, 9, estimators.ASK])
  assert estimators.solution(prompt).tolist() == [2, 5, 9, estimators.END]


def arguments(**changes):
  values = dict(seeds=[0, 1, 2], per_batch=[1, 16], algorithms=['cispo', 'grpo'])
  return argparse.Namespace(**values | changes)


def test_planned():
  """Every estimator with every u and seed; the frozen bias where it was asked for."""
  runs = estimators.planned(arguments())
  assert len(runs) == len(set(runs)) == 3 * (4 + 3)
  assert {run.seed for run in runs[:7]} == {0}
  assert sum(not run.bias for run in runs) == 9


def test_tables():
  """Medians with ranges, and paired differences with the interval of Student's t."""
  runs = []
  for run in estimators.planned(arguments()):
    gain = 0.1 if run.algorithm == 'grpo' else 0.0
    end = 0.5 + 0.01 * run.seed + gain * (1 + run.seed) - 0.02 * (not run.bias)
    found = dict(clip_fraction=0.0, approx_kl=0.01, entropy=0.2, max_violation=0.3)
    runs.append(run._asdict() | found | {'held_out': [0.4, 0.45, end]})
  text = estimators.tables(runs)
  lines = text.splitlines()
  assert '| 1 | cispo | 3 | 0.45 | 0.51 [0.50, 0.52] |  |' in lines
  half = 4.303 * 0.1 / np.sqrt(3)
  assert f'| 1 | grpo | 3 | 0.45 | 0.71 [0.60, 0.82] | +0.20 ± {half:.2f} |' in lines
  assert 'At the start: 0.40.' in lines
  assert lines[-1].startswith('| 16 | grpo | frozen |') and '-0.02 ± 0.00' in lines[-1]


@pytest.mark.thorough
def test_runs_start_from_one_checkpoint(tmp_path):
  """Two estimators begin with the same weights and tasks, and the second SFT is read
  from the file."""
  args = arguments(
    workdir=tmp_path,
    updates=4,
    sft_steps=30,
    learning_rate=1e-4,
    sft_rate=2e-3,
    evaluated=64,
  )
  trainer = estimators.Trainer(args)
  runs = [estimators.Run(kind, 2, True, 0) for kind in ('cispo', 'dapo')]
  one, two = map(trainer.run, runs)
  assert one['held_out'][0] == two['held_out'][0] and len(one['held_out']) == 3
  assert (tmp_path / 'sft_0.npz').exists()
  assert np.isfinite([one['entropy'], two['approx_kl']]).all()
