"""Windowed FIFO against DESIGN §6 and Fig. 5 of the report."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.pool.windowed_fifo import Full, NotPending, WindowedFifo
from m2jax.pool.windows import default_window


class NaiveFifo:
  """An independent implementation of the rules, by scanning a list."""

  def __init__(self, capacity, window):
    self.capacity, self.window = capacity, window
    self.states = []  # pending, completed, taken, failed

  def head(self):
    for i, state in enumerate(self.states):
      if state in ('pending', 'completed'):
        return i
    return len(self.states)

  def live(self):
    return sum(s in ('pending', 'completed') for s in self.states)

  def indices(self, state):
    return [i for i, s in enumerate(self.states) if s == state]

  def take_one(self):
    for i in self.indices('completed'):
      if self.window is None or i <= self.head() + self.window - 1:
        self.states[i] = 'taken'
        return i
    return None

  def take(self, n):
    return [i for i in (self.take_one() for _ in range(n)) if i is not None]


OPS = st.lists(
  st.tuples(
    st.sampled_from(['submit', 'submit', 'complete', 'complete', 'fail', 'take']),
    st.integers(0, 2**16),
  ),
  max_size=80,
)
CAPACITY = st.integers(1, 9)
WINDOW = st.one_of(st.none(), st.integers(1, 12))


def run(ops, fifo, naive=None):
  """Applies random operations; yields ('submit', i), ('take', [i, …]), … one by one."""
  pending = list(fifo.pending())
  for op, r in ops:
    if op == 'submit':
      if naive is not None and naive.live() >= naive.capacity:
        with pytest.raises(Full):
          fifo.submit()
        continue
      try:
        index = fifo.submit()
      except Full:
        continue
      pending.append(index)
      if naive is not None:
        assert index == len(naive.states)
        naive.states.append('pending')
      yield 'submit', index
    elif op == 'take':
      n = r % 5
      got = fifo.take(n)
      assert all(result == ('result', i) for i, result in got)
      got = [i for i, _ in got]
      if naive is not None:
        assert got == naive.take(n)
      yield 'take', got
    elif pending:
      index = pending.pop(r % len(pending))
      if op == 'complete':
        fifo.complete(index, ('result', index))
      else:
        fifo.fail(index, 'broke')
      if naive is not None:
        naive.states[index] = 'completed' if op == 'complete' else 'failed'
      yield op, index


@settings(deadline=None, max_examples=200)
@given(OPS, CAPACITY, WINDOW)
def test_matches_naive_model(ops, capacity, window):
  """Every take, error, head and count follows the rules."""
  fifo, naive = WindowedFifo(capacity, window), NaiveFifo(capacity, window)
  for _ in run(ops, fifo, naive):
    state, head = fifo.state(), naive.head()
    assert (fifo.head, fifo.next_index) == (head, len(naive.states))
    assert state.pending == len(naive.indices('pending'))
    done = naive.indices('completed')
    inside = [i for i in done if window is None or i < head + window]
    assert (state.completed, state.in_window) == (len(done), len(inside))
    assert state.taken == len(naive.indices('taken'))
    assert state.failed == len(naive.indices('failed'))
    if window is None:
      assert state.remaining is None
    else:
      ended = naive.indices('taken') + naive.indices('failed')
      assert state.remaining == window - sum(head <= i < head + window for i in ended)


@settings(deadline=None, max_examples=100)
@given(OPS, CAPACITY, st.integers(1, 12))
def test_age_bound(ops, capacity, window):
  """At most N + W − 2 others are taken while an item waits: bounded off-policyness."""
  fifo = WindowedFifo(capacity, window)
  taken, born = 0, {}
  for op, value in run(ops, fifo):
    if op == 'submit':
      born[value] = taken
    elif op == 'take':
      for index in value:
        assert taken - born[index] <= capacity + window - 2
        taken += 1


@pytest.mark.parametrize(
  ('capacity', 'window'), [(1, 1), (8, 1), (8, 4), (10, 3), (5, 9)]
)
def test_age_bound_is_attained(capacity, window):
  """The bound N + W − 2 is tight: a slow youngest item reaches it."""
  fifo = WindowedFifo(capacity, window)
  slow = [fifo.submit() for _ in range(capacity)][-1]
  for index in range(slow):
    fifo.complete(index)
  passed = len(fifo.take(capacity))
  for _ in range(5 * capacity + window):  # everything younger is fast
    for _ in range(capacity - len(fifo.pending()) - fifo.state().completed):
      fifo.complete(fifo.submit())
    passed += len(fifo.take(capacity))
  assert passed == capacity + window - 2


@settings(deadline=None, max_examples=50)
@given(OPS, CAPACITY)
def test_window_of_one_is_strict_fifo(ops, capacity):
  """W = 1 hands out items in exactly the order of submission."""
  taken = []
  for op, value in run(ops, WindowedFifo(capacity, window=1)):
    if op == 'take':
      taken += value
  assert taken == sorted(taken)


@settings(deadline=None, max_examples=50)
@given(OPS, CAPACITY)
def test_greedy_never_withholds(ops, capacity):
  """window=None: after an unlimited take nothing completed is left behind."""
  fifo = WindowedFifo(capacity, window=None)
  for _ in run(ops, fifo):
    assert fifo.state().in_window == fifo.state().completed
  fifo.take(capacity)
  assert fifo.state().completed == 0


def test_window_of_n_is_not_greedy():
  """W = N still blocks head + N, which greedy gives."""
  for window, expected in ((4, []), (None, [4])):
    fifo = WindowedFifo(4, window)
    for _ in range(4):
      fifo.submit()
    fifo.complete(1)
    assert [i for i, _ in fifo.take()] == [1]
    fifo.complete(fifo.submit())
    assert [i for i, _ in fifo.take()] == expected


@settings(deadline=None, max_examples=60)
@given(OPS, CAPACITY, WINDOW, st.integers(0, 9))
def test_take_n_is_n_takes_of_one(ops, capacity, window, n):
  """A batch is exactly what single takes would give, window moves included."""
  ops = [op for op in ops if op[0] != 'take']
  a, b = WindowedFifo(capacity, window), WindowedFifo(capacity, window)
  for fifo in (a, b):
    list(run(ops, fifo))
  assert a.take(n) == [x for _ in range(n) for x in b.take(1)]
  assert a.state().head == b.state().head


def test_figure_5():
  """The report's worked example: N 8, W 4, item 7 runs, 0–6 and 8–10 were trained."""
  fifo = WindowedFifo(capacity=8, window=4)
  for _ in range(8):
    fifo.submit()
  for i in range(7):
    fifo.complete(i)
  assert [i for i, _ in fifo.take(8)] == list(range(7))
  for i in range(8, 15):
    assert fifo.submit() == i
  with pytest.raises(Full):
    fifo.submit()
  for i in range(8, 15):
    fifo.complete(i)
  assert [i for i, _ in fifo.take(8)] == [8, 9, 10]
  assert fifo.take(8) == []  # 11 and later are blocked although finished
  state = fifo.state()
  assert (state.head, state.remaining) == (7, 1)
  assert (state.completed, state.in_window) == (4, 0)
  fifo.complete(7)
  assert state.taken == 10  # the max off-policy lag of item 7: N + (W − 1) − 1
  assert [i for i, _ in fifo.take(8)] == [7, 11, 12, 13, 14]


def test_failed_head_moves_the_window():
  """A head that times out does not block the learner, and has a reason."""
  fifo = WindowedFifo(capacity=4, window=2)
  for _ in range(4):
    fifo.submit()
  for i in (1, 2, 3):
    fifo.complete(i, ('result', i))
  assert [i for i, _ in fifo.take(4)] == [1]
  fifo.fail(0, 'timed out')
  assert (fifo.head, list(fifo.failures)) == (2, [(0, 'timed out')])
  assert [i for i, _ in fifo.take(4)] == [2, 3]
  with pytest.raises(NotPending, match='item 0 has already been taken or failed'):
    fifo.complete(0)
  assert fifo.submit() == 4  # a failure frees capacity


def test_misuse_is_an_error():
  """Completing twice, unknown items and bad sizes get errors that name the item."""
  fifo = WindowedFifo(2)
  fifo.submit()
  fifo.complete(0)
  with pytest.raises(NotPending, match='item 0 has already completed'):
    fifo.fail(0, 'late')
  with pytest.raises(NotPending, match='item 7 was never submitted'):
    fifo.complete(7)
  for kwargs in ({'capacity': 0}, {'capacity': 3, 'window': 0}):
    with pytest.raises(ValueError, match='must be'):
      WindowedFifo(**kwargs)
  with pytest.raises(ValueError, match='between 1 and the capacity 2'):
    fifo.wait_for_take(3, timeout_s=0)


def test_default_window():
  """W = max(1, ⌊0.3 N⌋) without rounding errors."""
  assert [default_window(n) for n in (1, 3, 4, 7, 10, 20, 64, 90)] == [
    1, 1, 1, 2, 3, 6, 19, 27,
  ]  # fmt: skip
  assert WindowedFifo(64).window == 19


@settings(deadline=None, max_examples=60)
@given(OPS, OPS, CAPACITY, WINDOW)
def test_restored_queue_continues_alike(before, after, capacity, window):
  """Law 5 for the queue: a restored queue behaves like the old one."""
  old = WindowedFifo(capacity, window)
  naive = NaiveFifo(capacity, window)
  list(run(before, old, naive))
  new = WindowedFifo(capacity, window)
  new.restore(
    naive.head(),
    naive.indices('taken') + naive.indices('failed'),
    len(naive.states),
    completed={i: ('result', i) for i in naive.indices('completed')},
    pending=dict.fromkeys(naive.indices('pending')),
  )
  assert list(run(after, old)) == list(run(after, new))


def test_restore_refuses_contradictions():
  """A damaged ledger must not become a queue that trains something twice."""
  cases = (
    dict(head=2, taken=[2], next_index=4),
    dict(head=2, taken=[5], next_index=4),
    dict(head=2, taken=[3], next_index=4, completed={3: None}),
    dict(head=5, taken=[], next_index=4),
  )
  for case in cases:
    with pytest.raises(ValueError, match='restore'):
      WindowedFifo(8).restore(**case)
  used = WindowedFifo(8)
  used.submit()
  with pytest.raises(RuntimeError, match='unused'):
    used.restore(0, [], 0)


def test_wait_for_take():
  """Waiting takes all or nothing, wakes on completion, takes the rest at the end."""
  fifo = WindowedFifo(capacity=4, window=4)
  for _ in range(3):
    fifo.submit()
  fifo.complete(0)
  assert fifo.wait_for_take(2, timeout_s=0.01) == []
  assert fifo.state().completed == 1  # the time-out took nothing
  timer = threading.Timer(0.05, fifo.complete, (2,))
  timer.start()
  assert [i for i, _ in fifo.wait_for_take(2, timeout_s=10)] == [0, 2]
  fifo.close()
  assert not fifo.wait_for_room(0) and not fifo.drained
  fifo.complete(1)
  assert [i for i, _ in fifo.wait_for_take(4, timeout_s=10)] == [1]
  assert fifo.drained and fifo.wait_for_take(4) == []
  with pytest.raises(RuntimeError, match='close'):
    fifo.submit()


def test_threads():
  """Submitter, workers and learner at once: each item ends once, in window order."""
  total, window = 300, 5
  fifo = WindowedFifo(capacity=16, window=window)

  def submit():
    for i in range(total):
      assert fifo.wait_for_room(30)
      assert fifo.submit(i) == i
    fifo.close()

  lock, claimed = threading.Lock(), set()

  def work(seed):
    rng = random.Random(seed)
    while not fifo.drained:
      with lock:
        free = [i for i in fifo.pending() if i not in claimed]
        index = rng.choice(free) if free else None
        claimed.add(index)
      if index is not None and index % 11 == 5:
        fifo.fail(index, 'timed out')
      elif index is not None:
        fifo.complete(index, ('result', index))

  threads = [threading.Thread(target=submit, daemon=True)]
  threads += [threading.Thread(target=work, args=(s,), daemon=True) for s in range(3)]
  for thread in threads:
    thread.start()
  taken = []
  while not fifo.drained:
    batch = fifo.wait_for_take(3, timeout_s=30)
    assert len(batch) == 3 or fifo.drained
    for index, result in batch:
      # The oldest item that can still come: the head is at or before it.
      oldest = next(i for i in range(total) if i % 11 != 5 and i not in taken)
      assert index < oldest + window and result == ('result', index)
      taken.append(index)
  for thread in threads:
    thread.join(30)
  assert sorted(taken) == [i for i in range(total) if i % 11 != 5]
