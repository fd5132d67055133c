"""Whether the next decode call can be made before the last one's tokens are read.

Reading a call's tokens, and making the next call, take the host's time, in which the
device would wait. While the same sequences decode, only their page tables change from
call to call, and those hold for the tokens of two calls if the pages are taken in
advance. A sequence that ends in a call draws nothing in the next one. Whatever else is
to be done, such as placing a request, first waits for the call that was made ahead.

Axes: p sequences of a call.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from m2jax.rollout.serving.decode_calls import Call
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.sequences import Sequences, State


def goes_on(call: Call, table: Sequences, jobs: Mapping[int, Job], ahead: int) -> bool:
  """Whether `call`, not yet read, may be made once more; takes the pages for it.

  It must be the only one of all sequences in slots. None of them may be sure to end in
  it: another request would have to wait for its place.

  Args:
    ahead: positions that a call can need after those of a sequence.
  """
  slots = call.slots
  all_ = np.array_equal(np.sort(slots), np.flatnonzero(table.state != State.IDLE))
  if call.masked or not all_:  # some may have ended in the call before
    return False
  held = table.held[slots]
  left = [
    _left(jobs[slot], int(n)) for slot, n in zip(slots.tolist(), held, strict=True)
  ]
  need = held + 2 * ahead
  most = min(call.shape.pages * table.page_tokens, table.tokens.shape[1])
  if min(left) <= call.shape.steps or need.max() > most:
    return False
  return all(
    table.reserve(slot, int(n)) for slot, n in zip(slots.tolist(), need, strict=True)
  )


def _left(job: Job, held: int) -> int:
  """Tokens that a request may yet draw, with `held` positions stored."""
  return job.request.sampling.max_tokens - (held + 1 - len(job.prompt))
