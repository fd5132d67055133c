"""Where arrays lie on a mesh: logical axes → mesh axes as data, and what follows.

Five mesh axes: `data` replicates the weights, `fsdp` and `context` also store a piece
of them, `expert` holds different experts, `tensor` splits matrices. What each logical
axis is split over stands in one `Rules`. Three kinds of logical axes:

  batch     rows B, tokens S: every device has its own tokens
  compute   vocab V, heads N·H and K·H, experts E, expert_hidden F: every device has its
            own channels; sums over them end in a psum
  storage   model, expert_model (both D): a piece rests on each device, and the whole is
            gathered where it is used (FSDP)

The model runs as one `shard_map` in which each device sees its own shard and every
collective is written down (`Sharding.psum`, `all_gather`, …): the program of 512 chips
can be read. On `ONE_DEVICE` all of them return what they are given.

Axes: B rows, S tokens, D model, N, K heads, H head dim, E experts, F expert hidden,
V vocabulary, L layers.
"""

from __future__ import annotations

from m2jax.sharding.mesh import MeshConfig, abstract_mesh, make_mesh
from m2jax.sharding.rules import (
  ACTIVATIONS,
  DISPATCHES,
  MESH_AXES,
  PRESETS,
  Rules,
)
from m2jax.sharding.shards import (
  ONE_DEVICE,
  Sharding,
  keep_all_but_weights,
  make,
)
from m2jax.sharding.specs import batch_specs, like_params, param_specs

__all__ = [
  'ACTIVATIONS',
  'DISPATCHES',
  'MESH_AXES',
  'ONE_DEVICE',
  'PRESETS',
  'MeshConfig',
  'Rules',
  'Sharding',
  'abstract_mesh',
  'batch_specs',
  'keep_all_but_weights',
  'like_params',
  'make',
  'make_mesh',
  'param_specs',
]
