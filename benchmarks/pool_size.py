"""Bytes of the data pool's file per completion, with and without shared prompts.

  python -m benchmarks.pool_size
  python -m benchmarks.pool_size --json

Claim: a session's file grows with its new tokens, not with its prompts. Sessions of
several turns, in which each prompt is the previous one with its response and an
observation appended, are written to the pool twice: as they are, and without parents,
so that every prompt is stored in full. Token ids follow Zipf's law; log-probabilities
are incompressible float32 noise. Reports the file size after closing, with the keys and
indices of its tables, divided by the number of completions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile

import numpy as np

from m2jax import records
from m2jax.pool import data_pool


@dataclasses.dataclass(frozen=True)
class Sessions:
  """Sessions of one kind.

  Attributes:
    name: the kind's name.
    first: tokens of the first prompt.
    response: tokens of each response.
    observation: tokens of each observation.
    turns: completions per session.
    count: number of sessions.
  """

  name: str
  first: int
  response: int
  observation: int
  turns: int
  count: int


SESSIONS = (
  Sessions('shell tasks', 150, 30, 40, 4, 800),
  Sessions('coding', 1500, 200, 600, 12, 60),
  Sessions('coding, long', 1500, 200, 600, 48, 12),
)


def completions(kind: Sessions, session: str, rng: np.random.Generator):
  """The completions of one session."""

  def ids(n):
    return np.minimum(rng.zipf(1.3, n), 200_000).astype(np.int32)

  prompt, parent = ids(kind.first), None
  for turn in range(kind.turns):
    response = ids(kind.response)
    noise = -rng.exponential(size=kind.response)
    c = records.Completion(
      id=f'chatcmpl-{rng.bytes(16).hex()}',
      session=session,
      turn=turn,
      parent=parent,
      fork_reason=None,
      prompt_ids=prompt,
      response_ids=response,
      logprobs=noise.astype(np.float32),
      versions=np.full(kind.response, turn, np.int32),
      finish_reason='stop',
      status='ok',
    )
    yield c
    parent, prompt = c.id, np.concatenate([prompt, response, ids(kind.observation)])


def measure(kind: Sessions, whole: bool) -> float:
  """Bytes per completion; `whole` stores every prompt in full."""
  rng = np.random.default_rng(0)
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / 'pool.db'
    with data_pool.DataPool(f'sqlite:///{path}') as pool:
      for item in range(kind.count):
        session = f'rl-{item}-0-{rng.bytes(16).hex()}'
        pool.submit(records.WorkItem(item, 'task', 1))
        for c in completions(kind, session, rng):
          pool.add_completion(dataclasses.replace(c, parent=None) if whole else c)
        end = records.Trajectory(session, item, 0, 'task', 'f', 'answer', 1.0, 1.0, 1)
        pool.add_trajectory(end)
        pool.complete(item)
    return path.stat().st_size / (kind.count * kind.turns)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--json', action='store_true', help='print JSON')
  arguments = parser.parse_args()
  rows = [
    {
      'sessions': kind.name,
      'turns': kind.turns,
      'last_prompt': kind.first + (kind.turns - 1) * (kind.response + kind.observation),
      'whole_bytes': round(measure(kind, True)),
      'once_bytes': round(measure(kind, False)),
    }
    for kind in SESSIONS
  ]
  if arguments.json:
    print(json.dumps(rows, indent=2))
    return
  print('| sessions | turns | last prompt | prompts whole | prompts once |')
  print('|---|---|---|---|---|')
  for row in rows:
    print(
      '| {sessions} | {turns} | {last_prompt:,} | {whole_bytes:,} | '
      '{once_bytes:,} |'.format(**row)
    )


if __name__ == '__main__':
  main()
