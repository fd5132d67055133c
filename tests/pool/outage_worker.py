"""A process that runs work items until it is stopped or killed; see test_outage.py.

  python -m tests.pool.outage_worker DIRECTORY URL NAME

It claims items, records their completions as a gateway does, and reports the groups. To
DIRECTORY/NAME.accepted it appends, in one write, the id of each completion whose commit
was acknowledged. It ends when DIRECTORY/stop exists.
"""

import os
import pathlib
import random
import sys
import time

from m2jax import records
from m2jax.pool import data_pool

GROUP, TURNS, OUTAGE_S = 2, 2, 60.0


def main(directory, url, name):
  directory, rng = pathlib.Path(directory), random.Random(name)
  flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
  accepted = os.open(directory / f'{name}.accepted', flags)
  with data_pool.DataPool(url, linger_s=0.01, outage_s=OUTAGE_S) as pool:
    while not (directory / 'stop').exists():
      for claim in pool.claim(name, 2):
        trajectories = []
        for rank in range(GROUP):
          session = f'{claim.item.session_prefix}-{rng.randbytes(8).hex()}'
          for turn in range(TURNS):
            c = completion(session, turn, claim.item.index)
            pool.record_completion(c).result(2 * OUTAGE_S)
            os.write(accepted, f'{c.id}\n'.encode())
          trajectories.append(
            records.Trajectory(
              *(session, claim.item.index, rank, claim.item.task, 'toy'),
              *('answer', 1.0, 0.1, 1),
            )
          )
        time.sleep(rng.uniform(0, 0.02))
        pool.heartbeat([claim.lease])
        pool.report(claim, trajectories)
      time.sleep(0.02)


def completion(session, turn, item):
  return records.Completion(
    id=f'{session}/{turn}',
    session=session,
    turn=turn,
    parent=f'{session}/{turn - 1}' if turn else None,
    fork_reason=None,
    prompt_ids=(item, *(7, 8) * turn),
    response_ids=(7, 8),
    logprobs=(-0.5, -0.25),
    versions=(0, 0),
    finish_reason='stop',
    status='ok',
  )


if __name__ == '__main__':
  main(*sys.argv[1:])
