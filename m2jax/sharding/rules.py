"""The mesh axes that split each logical axis: rules as data.

Axes: see `m2jax.sharding`.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec as P

from m2jax import params
from m2jax.checks import require

Axes = str | tuple[str, ...] | None

MESH_AXES = ('data', 'fsdp', 'context', 'expert', 'tensor')
DISPATCHES = ('gather', 'ragged', 'padded')
GRADIENT_DTYPES = (None, 'bfloat16', 'float32')

BATCH = ('rows', 'tokens')
STORED = ('model', 'expert_model')
COMPUTE = ('vocab', 'heads', 'experts', 'expert_hidden')

# Activations, whose axes must not share a mesh axis.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
  'residual stream': ('rows', 'tokens', 'residual'),
  'activations of the heads': ('rows', 'tokens', 'heads'),
  'logits': ('rows', 'tokens', 'vocab'),
  'hidden activations of the experts': ('rows', 'tokens', 'expert_hidden'),
}


@dataclasses.dataclass(frozen=True)
class Rules:
  """Logical axis → mesh axes; None is not split. `m2jax.sharding` describes the axes.

  Attributes:
    rows, tokens: the batch's axes.
    residual: a device's tokens between attention and experts, where activations have
      all channels; None repeats them, for steps of too few tokens to split.
    vocab, heads, experts, expert_hidden: computed in parallel. `heads` splits query
      and key/value heads.
    model, expert_model: D of dense and of expert matrices, in storage only.
    dispatch: how tokens are sent to experts on other devices, one of `moe.dispatch`'s
      implementations; None resolves by the target platform.
    exchange_factor: rows that a device can receive in a round of `moe.exchange`, in
      multiples of those that it sends: 1.25 makes one round of an imbalance of 25 %.
    gradient_dtype: in which devices exchange and sum the gradients of weights that are
      split in storage; None is the weights' own. 'bfloat16' halves the bytes of these
      reduce-scatters, but each sum is rounded.

  Raises:
    ValueError: an unknown mesh axis, or one mesh axis twice in one array (names the
      array and the axes).
  """

  rows: Axes = None
  tokens: Axes = None
  residual: Axes = None
  vocab: Axes = None
  heads: Axes = None
  experts: Axes = None
  expert_hidden: Axes = None
  model: Axes = None
  expert_model: Axes = None
  dispatch: str | None = None
  exchange_factor: float = 1.25
  gradient_dtype: str | None = None

  def __post_init__(self):
    for name in (*BATCH, 'residual', *COMPUTE, *STORED):
      unknown = set(self.mesh_axes(name)) - set(MESH_AXES)
      if unknown:
        raise ValueError(
          f'Rules.{name}={getattr(self, name)!r}: no mesh axis {sorted(unknown)}; '
          f'there are {MESH_AXES}'
        )
    known = self.dispatch in (None, *DISPATCHES)
    require(self, known, 'dispatch', f'None or one of {DISPATCHES}')
    require(self, self.exchange_factor > 0, 'exchange_factor', 'positive')
    known = self.gradient_dtype in GRADIENT_DTYPES
    require(self, known, 'gradient_dtype', f'one of {GRADIENT_DTYPES}')
    parameters = {name: param.split for name, param in params.BY_NAME.items()}
    for array, logical in (*parameters.items(), *ACTIVATIONS.items()):
      self.spec(array, *logical)

  def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
    """Mesh axes of a logical axis, outermost first."""
    axes = None if logical is None else getattr(self, logical)
    if axes is None:
      return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)

  def spec(self, array: str, *logical: str | None) -> P:
    """PartitionSpec of an array with these logical axes; `array` is for the error."""
    used: dict[str, str] = {}
    for name in logical:
      for axis in self.mesh_axes(name):
        if axis in used:
          raise ValueError(
            f'sharding rules: {array} [{", ".join(str(n) for n in logical)}] would be '
            f'split twice over mesh axis {axis!r}, by {used[axis]!r} and by {name!r}'
          )
        used[axis] = name
    entries = [self.mesh_axes(name) for name in logical]
    return P(*(None if not e else e[0] if len(e) == 1 else e for e in entries))


_TENSOR = dict(vocab='tensor', heads='tensor', expert_hidden='tensor')

PRESETS: dict[str, Rules] = {
  # One device, or the same work on each.
  'cpu': Rules(),
  # Rows are split, weights replicated.
  'data': Rules(rows='data'),
  # Weights are sharded in storage; no expert axis.
  'fsdp': Rules(
    rows=('data', 'fsdp'),
    tokens='context',
    model=('fsdp', 'context'),
    expert_model=('fsdp', 'context'),
    residual='tensor',
    **_TENSOR,
  ),
  # The same with expert parallelism: tokens are sent, and less of the expert weights is
  # gathered. Dense weights are replicated over `expert`: they are few, and finer shards
  # of D would be narrower than a TPU's tiles.
  'fsdp_ep': Rules(
    rows=('data', 'fsdp', 'expert'),
    tokens='context',
    experts='expert',
    model=('fsdp', 'context'),
    expert_model=('fsdp', 'context'),
    residual='tensor',
    **_TENSOR,
  ),
  # No weights are gathered, for steps of few tokens.
  'serve': Rules(rows=('data', 'expert'), experts='expert', **_TENSOR),
}
