"""A job for reruns: records of RL by `runs`, with a fault that its config has.

Its gradient is 40 times as large from step 41 on while the learning rate is above 0.01,
or while `code` is faulty. `mode` is what else may go wrong.
"""

from __future__ import annotations

import json
import pathlib
import runpy
import sys
import time

from tests.evolve import runs

STEPS, FAULT = 60, 41


def records(config) -> list[dict]:
  found = runs.rl('white', 0, STEPS)
  for row in found[FAULT - 1 :]:
    row['grad_norm'] *= 40 if config['rl']['learning_rate'] > 0.01 else 1
  return found


def main():
  flags = dict(a.lstrip('-').partition('=')[::2] for a in sys.argv[1:] if '=' in a)
  config = runpy.run_path(flags['config'])['get_config']().to_dict()
  workdir = pathlib.Path(flags['workdir'])
  steps = [int(p.name) for p in workdir.glob('rl/*')]
  if config['mode'] == 'dies':
    sys.exit('no room on the device')
  with open(workdir / 'metrics.jsonl', 'a') as file:
    if steps:
      file.write(json.dumps(runs.void('rl', max(steps), 1)) + '\n')
    for row in records(config)[max(steps, default=0) :]:
      if config['mode'] == 'thin' and row['step'] % 9 and row['step'] < STEPS:
        continue
      file.write(json.dumps(row) + '\n')
      file.flush()
    while config['mode'] in ('waits', 'hangs'):
      time.sleep(0.05)
      if config['mode'] == 'waits':
        row = row | {'step': row['step'] + 1, 'time_s': row['time_s'] + 5}
        file.write(json.dumps(row) + '\n')
        file.flush()


if __name__ == '__main__':
  main()
