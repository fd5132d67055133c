"""A loop over stacked layers: scanned or unrolled, with windows, rematerialization and
a choice of paths.

Axes: L layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.kernels import tree_attention
from m2jax.moe import by_expert
from m2jax.sharding import Sharding

Body = Callable[[Any, Any], tuple[Any, Any]]


# By ModelConfig.remat: names of what is saved. The router's assignments are small, and
# slow to sort again.
_SAVED = {
  'layer': (by_expert.NAME,),
  'attention': (by_expert.NAME, tree_attention.NAME),
}


def recomputed(body: Body, cfg: ModelConfig, sharding: Sharding) -> Body:
  """`body` under the `jax.checkpoint` that `cfg.remat` names.

  With 'none' weights are still gathered again.
  """
  if cfg.remat in _SAVED:
    policy = jax.checkpoint_policies.save_only_these_names(*_SAVED[cfg.remat])
    return jax.checkpoint(body, policy=policy)
  if sharding.gathers:
    return jax.checkpoint(body, policy=sharding_lib.save_all_but_gathered)
  return body


def routed(paths: Sequence[Body]) -> Body:
  """The body (x, (layer, route)) → paths[route](x, layer).

  A layer runs one of them: the route, a scalar bool or int32, is data of a branch in
  the program.
  """

  def body(x, layer_and_route):
    layer, route = layer_and_route
    with jax.named_scope('path'):
      return jax.lax.switch(route.astype(jnp.int32), paths, x, layer)

  return body


def over_layers(
  body: Callable[[int | None], Body], x, stacked, cfg: ModelConfig, sharding: Sharding
):
  """x → body(window)(x, layer's slice) for each layer; outputs stacked [L, …].

  With windows of several sizes a scan is over periods (`ModelConfig.windows`). Where
  layers are unrolled, a list in `stacked` has what each layer gets as an element.
  """
  bodies = [recomputed(body(window), cfg, sharding) for window in cfg.windows]

  def several(x, layers):
    outs = []
    is_list = lambda a: isinstance(a, list)
    for layer in range(len(jax.tree.leaves(layers, is_leaf=is_list)[0])):
      one = jax.tree.map(operator.itemgetter(layer), layers, is_leaf=is_list)
      x, out = bodies[layer % len(bodies)](x, one)
      outs.append(out)
    return x, jax.tree.map(lambda *a: jnp.stack(a), *outs)

  if cfg.unroll_layers:
    return several(x, stacked)
  if len(bodies) == 1:
    return jax.lax.scan(bodies[0], x, stacked)
  shape = cfg.num_layers // len(bodies), len(bodies)
  periods = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), stacked)
  x, outs = jax.lax.scan(several, x, periods)
  return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outs)
