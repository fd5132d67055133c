"""The histograms of the report."""

from __future__ import annotations

import re

from m2jax.observe import plots, sample_names, sample_plots, svg

RECORDS = [
  {'phase': 'rl', 'step': 1, 'generated_age/0': 6, 'generated_age/4': 2, 'loss': 1.0},
  {'phase': 'rl', 'step': 2, 'generated_age/4': 2, 'trained_age/1': 4},
  {'phase': 'rl', 'step': 3, 'trained_outcome/solved': 3, 'trained_outcome/failed': 1},
]


def test_counts_are_summed_over_the_run():
  found = sample_plots.counts(RECORDS)
  assert found['generated', 'age'] == {'0': 6, '4': 4}
  assert found['trained', 'age'] == {'1': 4} and not found['dropped', 'age']


def test_bars_are_shares_of_their_kind():
  """Without gaps in the bins, and with the number of trajectories in the legend."""
  by_title = {title: rest for title, *rest in sample_plots.drawn(RECORDS)}
  note, legend, drawing = by_title['Age']
  assert '[versions]' in note
  assert [name for name, _ in legend] == ['generated, 10', 'trained, 4']
  tips = re.findall('<title>(.*?)</title>', drawing)
  assert tips == [
    *(f'generated, 10: {x}' for x in ('0 60 %', '1 0 %', '2 0 %', '4 40 %')),
    *(f'trained, 4: {x}' for x in ('0 0 %', '1 100 %', '2 0 %', '4 0 %')),
  ]
  assert len(re.findall('<rect', drawing)) == 8
  _, _, outcomes = by_title['Outcome']
  assert 'trained, 4: solved 75 %' in outcomes and 'partly' not in outcomes
  assert by_title['Length'][-1] == ''


def test_the_report_has_them_if_there_are_any():
  titles = {s.title: [p.title for p in s.plots] for s in plots.sections(RECORDS)}
  assert titles['Samples'] == ['Age', 'Outcome']
  assert 'Samples' not in {s.title for s in plots.sections(RECORDS[:0])}


def test_names_are_text():
  """A category of a record is escaped like all else."""
  drawing = svg.bar_plot(['<x>'], [svg.Bars('a', [0.5])], label='l', x_label='x')
  assert '<x>' not in drawing and '&lt;x&gt;' in drawing


def test_every_name_is_listed():
  from m2jax.observe import names

  for kind in sample_names.KINDS:
    for quantity in sample_names.QUANTITIES:
      found = names.metric('rl', sample_names.name(kind, quantity, '4'))
      assert found.unit == 'trajectories' and quantity in found.meaning
