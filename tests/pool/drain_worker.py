"""A process that drains a finite queue and may die at any moment; see test_kill.py.

Everything is real but the model: "weights" are the list of the item ids trained so far,
which makes the surviving lineage readable from the last checkpoint.

  python -m tests.pool.drain_worker DIRECTORY URL SEED TOTAL [DIE_AT COUNT]

DIE_AT names a point at which the process kills itself with SIGKILL, the COUNT-th time.
"""

import json
import os
import pathlib
import random
import signal
import sys
import threading
import time

from m2jax import records
from m2jax.pool import data_pool, work_queue

CAPACITY, WINDOW, GROUP, BATCH, SAVE_EVERY = 12, 4, 2, 3, 3


def fails(index: int) -> bool:
  """Items whose rollouts time out, in every attempt."""
  return index % 13 == 6


class Pool(data_pool.DataPool):
  """The pool, with a kill point between each of its commits and the queue's change."""

  point = staticmethod(lambda name: None)

  def submit(self, item):
    super().submit(item)
    self.point('submitted')

  def complete(self, index):
    super().complete(index)
    self.point('completed')

  def fail(self, index, reason):
    super().fail(index, reason)
    self.point('failed')

  def take(self, indices, step):
    super().take(indices, step)
    self.point('taken')


class Worker:
  def __init__(self, directory, url, seed, total, die_at='', count='1'):
    self.directory, self.total = pathlib.Path(directory), int(total)
    self.url = url
    self.die_at, self.left = die_at, int(count)
    self.rng = random.Random(int(seed))
    self.run_id = f'{os.getpid()}-{time.time_ns()}'
    self.lock = threading.Lock()

  def point(self, name):
    """A kill point between two steps of the protocol."""
    if name == self.die_at:
      with self.lock:
        self.left -= 1
        if self.left == 0:
          os.kill(os.getpid(), signal.SIGKILL)

  def save(self, weights, step):
    """One atomic commit of weights, step and ledger."""
    ledger = self.pool.ledger(step).to_dict()
    temporary = self.directory / 'checkpoint.tmp'
    temporary.write_text(json.dumps(dict(weights=weights, step=step, ledger=ledger)))
    self.point('checkpoint written')
    temporary.replace(self.directory / 'checkpoint.json')
    self.point('checkpoint renamed')
    if step % (2 * SAVE_EVERY) == 0:
      self.pool.prune(data_pool.Ledger.from_dict(ledger), keep_messages=4)

  def main(self):
    path = self.directory / 'checkpoint.json'
    state = dict(weights=[], step=0, ledger=None)
    if path.exists():
      state = json.loads(path.read_text())
    weights, step = state['weights'], state['step']
    ledger = state['ledger'] and data_pool.Ledger.from_dict(state['ledger'])

    self.pool = Pool(self.url, linger_s=0.01)
    self.pool.point = self.point
    before = self.pool.counts()
    self.queue = work_queue.WorkQueue(self.pool, CAPACITY, WINDOW)
    todo = self.queue.resume(ledger)
    self.point('rolled back')
    after = self.pool.counts()
    with open(self.directory / 'lives.jsonl', 'a') as f:
      revived = before['taken'] - after['taken']
      print(json.dumps(dict(revived=revived, reissued=len(todo))), file=f)
    self.todo = {item.index: item for item in todo}
    print('ready', flush=True)

    threads = [threading.Thread(target=self.submit, daemon=True)]
    threads += [threading.Thread(target=self.roll, daemon=True) for _ in range(5)]
    for thread in threads:
      thread.start()
    indices = self.take(step + 1)
    while indices:
      ahead = self.take(step + 2)  # as a learner does that packs while it trains
      for index in indices:
        self.train(index, weights)
      step += 1
      self.point('trained')
      if step % SAVE_EVERY == 0:
        self.save(weights, step)
      indices = ahead
    assert self.queue.drained
    self.save(weights, step)
    self.pool.close()

  def take(self, step):
    """Takes the batch that learner step `step` will train on."""
    return [t.index for t in self.queue.take(BATCH, step, timeout_s=60)]

  def submit(self):
    for index in range(self.queue.next_index, self.total):
      while self.queue.state().pending + self.queue.state().completed >= CAPACITY:
        time.sleep(0.001)
      item = self.queue.submit(f'task {index}', GROUP)
      with self.lock:
        self.todo[item.index] = item
    self.queue.close()

  def roll(self):
    """Runs groups: the completions come from a gateway thread, here from this one."""
    while not self.queue.drained:
      with self.lock:
        index = self.rng.choice(list(self.todo)) if self.todo else None
        item = self.todo.pop(index, None)
        pause_s = self.rng.expovariate(200.0)
      time.sleep(pause_s if item else 0.002)
      if item is None:
        continue
      if fails(index):
        self.queue.fail(index, 'timed out')
        continue
      for rank in range(GROUP):
        session = f'{index}.{item.attempt}.{rank}.{self.run_id}'
        for turn in range(2):
          self.pool.add_completion(
            records.Completion(
              id=f'{session}.{turn}',
              session=session,
              turn=turn,
              parent=None,
              fork_reason=None,
              prompt_ids=(index, item.attempt),
              response_ids=(rank, turn),
              logprobs=(-0.5, -0.25),
              versions=(0, 0),
              finish_reason='stop',
              status='ok',
            )
          )
        self.point('completions added')
        self.pool.add_trajectory(
          records.Trajectory(
            session, index, rank, item.task, 'toy', 'answer', 1.0, 0.1, 1
          )
        )
        if rank + 1 < GROUP and index % 4 == 0:
          self.pool.flush()
          self.point('half a group committed')
      self.queue.complete(index)

  def train(self, index, weights):
    """Checks that the group is whole and of one attempt, then updates the weights."""
    group = self.pool.group(index)
    assert [t.rank for t, _ in group] == list(range(GROUP)), group
    attempts = set()
    for trajectory, completions in group:
      assert [c.turn for c in completions] == [0, 1], completions
      attempts |= {tuple(c.prompt_ids.tolist()) for c in completions}
      for c in completions:
        assert c.response_ids.tolist() == [trajectory.rank, c.turn]
        assert c.session == trajectory.session and c.prompt_ids[0] == index
    assert len(attempts) == 1, attempts
    weights.append(index)


if __name__ == '__main__':
  Worker(*sys.argv[1:]).main()
