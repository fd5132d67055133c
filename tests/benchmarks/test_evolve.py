"""The table of benchmarks.evolve: gains, false keeps, and which changes are named."""

from __future__ import annotations

from benchmarks import evolve


def run(arm, seed, start, last, kept):
  return dict(
    arm=arm,
    seed=seed,
    means={'start': start, 'incumbent': last},
    rounds=50,
    kept=kept,
    episodes=1000,
    cpu_s=60.0,
  )


def test_table():
  found = {
    'start': 0.3,
    'last keep': 0.7,
    'a alone': 0.5,
    'without a': 0.69,
    'b alone': 0.3,
    'without b': 0.6,
    'c alone': 0.31,
    'without c': 0.7,
  }
  runs = [
    run('analyst', 0, 0.25, 0.5, 3),
    run('analyst', 1, 0.4, 0.6, 2),
    run('same', 0, 0.25, 0.25, 0),
    run('same', 1, 0.4, 0.4, 1),
    dict(arm='changes', seed=0, found={'analyst': found, 'tpe': dict(found, **{
      'a alone': 0.3, 'without a': 0.7, 'b alone': 0.3, 'without b': 0.7})}, cpu_s=1.0),
  ]  # fmt: skip
  text = evolve.table(runs)
  assert '| analyst | 0.33 [0.25, 0.40] | 0.55 [0.50, 0.60] | 75 [50, 100] % |' in text
  assert 'same: 1 keeps of 100 rounds [0.0018, 0.0545]' in text
  assert 'a (+0.20 alone, +0.01 beside the others), b (+0.00 alone, +0.10' in text
  assert 'of 3 changes: none alone' in text and ' c (' not in text
