"""Training of trees larger than a row or than memory: exact, by push and pop.

The chunks of `forest.cut` run one after the other. Keys, values and states of one root
path lie on a stack on the device, and beside them the cotangents that finished
descendants have left there:

  push  forward of a run of the path; its entries go onto the stack
  leaf  forward and backward of what hangs off the path; its loss terms and expert loads
        count, its gradient is added, its cotangents go to the stack
  pop   forward once more of a run of the path and backward from its own loss terms and
        from the cotangents of its entries; the entries are dropped

Every function is that of `model.forward` and `train.step.loss_and_metrics` on the whole
tree, so the sums are the same (law 3). Memory is the stack with its cotangents, as long
as the longest path may be, and one chunk; the number of leaves is not in it. Each kind
of chunk is compiled once a shape (`forest.Buckets`).

Axes: B = 1 row, C tokens of a chunk, P slots of the stack a chunk sees, M loss terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m2jax import model
from m2jax.config import ModelConfig
from m2jax.forest import Forest, Plan
from m2jax.train import feeds
from m2jax.train import step as train_step

_SLOTS = 2  # axis of the stack's arrays


class Programs(NamedTuple):
  """The jitted parts; each compiles once for every shape of a chunk.

  Attributes:
    push: (variables, stack, batch, start) → stack, which is donated.
    leaf: (variables, sums, stack, cotangents, batch) → sums, cotangents; both donated.
    pop: (variables, sums, stack, cotangents, batch, start) → as leaf.
    zeros: (variables, batch) → `train.step.Sums` of nothing.
    cfg: the model's.
  """

  push: Callable[..., Any]
  leaf: Callable[..., Any]
  pop: Callable[..., Any]
  zeros: Callable[..., Any]
  cfg: ModelConfig


def programs(
  cfg: ModelConfig, objective: train_step.Objective, config: train_step.StepConfig
) -> Programs:
  """Makes the parts; `config.micro_rows` has no meaning to them. One device."""

  def forward(params, above, router, batch):
    variables = {'params': params, 'router': router}
    out, own = model.forward_below(
      cfg, variables, batch, above, detach_mtp=config.detach_mtp
    )
    loss, metrics = train_step.loss_and_metrics(out, batch, cfg, objective, config)
    return (loss, own), (metrics, out.loads)

  def push(variables, stack, batch, start):
    own = model.forward_below(cfg, variables, batch, _seen(stack, batch))[1]
    return jax.tree.map(
      lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, _SLOTS), stack, own
    )

  def backward(variables, sums, stack, cotangents, batch, own_cotangents):
    """`own_cotangents(like)` are those of the chunk's own entries."""
    params, router = variables['params'], variables['router']
    (loss, own), pull, aux = jax.vjp(
      lambda params, above: forward(params, above, router, batch),
      params,
      _seen(stack, batch),
      has_aux=True,
    )
    grads, seen = pull((jnp.ones_like(loss), own_cotangents(own)))
    sums = jax.tree.map(jnp.add, sums, train_step.Sums(grads, *aux))
    slots = seen.k.shape[_SLOTS]
    cotangents = jax.tree.map(
      lambda a, b: a.at[:, :, :slots].add(b.astype(a.dtype)), cotangents, seen
    )
    return sums, cotangents

  def leaf(variables, sums, stack, cotangents, batch):
    def none(own):
      return jax.tree.map(jnp.zeros_like, own)

    return backward(variables, sums, stack, cotangents, batch, none)

  def pop(variables, sums, stack, cotangents, batch, start):
    tokens = batch.tokens.shape[1]
    # slots past the run are of paths that are done
    live = batch.subtree_end[:, -tokens:] > 0

    def left(own):
      def one(a, like):
        a = lax.dynamic_slice_in_dim(a, start, tokens, _SLOTS)
        seen = live.reshape(1, 1, tokens, *[1] * (a.ndim - 3))
        return jnp.where(seen, a, 0).astype(like.dtype)

      return jax.tree.map(one, cotangents, own)

    sums, after = backward(variables, sums, stack, cotangents, batch, left)

    def clear(a):
      zeros = jnp.zeros((*a.shape[:_SLOTS], tokens, *a.shape[_SLOTS + 1 :]), a.dtype)
      return lax.dynamic_update_slice_in_dim(a, zeros, start, _SLOTS)

    return sums, jax.tree.map(clear, after)

  def zeros(variables, batch):
    slots = batch.subtree_end.shape[1] - batch.tokens.shape[1]

    def sums(params, router, batch):
      stack = model.empty_prefix(cfg, 1, slots)
      return train_step.Sums(params, *forward(params, stack, router, batch)[1])

    like = jax.eval_shape(sums, variables['params'], variables['router'], batch)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

  return Programs(
    push=config.jit(push, donate_argnums=1),
    leaf=config.jit(leaf, donate_argnums=(1, 3)),
    pop=config.jit(pop, donate_argnums=(1, 3)),
    zeros=zeros,
    cfg=cfg,
  )


def _seen(stack: model.PrefixCache, batch: Forest) -> model.PrefixCache:
  """The first P slots, which the batch's indices count."""
  slots = batch.subtree_end.shape[1] - batch.tokens.shape[1]
  return jax.tree.map(lambda a: a[:, :, :slots], stack)


def gradients(parts: Programs, variables, plan: Plan):
  """`train.step.Sums` of a tree.

  Args:
    parts: from `programs`.
    variables: {'params', 'router'}.
    plan: from `forest.cut`; its weights are normalised already.
  """
  cfg = parts.cfg
  wide = jnp.promote_types(cfg.dtype, jnp.float32)

  def buffers(slots):
    stack = model.empty_prefix(cfg, 1, slots)
    return stack, jax.tree.map(lambda a: jnp.zeros(a.shape, wide), stack)

  sums = None
  stack = cotangents = None
  for chunk in plan:
    batch = chunk.batch
    if sums is None:
      sums = parts.zeros(variables, batch)
    if chunk.kind == 'push':
      if stack is None:
        # a run is written with its padding, so the last needs room for it
        most = plan.buckets.stack_tokens[-1] + plan.buckets.chunk_tokens[-1]
        stack, cotangents = buffers(most)
      stack = parts.push(variables, stack, batch, chunk.start)
    elif chunk.kind == 'pop':
      sums, cotangents = parts.pop(
        variables, sums, stack, cotangents, batch, chunk.start
      )
    elif chunk.shape[2] == 0:  # sees no path: as any row
      sums, _ = parts.leaf(variables, sums, *buffers(0), batch)
    else:
      sums, cotangents = parts.leaf(variables, sums, stack, cotangents, batch)
  return sums


def feed(parts: Programs):
  """For `train.step.make_step`: batches with a `plan`, `rows`, or both."""

  def make(of_rows, config, sharding):
    row_sums = feeds.rows(of_rows, config, sharding)

    def sums(variables, batch):
      if batch.plan is not None:
        yield gradients(parts, variables, batch.plan)
      if batch.rows is not None:
        yield from row_sums(variables, batch.rows)

    return sums

  return make
