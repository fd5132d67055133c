"""Responses with a grammar: which tokens each may sample next, on the host.

Their decode calls take one step, because each token determines the next mask. Other
responses are decoded in separate calls, several steps each.

Axes: p responses, W words of a mask, of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from m2jax.rollout.api import GrammarError
from m2jax.rollout.serving.jobs import Job


def masks(
  jobs: Sequence[Job], vocab_size: int
) -> tuple[np.ndarray, dict[int, GrammarError]]:
  """[p, W] int32, and by index the errors of responses that cannot continue."""
  out = np.zeros((len(jobs), -(-vocab_size // 32)), np.int32)
  errors: dict[int, GrammarError] = {}
  for i, job in enumerate(jobs):
    try:
      job.matcher.allow(out[i])
      if not out[i].any():
        raise GrammarError('grammar: it allows no token')
    except GrammarError as error:
      errors[i] = error
  return out, errors


def advance(job: Job, token: int) -> GrammarError | None:
  """Takes a token that was drawn; the error if the response cannot continue."""
  try:
    job.matcher.advance([int(token)])
  except GrammarError as error:
    return error
  return None


def split(jobs: Mapping[int, Job], slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The slots of responses without a grammar, and of those with one."""
  masked = np.array([jobs[slot].matcher is not None for slot in slots.tolist()], bool)
  return slots[~masked], slots[masked]
