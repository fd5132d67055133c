"""How benchmarks.expand_mtp adds up over seeds; it runs for minutes itself."""

from __future__ import annotations

from benchmarks import expand_mtp


def row(seed, source, after, main, *modules):
  fields = dict(seed=seed, source=source, after=after, steps=9)
  return {**fields, 'main': main, 'modules': list(modules)}


def test_tables():
  """Medians over seeds; differences are taken within a seed, before the median."""
  rows = [row(seed, '', 'one module', 2.0 + seed, 3.0) for seed in (0, 1, 2)]
  for seed, better in ((2, 0.3), (0, 0.1), (1, 0.2)):  # in any order
    for after in ('frozen', 'joint'):
      rows.append(row(seed, 'mtp', after, 2.0, 3.0, 4.0 + seed, 5.0))
      random = 4.0 + seed + better
      rows.append(row(seed, 'random', after, 2.0, 3.0, random, 4.0))
  medians, _, ahead = expand_mtp.tables(rows).partition('\n\n')
  lines = medians.splitlines()
  assert lines[2] == '|  | one module | 9 | 3.000 | 3.000 |  |  |'
  assert lines[3] == '| mtp | frozen | 9 | 2.000 | 3.000 | 5.000 | 5.000 |'
  assert lines[4] == '| random | frozen | 9 | 2.000 | 3.000 | 5.200 | 4.000 |'
  lines = ahead.splitlines()
  assert len(lines) == 4 and lines[2].startswith('| mtp, frozen | +0.000 ')
  assert '| +0.200 [+0.100, +0.300] | -1.000 [-1.000, -1.000] |' in lines[2]
