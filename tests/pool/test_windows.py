"""Rules of which completed items may be taken; the example of docs/scheduling.md."""

import pathlib
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.pool import windows
from m2jax.pool.data_pool import DataPool
from m2jax.pool.windowed_fifo import WindowedFifo
from m2jax.pool.work_queue import WorkQueue
from tests.pool import test_windowed_fifo, test_work_queue

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'scheduling.md'
PER_UPDATE = 3


@pytest.fixture(scope='module', autouse=True)
def mylab(tmp_path_factory):
  """The module `mylab.aged` of the page, importable."""
  (code,) = re.findall(r'```python\n# mylab/aged\.py\n(.*?)```', PAGE.read_text(), re.S)
  folder = tmp_path_factory.mktemp('lab') / 'mylab'
  folder.mkdir()
  (folder / 'aged.py').write_text(code)
  others = {n: sys.modules.pop(n) for n in list(sys.modules) if n.startswith('mylab')}
  sys.path.insert(0, str(folder.parent))
  yield
  sys.path.remove(str(folder.parent))
  for name in [n for n in sys.modules if n.startswith('mylab')]:
    del sys.modules[name]
  sys.modules.update(others)


def test_what_a_config_may_say():
  """The public values, and their equals by name; W as a flag is a text."""
  queue = windows.Queue(head=10, next_index=30, capacity=20, age=0, per_update=1)
  ends = {
    11: (1, '1', 'strict', dict(kind='window', width=1)),
    14: (4, '4', dict(kind='window', width=4), windows.make(4)),
    16: ('default', 'window'),
    None: (None, 'greedy', 'mylab.aged', dict(kind='mylab.aged', updates=100)),
  }
  ends[None] = ends[None][:2] + ends[None][3:]
  for end, given_ in ends.items():
    for one in given_:
      assert windows.make(one).end(queue) == end, one
      assert WindowedFifo(20, one).window == (None if end is None else end - 10)
  assert windows.make('mylab.aged').end(queue) == 11  # 20 items are more than 8 updates


@pytest.mark.parametrize(
  'window, said',
  [
    (0, 'width=0: must be at least 1'),
    (1.5, 'must be a number of items, None'),
    ({'width': 2}, 'must be a number of items, None .* dict with `kind`'),
    ('strikt', 'no module m2jax.pool.windows.strikt; .*greedy, strict, window'),
    ({'kind': 'strict', 'width': 2}, "kind 'strict' has no field width; it has kind"),
    ({'kind': 'mylab.aged', 'updates': 0}, 'updates=0: must be at least 1'),
  ],
)
def test_bad_rules_are_refused(window, said):
  """Before anything runs, naming what there is."""
  with pytest.raises(ValueError, match=said):
    WindowedFifo(4, window)


def test_a_rule_that_would_never_take_the_head_is_named():
  """An error instead of a learner that waits forever."""

  class Never(windows.WindowConfig):
    def end(self, queue):
      return queue.head

  with pytest.raises(ValueError, match='end 0 is not above the head 0'):
    WindowedFifo(4, Never('never')).state()


@settings(deadline=None, max_examples=100)
@given(test_windowed_fifo.OPS, st.integers(1, 9), st.integers(0, 4))
def test_the_page_s_rule_bounds_the_age(ops, capacity, more):
  """Greedy until the head may become too old; takes of several are those of one each;
  a restored queue continues alike."""
  updates = -(-(capacity - 1) // PER_UPDATE) + more or 1
  rule = dict(kind='mylab.aged', updates=updates)
  fifo, taken, born = WindowedFifo(capacity, rule, PER_UPDATE), 0, {}
  for op, value in test_windowed_fifo.run(ops, fifo):
    if op == 'submit':
      born[value] = taken
    elif op == 'take':
      for index in value:
        assert taken - born[index] <= updates * PER_UPDATE
        taken += 1
  head, states = fifo.states()
  of = lambda state: [head + i for i, s in enumerate(states) if s == state]
  again = WindowedFifo(capacity, rule, PER_UPDATE)
  again.restore(
    *(head, of('retired'), fifo.next_index),
    completed={i: ('result', i) for i in of('completed')},
    ages={i: taken - born[i] for i in of('completed') + of('pending')},
  )
  assert again.state().in_window == fifo.state().in_window
  assert again.take(capacity) == fifo.take(capacity)


def test_it_overtakes_a_slow_head_until_the_limit():
  """12 items for N = 6: 7 are taken before the head, which the 5 live ones follow."""
  fifo = WindowedFifo(6, dict(kind='mylab.aged', updates=4), PER_UPDATE)
  slow, taken = fifo.submit(), []
  while len(taken) < 20 and fifo.window != 1:
    while fifo.wait_for_room(0):
      fifo.complete(fifo.submit())
    taken += fifo.take(1)
  assert len(taken) == 7 and fifo.head == slow and fifo.window == 1


def test_a_restart_keeps_the_ages(url):
  """From what the pool stores of an item: the limit counts across restarts."""
  rule = dict(kind='mylab.aged', updates=2)
  with DataPool(url) as pool:
    with test_work_queue.queue_of(pool, 3, rule, PER_UPDATE) as queue:
      queue.submit('t', 1)
      for index in range(1, 5):
        assert queue.state().window is None
        queue.submit('t', 1)
        assert test_work_queue.roll(pool, queue, index)
        assert [t.index for t in queue.take(1, 1)] == [index]
      assert queue.state().window == 1  # 4 taken, and N = 3
    again = WorkQueue(pool, 3, rule, PER_UPDATE)
    assert [item.index for item in again.resume(pool.ledger(1))] == [0]
    assert again.state().window == 1
