"""The expert ids that a sequence's tokens were computed with, for routing replay."""

from __future__ import annotations

import numpy as np

from m2jax.rollout.engine.decode_state import DecodeState
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.sequences import Sequences


def of(
  engine: Engine, state: DecodeState, table: Sequences, job: Job, tokens: int
) -> np.ndarray | None:
  """`GenerateResult.experts` of a request's first tokens; None if not recorded."""
  if not engine.config.record_experts:
    return None
  cfg = engine.cfg
  ids = np.full((tokens, cfg.num_layers, cfg.experts_per_token), -1, np.int16)
  held = int(table.held[job.slot]) if job.slot >= 0 else 0
  if held := min(held, tokens):
    slot = np.array([job.slot])
    pages = table.page_tables(slot, held)[0]
    found = engine.expert_ids(state, np.int32(table.group(job.slot)), pages)
    ids[:held] = np.asarray(found)[:held]
  if job.experts is not None:  # of the K/V that the tokens were drawn with
    ids[: len(job.experts)] = job.experts
  return ids
