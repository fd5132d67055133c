"""The table of metrics is what readers read; tests and writers cannot invent names."""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
import time
import warnings

import pytest

from m2jax.observe import evaluations, frame, metrics, names, plots, report

HERE = pathlib.Path(__file__).parent
PHASES = ('sft', 'rl', 'eval')  # those that plots, view and report show


def _step_records(phase: str) -> list[dict]:
  """Every name of a phase, with values that all differ."""
  keys = [m.name for m in names.METRICS if phase in m.phases]
  keys = [k.replace('*', part) for k in keys for part in ('a', 'b')[: 1 + ('*' in k)]]
  records = []
  for step in range(1, 13):
    values = {k: (100 + 7 * i + step) / 1000 for i, k in enumerate(keys)}
    if 'memory/rss_bytes' in values:
      values['memory/rss_bytes'] *= 2**40
    records.append({'phase': phase, 'step': step, **values})
  return records


def _eval_records() -> list[dict]:
  records = []
  tasks = [('all', None), ('a', 1), ('a', 2), ('b', 3)]
  runs = [('after SFT', 400, 'held_out'), ('during RL', 6, 'dev')]
  runs += [('after RL', 12, 'held_out'), ('after RL', 12, 'dev')]
  cases = itertools.product(runs, (1.0, 0.0), tasks)
  for i, ((stage, step, split), temperature, (family, calls)) in enumerate(cases):
    record = {
      'phase': 'eval',
      'step': step,
      'stage': stage,
      'split': split,
      'temperature': temperature,
      'family': family,
      'successes': 11 + 2 * i,
      'n': 100 + i,
    }
    records.append(record | ({'calls': calls} if calls else {}))
  return records


def _records(phase: str) -> list[dict]:
  return _eval_records() if phase == 'eval' else _step_records(phase)


def _drawn(records) -> list:
  return plots.sections(records, capacity_items=64, window_items=19)


def _view(records) -> str:
  now = time.monotonic()
  state = frame.State('t', [frame.Phase('RL', 10)], now)
  state.begin('RL')
  for record in records:
    state.add(record)
  state.current.started_s = state.started_s = now - 100
  return f'{frame.draw(state, 200).plain}\n{frame.plain_line(state)}'


def _tables(records) -> list[str]:
  summary = report.Summary('t', evaluations.by_stage(records))
  return re.findall('<table.*?</table>', report.render(records, [], summary, {}), re.S)


READERS = {'plot': _drawn, 'view': _view, 'report': _tables}


def _read_by(render, phase: str) -> set[str]:
  """Names of a phase whose absence changes what is rendered."""
  records = _records(phase)
  whole, found = render(records), set()
  for name in sorted({k for r in records for k in r} - {'phase', 'step'}):
    without = [{k: v for k, v in r.items() if k != name} for r in records]
    try:
      changed = render(without) != whole
    except KeyError:  # as 'successes': the reader cannot do without
      changed = True
    if changed:
      found.add(names.metric(phase, name).name)
  return found


@pytest.mark.parametrize('phase', PHASES)
@pytest.mark.parametrize('place', names.PLACES)
def test_a_name_is_shown_where_the_table_says(place, phase, monkeypatch):
  """Neither more nor less: without the value the place looks different."""
  frozen = time.monotonic()
  monkeypatch.setattr(time, 'monotonic', lambda: frozen)
  listed = {m.name for m in names.METRICS if phase in m.phases and place in m.shown}
  assert _read_by(READERS[place], phase) == listed


def test_every_line_of_the_table_is_whole():
  """No name twice in a phase; units, meanings, phases and places are there."""
  for metric in names.METRICS:
    assert metric.unit and metric.meaning and metric.phases, metric
    assert set(metric.phases) <= set(names.PHASES), metric
    assert set(metric.shown) <= set(names.PLACES), metric
  pairs = [(phase, m.name) for m in names.METRICS for phase in m.phases]
  assert len(pairs) == len(set(pairs))


def test_readers_cannot_use_a_name_that_is_not_listed():
  """The plot of a name that nobody writes fails where it is declared."""
  with pytest.raises(KeyError, match=r'ratio_mean.*names\.py'):
    plots.Curves('Importance ratio', ('ratio_mean',))
  with pytest.raises(KeyError, match='ratio_mean'):
    frame.State('t', [], 0.0).value('ratio_mean')


def test_an_unlisted_name_is_written_with_one_warning(tmp_path):
  """A run goes on; the warning has the name, the phase and the file."""
  with metrics.MetricsWriter(tmp_path, use_tensorboard=False) as writer:
    with pytest.warns(names.UnlistedMetric, match=r"'lsos' of phase 'rl'.*names\.py"):
      writer.write('rl', 1, lsos=0.5)
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      writer.write('rl', 2, {'lsos': 0.25, 'loss': 0.1, 'success/any family': 1.0})
    with pytest.warns(names.UnlistedMetric, match="phase 'rll'"):
      writer.write('rll', 1, loss=0.5)
  assert [r.get('lsos') for r in metrics.read(tmp_path)] == [0.5, 0.25, None]


def test_in_the_tests_an_unlisted_name_is_an_error(tmp_path):
  """The project's own writers and fixtures: held by pytest's settings."""
  with metrics.MetricsWriter(tmp_path, use_tensorboard=False) as writer:
    with pytest.raises(names.UnlistedMetric, match='lsos'):
      writer.write('rl', 1, lsos=0.5)
  assert metrics.read(tmp_path) == []


@pytest.mark.parametrize('path', sorted(HERE.glob('test_*.py')), ids=lambda p: p.name)
def test_fixtures_use_names_of_the_table(path):
  """Every record spelled out in these tests: a dict with a phase."""
  unlisted = []
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.Dict):
      pairs = zip(node.keys, node.values, strict=True)
      fields = {k.value: v for k, v in pairs if isinstance(k, ast.Constant)}
      if isinstance(phase := fields.pop('phase', None), ast.Constant):
        keys = set(fields) - metrics.RESERVED
        unlisted += names.unlisted(phase.value, keys)
  assert unlisted == []
