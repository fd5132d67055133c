"""How benchmarks.drafts_in_rl adds up; it runs for minutes itself."""

from __future__ import annotations

import numpy as np

from benchmarks import drafts_in_rl


def measured(tokens):
  return {'acceptance': [0.5, 0.25, 0.125], 'tokens': tokens, 'speed': 0.5}


def test_table_compares_each_seed_with_its_own_start():
  sides = drafts_in_rl.SIDES
  found = [
    {
      'seed': seed,
      'gap': 0.0,
      'history': [{'top-K KL': {'reward': i, 'entropy': 1.0}} for i in (0.25, 0.75)],
      'measured': {
        '0': dict.fromkeys(sides, measured(start)),
        '2': {name: measured(start * (1 + i / 4)) for i, name in enumerate(sides)},
      },
    }
    for seed, start in enumerate((1.0, 2.0, 4.0))
  ]
  lines = drafts_in_rl.table(found).splitlines()
  row = '| 0.500, 0.250, 0.125 | 2.000 | 1.00 [1.00, 1.00] | 0.50 |'
  assert lines[2] == f'| 0 | 0.25, 1.00 | all {row}'
  assert lines[3] == f'| 2 | 0.75, 1.00 | frozen {row}'
  assert lines[5].endswith('| 3.000 | 1.50 [1.50, 1.50] | 0.50 |')
  assert len(lines) == 3 + len(sides)


def test_parts_are_the_whole():
  """What is frozen and what is copied between sides: the modules, and all else."""
  variables = {
    'params': {'head': np.zeros(1), 'mtp': np.ones(2)},
    'router': {'layers': np.zeros(3), 'mtp': np.ones(4)},
  }
  trunk, modules = drafts_in_rl.parts(variables)
  assert [k for part in trunk.values() for k in part] == ['head', 'layers']
  assert drafts_in_rl.joined(trunk, modules) == variables
