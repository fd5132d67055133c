"""How benchmarks.speculative adds up; it runs for minutes itself."""

from __future__ import annotations

from benchmarks import speculative


def side(rows, name, *speeds):
  return dict(
    rows=rows,
    side=name,
    tokens_per_s=list(speeds),
    acceptance=[0.5, 0.25, 0.125],
    mean_accepted_length=1.5,
    drafts_at_end=1,
  )


def test_table_and_break_even():
  """Ratios are of each round, before the median: load changes from round to round."""
  found = []
  for rows, factor in ((1, 2.0), (8, 1.5), (64, 0.5)):
    found.append(side(rows, '0', 100, 200, 400))
    found += [
      side(rows, name, 100 * factor, 100 * factor, 400 * factor)
      for name in ('1', '2', '3', 'adaptive')
    ]
  assert speculative.ratios(found, 8, '2') == [1.5, 0.75, 1.5]
  assert speculative.break_even(found) == 8
  assert speculative.break_even(found[-5:]) == 0
  lines = speculative.table(found).splitlines()
  assert lines[2].startswith('| 1 | 200 | 200 (2.00) | 200 (2.00) |')
  assert lines[3].endswith('| 150 (1.50) [1] | 0.50, 0.25, 0.12 | 1.50 |')
