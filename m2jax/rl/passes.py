"""Forward passes over a packed batch with given weights: rows and chunks, no gradient.

Rows are scored as the train step reads them, in micro-batches; a tree in chunks by
`chunks.scores`; a shared prefix is computed once in both.

Axes: n rows of this host, B of a micro-batch, S tokens, M loss terms of a row, K words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from m2jax import forest, model
from m2jax.config import ModelConfig
from m2jax.sharding import Sharding
from m2jax.train import chunks, feeds
from m2jax.train import hosts as hosts_lib
from m2jax.train import step as train_step

BEST = model.BEST  # of each token, where other scores are of terms
# What gradient passes alone read.
_NOT_READ = dict.fromkeys(forest.TEACHER_TOKENS)


class Passes:
  """The programs of one model; they compile on first use."""

  def __init__(
    self,
    cfg: ModelConfig,
    config: train_step.StepConfig,
    sharding: Sharding,
    read: Sequence[str] = (),
    best: int = 0,
  ):
    """Compiles nothing yet.

    Args:
      cfg: the model; its MTP modules are not computed.
      config, sharding: as of the train step.
      read: per-term fields of the batch that results contain.
      best: K, the most likely words of each token that results contain.
    """
    self._cfg = dataclasses.replace(cfg, num_mtp_modules=0)
    self._read, self._best = read, best
    self._sharding, self.hosts = sharding, hosts_lib.find(sharding)
    self._micro_rows = config.micro_rows
    everywhere = None
    if sharding.mesh is not None:
      everywhere = sharding.named(jax.sharding.PartitionSpec())
    self._score = config.jit(self._score_rows, out_shardings=everywhere)
    self._chunks = chunks.scoring(self._cfg, config, sharding, best)

  def of_rows(self, variables, rows: forest.Forest) -> dict[str, Any]:
    """logprob, value and the fields read, [micro-batches, B, M]; BEST, [… B, S, K].

    The micro-batches of all hosts. The value is that of a model with a value head.
    """
    rows = dataclasses.replace(rows, **_NOT_READ)
    parts = [
      self._score(variables, hosts_lib.place(part, self.hosts, self._sharding))
      for part in feeds.micro_batches(rows, self._micro_rows // self.hosts.count)
    ]
    return jax.tree.map(lambda *values: np.stack(values), *jax.device_get(parts))

  def of_tree(self, variables, plan: forest.Plan) -> dict[str, Any]:
    """logprob, value and the fields read, [1, M]; BEST, [1, N, K]."""
    tree = dataclasses.replace(plan.tree, **_NOT_READ)
    scored = chunks.scores(
      self._chunks, variables, dataclasses.replace(plan, tree=tree)
    )
    at = tree.term_token[0]
    found = {name: x if name in BEST else x[:, at] for name, x in scored.items()}
    return found | {name: getattr(tree, name) for name in self._read}

  def own(self, of_all: np.ndarray, rows: forest.Forest) -> np.ndarray:
    """This host's rows [n, …] of all micro-batches' [micro-batches, B, …]."""
    own = [hosts_lib.own(part, self.hosts, self._sharding) for part in of_all]
    return np.concatenate(own)[: len(rows.tokens)]

  def _score_rows(self, variables, batch: forest.Forest):
    out = model.forward(
      self._cfg, variables, batch, best=self._best, sharding=self._sharding
    )
    found = {
      name: x if name in BEST else train_step.at_terms(x, batch)
      for name, x in out.scores.items()
    }
    return found | {name: getattr(batch, name) for name in self._read}
