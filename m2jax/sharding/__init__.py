"""Sharding: rules from logical to mesh axes, as data; placement and collectives.

Five mesh axes: `data` replicates the weights, `fsdp` and `context` also store a shard
of them, `expert` splits the experts, `tensor` splits matrices. One `Rules` maps
each logical axis to mesh axes. There are four kinds of logical axes:

  batch     rows B, tokens S: every device has its own tokens
  residual  T, the tokens of a device flattened: between attention and experts each
            device of the group that shares them has a part (sequence parallelism,
            arXiv:2205.05198): residual stream, norms, router, and what is saved for the
            backward pass. All of them are gathered before a matmul whose channels are
            split, and its sum is scattered after: the traffic of an all-reduce
  compute   vocab V, heads N·H and K·H, experts E, expert_hidden F: every device has its
            own channels; sums over them end in a psum or, into the residual stream, a
            reduce-scatter
  storage   model, expert_model (both D): each device stores a shard, and the whole is
            gathered where it is used (FSDP)

The model runs as one `shard_map`, in which each device sees its own shard and every
collective is explicit (`Sharding.psum`, `all_gather`, …), so that the program of 512
chips can be read. On `ONE_DEVICE` each returns its argument.

Axes: B rows, S tokens, D model, N, K heads, H head dim, E experts, F expert hidden,
V vocabulary, L layers.
"""

from __future__ import annotations

from m2jax.sharding.distributed import join
from m2jax.sharding.local import local_copy
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
  make,
  rules_of,
  save_all_but_gathered,
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
  'join',
  'like_params',
  'local_copy',
  'make',
  'make_mesh',
  'param_specs',
  'rules_of',
  'save_all_but_gathered',
]
