"""What an estimator needs beside its terms, from passes before the gradient pass.

  reference   log-probability of each term under the weights that RL starts from, with
              their own choice of experts; once for each update
  completion, Σ log π/π_old and the number of terms of the sequence that a term belongs
  trajectory  to, under the weights in training; once for each pass over the batch

A shared prefix is computed once (`passes`). A sequence may have terms in rows of
several hosts: each gets the log-ratios of all, and sums in float64. The results are
fields of the batch (`forest.Forest`). An estimator that needs none of this has no
further program, pass or array.

Axes: B rows, M loss terms of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import model
from m2jax.config import ModelConfig
from m2jax.optim import gnmr
from m2jax.rl import passes
from m2jax.rl.packing import Batch
from m2jax.sharding import Sharding
from m2jax.train import step as train_step

# Sequence → the field with its number, for each term.
SEQUENCES = {'completion': 'term_sample', 'trajectory': 'term_trajectory'}
_READ = ('old_logprob', 'weight', *SEQUENCES.values())


class Inputs:
  """Fills the fields of a batch that an estimator needs."""

  def __init__(
    self,
    needed: Collection[str],
    cfg: ModelConfig,
    config: train_step.StepConfig,
    sharding: Sharding,
    state: train_step.TrainState,
  ):
    """Compiles nothing yet.

    Args:
      needed: some of `estimators.INPUTS`; the entropy is the gradient pass's own.
      cfg, config, sharding: as of the train step.
      state: its weights are the reference, of which a copy is kept if it is needed.
    """
    self._sequences = [name for name in SEQUENCES if name in needed]
    self._reference = None
    if 'reference' in needed:
      _, reference = model.without_modules(cfg, state.variables)
      self._reference = jax.tree.map(jnp.copy, reference)
    self._cfg = cfg
    self._passes = passes.Passes(cfg, config, sharding, _READ)

  def of_reference(self, batch: Batch) -> Batch:
    """The batch with `reference_logprob`, if it is needed."""
    if self._reference is None:
      return batch
    rows, plan = batch.rows, batch.plan
    if rows is not None:
      found = self._passes.of_rows(
        self._reference, dataclasses.replace(rows, experts=None)
      )
      logprob = self._passes.own(found['logprob'], rows)
      rows = dataclasses.replace(rows, reference_logprob=logprob)
    if plan is not None:
      tree = dataclasses.replace(plan.tree, experts=None)
      found = self._passes.of_tree(
        self._reference, dataclasses.replace(plan, tree=tree)
      )
      tree = dataclasses.replace(plan.tree, reference_logprob=found['logprob'])
      plan = dataclasses.replace(plan, tree=tree)
    return batch._replace(rows=rows, plan=plan)

  def of_sequences(self, state: train_step.TrainState, batch: Batch) -> Batch:
    """The batch with `completion` and `trajectory`, if they are needed."""
    if not self._sequences:
      return batch
    variables = gnmr.with_route(state.variables, state.opt_state)
    _, variables = model.without_modules(self._cfg, variables)
    rows, plan = batch.rows, batch.plan
    if rows is not None:
      found = self._passes.of_rows(variables, rows)
      fields = {
        name: self._passes.own(values, rows)
        for name, values in self._sums(found).items()
      }
      rows = dataclasses.replace(rows, **fields)
    if plan is not None:
      fields = self._sums(self._passes.of_tree(variables, plan))
      tree = dataclasses.replace(plan.tree, **fields)
      plan = dataclasses.replace(plan, tree=tree)
    return batch._replace(rows=rows, plan=plan)

  def _sums(self, of: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each sequence's sums at each of its terms, [… M, 2]; 0 on padding."""
    live = of['weight'] != 0
    log_ratio = np.where(live, of['logprob'] - of['old_logprob'], 0).ravel()
    out = {}
    for name in self._sequences:
      ids = np.where(live, of[SEQUENCES[name]] + 1, 0)
      sums = np.bincount(ids.ravel(), log_ratio), np.bincount(ids.ravel())
      table = np.stack(sums, axis=-1).astype(of['logprob'].dtype)
      table[0] = 0
      out[name] = table[ids]
    return out
