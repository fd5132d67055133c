"""Two runs on the same tasks, and a report that leads to the page."""

from __future__ import annotations

import contextlib
import re

import pytest
from playwright.sync_api import expect

from m2jax import records
from m2jax.observe import metrics, report
from m2jax.pool.data_pool import DataPool
from m2jax.viewer import export, serving
from m2jax.viewer.run import Run
from tests import processes
from tests.viewer import conftest
from tests.viewer.conftest import press


def messages(*commands):
  found = [{'role': 'user', 'content': conftest.HOSTILE}]
  for command in commands:
    call = {'function': {'name': 'sh', 'arguments': f'{{"cmd": "{command}"}}'}}
    found.append({'role': 'assistant', 'tool_calls': [call]})
    found.append({'role': 'tool', 'content': f'did {command}'})
  return (*found, {'role': 'assistant', 'content': 'done'})


def write(workdir, verdicts, commands=('ls', 'wc')):
  """A trajectory of each task, in training; verdicts by task. The first session has the
  name of what every object of JavaScript has."""
  with DataPool(f'sqlite:///{workdir}/pool.db') as pool:
    for item, (task, success) in enumerate(verdicts.items()):
      pool.submit(records.WorkItem(item, task, 1))
      pool.add_trajectory(
        records.Trajectory(
          *(
            f's{item}' if item else 'constructor',
            item,
            0,
            task,
            'find',
            'answer',
            success,
            1.0,
            1,
          ),
          messages=messages(*commands),
        )
      )
    pool.flush()
  return workdir


@pytest.fixture(scope='module')
def workdirs(tmp_path_factory):
  """A and B: B is better on two tasks, worse on one."""
  make = tmp_path_factory.mktemp
  return (
    write(make('a'), {'t/1': 0.0, 't/2': 1.0, 't/3': 0.5, 'only/a': 1.0}),
    write(make('b'), {'t/3': 0.75, 't/2': 0.5, 't/1': 1.0}, commands=('ls', 'cat')),
  )


@pytest.fixture(scope='module')
def compared(workdirs):
  with contextlib.ExitStack() as stack:
    a, b = (stack.enter_context(contextlib.closing(Run(w))) for w in workdirs)
    yield stack.enter_context(serving.serving(a, conftest.KEY, other=b))


def test_tasks_of_two_runs(tab, compared):
  """Sorted by the difference of success; a link leads to a pair, side by side, with the
  turn where they become different. Text of models is text."""
  tab.goto(compared)
  tab.click('nav >> text=Compare')
  found = tab.locator('.pairs tbody tr')
  expect(found).to_have_count(3)
  rows = [re.sub(r'\s+', ' ', text) for text in found.all_inner_texts()]
  assert rows == [
    '+1.00 0.00 /1 1.00 /1 t/1',
    '−0.50 1.00 /1 0.50 /1 t/2',
    '+0.25 0.50 /1 0.75 /1 t/3',
  ]
  text = re.sub(r'\s+', ' ', tab.inner_text('.side > p'))
  assert text.startswith('3 tasks in both: A succeeds in 50 %, B in 75 %.')
  assert 'better in 2, worse in 1; 1 only in A, 0 only in B' in text
  tab.click('.pairs >> text=t/2')
  expect(tab).to_have_url(re.compile('#phase=compare&task=t%2F2$'))
  tab.reload()
  expect(tab.locator('.member')).to_have_count(2)
  heads = tab.locator('.member > p:first-child').all_inner_texts()
  assert [head.split() for head in heads] == [['A', '1', '1.00'], ['B', '1', '0.50']]
  expect(tab.locator('.cell.differs')).to_have_count(1)
  expect(tab.locator('.cell.differs')).to_contain_text('turn 1 first difference')
  expect(tab.locator('.cell.differs .call pre')).to_have_text('cat')
  expect(tab.locator('.detail h2')).to_have_text(conftest.HOSTILE)
  assert tab.evaluate('window.hacked') is None
  tab.set_viewport_size({'width': 400, 'height': 800})
  assert tab.locator('.pairs').is_hidden()
  tab.click('.back')
  expect(tab.locator('.pairs')).to_be_visible()
  expect(tab).to_have_url(re.compile('#phase=compare$'))
  tab.go_back()
  expect(tab.locator('.member')).to_have_count(2)


def test_flags_by_keys_and_clicks(new_tab, compared, workdirs):
  """One key or click sets a flag, another removes it; typing in a note sets none."""
  path = workdirs[0] / 'annotations.jsonl'
  new_tab.goto(f'{compared}&session=s1')
  hacked, look = (new_tab.locator(f'#flag-{name}') for name in ('hacked', 'look'))
  expect(hacked).to_have_attribute('aria-pressed', 'false')
  press(new_tab, 'h')
  expect(hacked).to_have_attribute('aria-pressed', 'true')
  expect(new_tab.locator('#row-s1 .flag')).to_have_attribute('title', 'hacked')
  expect(new_tab.locator('.row .flag')).to_have_count(2)  # its group's, too
  look.click()
  expect(look).to_have_attribute('aria-pressed', 'true')
  hacked.click()
  expect(hacked).to_have_attribute('aria-pressed', 'false')
  press(new_tab, 'n')
  new_tab.keyboard.type('hil')
  assert len(path.read_text().splitlines()) == 3
  new_tab.evaluate("sessionStorage.setItem('key', 'wrong')")
  new_tab.locator('#flag-infrastructure').click()
  expect(new_tab.locator('.flags [role=alert]')).to_be_visible()
  assert len(path.read_text().splitlines()) == 3


def test_the_report_leads_to_the_exported_page(new_tab, tmp_path):
  """A click on its curve opens what the step trained, in the file next to it."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    for item, step in enumerate((1, 2)):
      conftest.add_group(pool, item, step)
    conftest.add_evaluation(pool, tmp_path, 'during RL', ['e0'], 1000.0)
  with metrics.MetricsWriter(tmp_path, use_tensorboard=False) as writer:
    for step in (1, 2):
      writer.write('rl', step, reward=0.5, success=0.5)
  records_ = metrics.read(tmp_path)
  path = tmp_path / 'report.html'
  report.write_report(path, records_, [], report.Summary('run'), {})
  with contextlib.closing(Run(tmp_path)) as run:
    export.write(run, tmp_path / 'trajectories.html')
  new_tab.goto(path.as_uri())
  plot = new_tab.locator('svg.plot').nth(1)
  place = {'x': plot.bounding_box()['width'] * 47 / 480, 'y': 50}  # the first step
  plot.hover(position=place)
  expect(new_tab.locator('.tip')).to_contain_text('click: its trajectories')
  plot.click(position=place)
  expect(new_tab.locator('.about')).to_contain_text('Group 0: 1 of 2')
  expect(new_tab.locator('.row')).to_have_count(3)
  new_tab.goto(path.as_uri())
  new_tab.locator('svg.plot a').first.press('Enter')
  expect(new_tab.locator('.about')).to_contain_text('Evaluation during RL')
  expect(new_tab.locator('.row')).to_have_count(1)


def test_an_export_has_one_run(workdirs, tmp_path):
  a, b = workdirs
  flags = f'--workdir={a}', f'--compare={b}', f'--export={tmp_path / "x.html"}'
  done = processes.run('experiments.view', *flags, timeout_s=60)
  assert done.returncode and '--export writes one run' in done.stderr
  assert 'Traceback' not in done.stderr
