"""Training of trees larger than a row or than memory: exact, by push and pop.

The chunks of `forest.cut` run one after the other. The device has a stack with keys,
values and states of one root path, and with the cotangents that finished descendants
have added to them:

  push  forward of a run of the path; its entries are written to the stack
  leaf  forward and backward of tokens below the path: adds their loss terms, expert
        loads and gradient to the sums, and cotangents to the stack
  pop   forward of a run of the path again, and backward from its loss terms and the
        cotangents of its entries, which are then removed

`scores` is a walk of forward passes alone, each token once: push and leaf.

Each computes the function of `model.forward` and `train.step.loss_and_metrics` on the
whole tree, so the sums are the same (law 3). Memory is one chunk plus the stack with
its cotangents, which is as long as the longest path; it does not grow with the number
of leaves. Each kind of chunk is compiled once for each shape (`forest.Buckets`).

On a mesh a chunk is the first row of a batch whose other rows are padding, one row for
each shard: heads, experts and the storage of weights are split as in other steps, but
the row shards beyond the first idle. Tokens are not split.

Axes: B rows, 1 without a mesh; C tokens of a chunk, P slots of the stack that a chunk
sees, M loss terms.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2jax import forest, model
from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.forest import Forest, Plan
from m2jax.layers import prefix_cache
from m2jax.layers.prefix_cache import PrefixCache
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.train import feeds
from m2jax.train import hosts as hosts_lib
from m2jax.train import step as train_step

_SLOTS = 2  # axis of the stack's arrays


class Programs(NamedTuple):
  """The jitted parts; each compiles once for every shape of a chunk.

  Attributes:
    push: (variables, stack, batch, start) → stack, which is donated.
    leaf: (variables, sums, stack, cotangents, batch) → sums, cotangents; both donated.
    pop: (variables, sums, stack, cotangents, batch, start) → as leaf.
    zeros: (variables, batch) → `train.step.Sums` of nothing.
    buffers: slots → an empty stack, and its cotangents.
    place: a chunk's batch of host arrays → the batch on the devices.
  """

  push: Callable[..., Any]
  leaf: Callable[..., Any]
  pop: Callable[..., Any]
  zeros: Callable[..., Any]
  buffers: Callable[..., Any]
  place: Callable[..., Any]


def programs(
  cfg: ModelConfig,
  objective: train_step.Objective,
  config: train_step.StepConfig,
  sharding: Sharding = ONE_DEVICE,
) -> Programs:
  """Makes the parts; they do not use `config.micro_rows`."""
  sharding = rows_only(sharding)
  functions = _Functions(cfg, objective, config, sharding)
  return Programs(
    push=config.jit(functions.push, donate_argnums=1),
    leaf=config.jit(functions.leaf, donate_argnums=(1, 3)),
    pop=config.jit(functions.pop, donate_argnums=(1, 3)),
    zeros=functions.zeros,
    buffers=functions.buffers,
    place=functools.partial(_place, sharding=sharding, hosts=hosts_lib.find(sharding)),
  )


class Scoring(NamedTuple):
  """The jitted parts of `scores`; what they score, [1, C …], is on every host.

  Attributes:
    push: (variables, stack, batch, start) → stack, which is donated, scores.
    leaf: (variables, stack, batch) → scores.
    buffers, place: as in `Programs`.
  """

  push: Callable[..., Any]
  leaf: Callable[..., Any]
  buffers: Callable[..., Any]
  place: Callable[..., Any]


def scoring(
  cfg: ModelConfig,
  config: train_step.StepConfig,
  sharding: Sharding = ONE_DEVICE,
  best: int = 0,
) -> Scoring:
  """Makes the parts, for a model without MTP modules (`model.without_modules`).

  `best`: the number of most likely words that are scores, too.
  """
  sharding = rows_only(sharding)
  functions = _Functions(cfg, train_step.nll, config, sharding, best)
  stack = everywhere = None
  if sharding.mesh is not None:
    stack = sharding.named(prefix_cache.specs(sharding.rules))
    everywhere = sharding.named(jax.sharding.PartitionSpec())
  places: Any = None if stack is None else (stack, everywhere)
  return Scoring(
    config.jit(functions.scored_push, donate_argnums=1, out_shardings=places),
    config.jit(functions.score, out_shardings=everywhere),
    functions.buffers,
    functools.partial(_place, sharding=sharding, hosts=hosts_lib.find(sharding)),
  )


def rows_only(sharding: Sharding) -> Sharding:
  """The sharding with a row of its own for each of the shards of a row's tokens."""
  rules = sharding.rules
  rows = rules.mesh_axes('rows') + rules.mesh_axes('tokens')
  rules = dataclasses.replace(rules, rows=rows or None, tokens=None)
  return dataclasses.replace(sharding, rules=rules)


def _place(batch: Forest, sharding: Sharding, hosts: hosts_lib.Hosts) -> Forest:
  """A row as the first of one row per shard; every host passes the same row."""
  if sharding.mesh is None:
    return batch
  rows = sharding.size('rows') // hosts.count
  mine = slice(0, 1) if hosts.index == 0 else slice(0, 0)
  return hosts_lib.place(forest.select(batch, mine, rows=rows), hosts, sharding)


class _Functions(NamedTuple):
  """What `Programs` compiles; see there for arguments and results."""

  cfg: ModelConfig
  objective: train_step.Objective
  config: train_step.StepConfig
  sharding: Sharding
  best: int = 0

  def push(self, variables, stack, batch, start):
    prefix = _visible(stack, batch)
    out = model.forward(self.cfg, variables, batch, prefix, sharding=self.sharding)
    return jax.tree.map(functools.partial(_write, start), stack, out.new)

  def scored_push(self, variables, stack, batch, start):
    out = self._scored(variables, stack, batch)
    stack = jax.tree.map(functools.partial(_write, start), stack, out.new)
    return stack, self._scores(out)

  def score(self, variables, stack, batch):
    return self._scores(self._scored(variables, stack, batch))

  def _scored(self, variables, stack, batch):
    how = dict(best=self.best, sharding=self.sharding)
    return model.forward(self.cfg, variables, batch, _visible(stack, batch), **how)

  def _scores(self, out):
    return {name: x[:1] for name, x in out.scores.items()}

  def leaf(self, variables, sums, stack, cotangents, batch):
    def none(new):
      return jax.tree.map(jnp.zeros_like, new)

    return self._backward(variables, sums, stack, cotangents, batch, none)

  def pop(self, variables, sums, stack, cotangents, batch, start):
    tokens = batch.tokens.shape[1]
    # Slots past the end of the run hold cotangents of earlier paths.
    live = batch.subtree_end[:, -tokens:] > 0

    def from_descendants(new):
      def read(slots, like):
        entries = _read(start, slots, tokens)
        mask = live.reshape(1, *live.shape, *[1] * (entries.ndim - 3))
        return jnp.where(mask, entries, 0).astype(like.dtype)

      return jax.tree.map(read, cotangents, new)

    sums, cotangents_after = self._backward(
      variables, sums, stack, cotangents, batch, from_descendants
    )

    def clear(slots):
      shape = *slots.shape[:_SLOTS], tokens, *slots.shape[_SLOTS + 1 :]
      return _write(start, slots, jnp.zeros(shape, slots.dtype))

    return sums, jax.tree.map(clear, cotangents_after)

  def zeros(self, variables, batch):
    rows, slots = len(batch.tokens), _slots(batch)

    def sums(variables, batch):
      stack, params = prefix_cache.empty(self.cfg, rows, slots), variables['params']
      return train_step.Sums(params, *self._forward(params, stack, variables, batch)[1])

    like = jax.eval_shape(sums, variables, batch)
    places = None
    if self.sharding.mesh is not None:
      specs = sharding_lib.param_specs(self.cfg, self.sharding.rules)['params']
      everywhere = jax.sharding.PartitionSpec()
      places = self.sharding.named(train_step.Sums(specs, everywhere, everywhere))
    return _zeros(like, places)

  def buffers(self, slots):
    shape = functools.partial(
      prefix_cache.empty, self.cfg, self.sharding.size('rows'), slots
    )
    stack = jax.eval_shape(shape)
    wide = jnp.promote_types(self.cfg.dtype, jnp.float32)
    cotangents = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, wide), stack)
    places = None
    if self.sharding.mesh is not None:
      places = (self.sharding.named(prefix_cache.specs(self.sharding.rules)),) * 2
    return _zeros((stack, cotangents), places)

  def _forward(self, params, prefix, variables, batch):
    """((loss, the tokens' new cache entries), (metrics, expert loads)).

    `params` are used in place of those of the variables.
    """
    variables = {**variables, 'params': params}
    options = train_step.forward_options(self.objective, self.config)
    out = model.forward(
      self.cfg, variables, batch, prefix, sharding=self.sharding, **options
    )
    loss, metrics = train_step.loss_and_metrics(
      out, batch, self.cfg, self.objective, self.config
    )
    return (loss, out.new), (metrics, out.loads)

  def _backward(self, variables, sums, stack, cotangents, batch, new_cotangents):
    """`new_cotangents(entries)` are the cotangents of the chunk's new entries."""
    (loss, new), pull, aux = jax.vjp(
      lambda params, prefix: self._forward(params, prefix, variables, batch),
      variables['params'],
      _visible(stack, batch),
      has_aux=True,
    )
    grads, d_prefix = pull((jnp.ones_like(loss), new_cotangents(new)))
    sums = train_step.add(sums, train_step.Sums(grads, *aux))
    slots = d_prefix.k.shape[_SLOTS]

    def add(total, d):
      return total.at[:, :, :slots].add(d.astype(total.dtype))

    return sums, jax.tree.map(add, cotangents, d_prefix)


def _zeros(like, places):
  """Zeros, each shard made on its device; `places` is a tree prefix of `like`."""
  if places is None:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
  places = jax.tree.broadcast(places, like)
  return jax.tree.map(
    lambda a, place: jnp.zeros(a.shape, a.dtype, device=place), like, places
  )


def _slots(batch: Forest) -> int:
  """P, the slots of the stack that the batch's indices count."""
  return batch.subtree_end.shape[1] - batch.tokens.shape[1]


def _visible(stack: PrefixCache, batch: Forest) -> PrefixCache:
  """The first P slots."""
  return jax.tree.map(lambda a: a[:, :, : _slots(batch)], stack)


def stack_slots(buckets: forest.Buckets) -> int:
  """Slots of the stack: of the longest path and no more, so that a chunk that sees all
  of it is given no copy."""
  return max(buckets.stack_tokens[-1], buckets.chunk_tokens[-1])


def _window(start, slots, tokens: int):
  """A run's slots, moved back into the stack: the first, and by how many.

  A run is padded, and its padding may extend beyond the stack.
  """
  at = jnp.minimum(start, slots.shape[_SLOTS] - tokens)
  return at, start - at


def _read(start, slots, tokens: int):
  """Entries of `tokens` slots from `start`; undefined beyond the stack."""
  at, back = _window(start, slots, tokens)
  found = lax.dynamic_slice_in_dim(slots, at, tokens, _SLOTS)
  return jnp.roll(found, -back, _SLOTS)


def _write(start, slots, entries):
  """The slots with `entries` from `start`; those beyond the stack are dropped."""
  tokens = entries.shape[_SLOTS]
  at, back = _window(start, slots, tokens)
  before = lax.dynamic_slice_in_dim(slots, at, tokens, _SLOTS)
  index = jnp.arange(tokens).reshape(-1, *[1] * (slots.ndim - _SLOTS - 1))
  after = jnp.where(index >= back, jnp.roll(entries, back, _SLOTS), before)
  return lax.dynamic_update_slice_in_dim(slots, after, at, _SLOTS)


def gradients(parts: Programs, variables, plan: Plan):
  """`train.step.Sums` of a tree.

  Args:
    parts: the result of `programs`.
    variables: {'params', 'router'}.
    plan: the result of `forest.cut`, with normalised weights.
  """
  sums = None
  stack = cotangents = None
  for chunk in plan:
    batch = parts.place(chunk.batch)
    if sums is None:
      sums = parts.zeros(variables, batch)
    if chunk.kind == 'push':
      if stack is None:
        stack, cotangents = parts.buffers(stack_slots(plan.buckets))
      stack = parts.push(variables, stack, batch, chunk.start)
    elif chunk.kind == 'pop':
      sums, cotangents = parts.pop(
        variables, sums, stack, cotangents, batch, chunk.start
      )
    elif chunk.shape[2] == 0:  # has no prefix
      sums, _ = parts.leaf(variables, sums, *parts.buffers(0), batch)
    else:
      sums, cotangents = parts.leaf(variables, sums, stack, cotangents, batch)
  return sums


def scores(parts: Scoring, variables, plan: Plan) -> dict[str, np.ndarray]:
  """`model.Outputs.scores` of the tokens of a tree, [1, N …]; 0 at roots.

  Args:
    parts: the result of `scoring`.
    variables: {'params', 'router'} without MTP modules.
    plan: the result of `forest.cut`.
  """
  stack, empty, found = None, parts.buffers(0)[0], []
  for chunk in plan:
    if chunk.kind == 'pop':
      continue
    batch = parts.place(chunk.batch)
    if chunk.kind == 'push':
      if stack is None:
        stack, _ = parts.buffers(stack_slots(plan.buckets))
      stack, scored = parts.push(variables, stack, batch, chunk.start)
    else:
      scored = parts.leaf(variables, stack if chunk.shape[2] else empty, batch)
    found.append((chunk.ids, scored))

  def joined(*values):
    out = np.zeros((1, plan.tokens, *values[0].shape[2:]), values[0].dtype)
    for (ids, _), value in zip(found, values, strict=True):
      out[:, ids] = np.asarray(value)[:, : len(ids)]
    return out

  return jax.tree.map(joined, *(scored for _, scored in found))


def feed(cfg: ModelConfig, objective: train_step.Objective):
  """For `train.step.make_step`: batches with a `plan`, `rows`, or both."""

  def make(of_rows, config, sharding):
    parts = programs(cfg, objective, config, sharding)
    row_sums = feeds.rows(of_rows, config, sharding)

    def sums(variables, batch):
      if batch.plan is not None:
        yield gradients(parts, variables, batch.plan)
      if batch.rows is not None:
        yield from row_sums(variables, batch.rows)

    return sums

  return make
