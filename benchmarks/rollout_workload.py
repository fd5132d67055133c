"""What both sides of `benchmarks.rollout` serve: a model's shape, batches and sessions.

No library beyond numpy: torch's side imports it, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

VOCABULARY = 512
# An M2 with 13.5M parameters.
MODEL = dict(
  vocab_size=VOCABULARY,
  num_layers=4,
  embed_dim=256,
  num_heads=8,
  num_kv_heads=2,
  head_dim=32,
  num_experts=32,
  experts_per_token=4,
  expert_dim=128,
)
CONTEXT = 2048


@dataclasses.dataclass(frozen=True)
class Sessions:
  """Agents that talk to the engine, each turn with all of their past.

  Attributes:
    count: sessions in flight from the start; each has `turns` turns.
    system_tokens: tokens of the prompt that all sessions share; task_tokens are a
      session's own.
    turn_tokens: tokens that each tool result adds.
    new_tokens: tokens of each response.
  """

  count: int = 16
  turns: int = 30
  system_tokens: int = 64
  task_tokens: int = 32
  turn_tokens: int = 24
  new_tokens: int = 32


def batch(requests: int, prompt_tokens: int, seed: int) -> list[list[int]]:
  """Random prompts."""
  random = np.random.default_rng(seed)
  return random.integers(1, VOCABULARY, (requests, prompt_tokens)).tolist()


def summed(batches: list[dict]) -> dict:
  """Combines the answers to several batches: all tokens, other fields of the first."""
  return batches[0] | {'tokens': sum(batch['tokens'] for batch in batches)}


def play(
  sessions: Sessions, seed: int, serve: Callable[[Callable], None]
) -> dict[str, int]:
  """Runs the sessions against an engine; returns tokens of prompts and of responses.

  Args:
    serve: called once with `step(session, response | None) → prompt | None`: the next
      prompt of a session, given the response to its last one; None if it has ended. It
      starts every session with None and returns when all have ended.
  """
  random = np.random.default_rng(seed)
  system = random.integers(1, VOCABULARY, sessions.system_tokens).tolist()
  tasks = random.integers(1, VOCABULARY, (sessions.count, sessions.task_tokens))
  tools = random.integers(
    1, VOCABULARY, (sessions.count, sessions.turns, sessions.turn_tokens)
  )
  past = [[*system, *task] for task in tasks.tolist()]
  turn = [0] * sessions.count
  counts = dict(prompt_tokens=0, new_tokens=0)

  def step(session: int, response: list[int] | None) -> list[int] | None:
    if response is not None:
      counts['new_tokens'] += len(response)
      past[session] += [*response, *tools[session, turn[session]].tolist()]
      turn[session] += 1
    if turn[session] == sessions.turns:
      return None
    counts['prompt_tokens'] += len(past[session])
    return list(past[session])

  serve(step)
  return counts
