"""Findings in the terminal view and the report; findings.json is untrusted."""

from __future__ import annotations

import io
import json
import os
import re

import pytest
import rich.console

from m2jax.observe import findings, frame, report, terminal

HOSTILE = '</script><img src=x onerror="window.hacked=1">\x1b[2J\u202e'
FOUND = dict(  # of a finding, which is no record
  kind='gradient_jump',
  summary=f'the norm jumps {HOSTILE}',
  phase='rl',
  first_step=41,
  last_step=60,
  evidence=[
    {
      'name': 'grad_norm',
      'values': [0.2, 0.3, 8.0],
      'steps': [39, 40, 41],
      'threshold': 1.0,
      'calibration': '4 × the 0.9 quantile',
    }
  ],
  log=[f'E {HOSTILE}'],
  severity='error',
  causes=[{'text': 'too high', 'field': f'rl.{HOSTILE}'}],
)
RECORDS = [
  {'phase': 'rl', 'step': i, 'grad_norm': 8.0 if i > 40 else 0.2} for i in range(1, 61)
]
PARTS = list(FOUND)


@pytest.mark.parametrize(
  'text',
  [
    b'',
    b'[',
    b'{}',
    b'7',
    b'[1, null, [], {}, {"kind": 0}]',
    b'[' * 100_000,
    b'\xff',
    json.dumps([FOUND])[:-9].encode(),
  ],
)
def test_what_is_no_list_of_findings_is_none(text, tmp_path):
  (tmp_path / findings.FILE).write_bytes(text)
  assert findings.read(tmp_path) == ()


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('value', [[[]], {'a': {}}, 1e999, 10**400, 'x' * 10**6, None])
def test_values_of_any_type_can_be_shown(part, value, tmp_path):
  """By the report and by the view; each text is short and each number finite."""
  changed = FOUND | {part: value}
  (tmp_path / findings.FILE).write_text(json.dumps([changed, changed | FOUND]))
  found = findings.read(tmp_path)
  assert found[-1].kind == 'gradient_jump'
  shown = json.dumps([x.as_dict() for x in found], allow_nan=False)
  assert len(shown) < 20_000 and '\\u001b' not in shown
  report.render(RECORDS, (), report.Summary('a run'), {}, found)
  state = frame.State('run', [frame.Phase('RL', 1.0)], 0.0, findings=found)
  assert '\x1b' not in frame.draw(state, 80).plain


def test_a_pipe_is_not_opened(tmp_path):
  os.mkfifo(tmp_path / findings.FILE)
  assert findings.read(tmp_path) == ()


def test_bounds(tmp_path):
  """Of many findings the first are there, of many points every n-th and the last."""
  many = FOUND | {
    'evidence': [{'name': 'a', 'values': [1.0] * 9999, 'steps': list(range(9999))}]
  }
  findings.write(tmp_path, [many | {'kind': f'k{i}'} for i in range(99)][:9])
  found = findings.read(tmp_path)
  assert [x.kind for x in found] == [f'k{i}' for i in range(9)]
  points = found[0].curves[0].points
  assert len(points) <= findings.MAX_POINTS and points[-1] == (9998, 1.0)


def test_the_report_has_plot_window_and_threshold():
  """The series is the whole of the records; text of others stays text."""
  (found,) = findings.parse([FOUND])
  page = report.render(RECORDS, (), report.Summary('a run'), {}, [found])
  assert '<img' not in page and '\x1b' not in page and 'onerror' in page
  section = page[page.index('id="findings"') :]
  section = section[: section.index('</section>')]
  assert 'rl, steps 41 to 60' in section and 'class="shade"' in section
  assert 'class="limit s1"' in section
  drawn = re.search(r'<g class="line s0"><polyline points="([^"]*)"', section)[1]
  assert len(drawn.split()) == len(RECORDS)
  shade = re.search(r'class="shade" x="([\d.]+)" .*?width="([\d.]+)"', section)
  left, width = map(float, shade.groups())
  xs = [float(pair.split(',')[0]) for pair in drawn.split()]
  assert left == pytest.approx(xs[40], abs=0.1)
  assert left + width == pytest.approx(xs[59], abs=0.1)
  assert 'id="findings"' not in report.render(RECORDS, (), report.Summary('a'), {})


def test_the_view_has_a_line_of_each_new_finding():
  (found,) = findings.parse([FOUND])
  console = rich.console.Console(file=io.StringIO(), force_terminal=False, width=100)
  view = terminal.RunView({'RL': 1.0}, console=console, plain_every_s=3600)
  with view:
    view.begin('RL')
    view.set_findings([found])
    view.set_findings([found])
    drawn = view._draw().plain
  text = console.file.getvalue()
  assert text.count('error: gradient_jump: rl, steps 41 to 60') == 1
  assert 'findings 1' in text and '\x1b' not in text
  assert 'finding  gradient_jump rl, steps 41 to 60: the norm jumps' in drawn
  many = [found] * 9
  view.set_findings(many)
  assert '6 more' in view._draw().plain and view._draw().plain.count('finding  ') == 3
