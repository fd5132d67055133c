"""The model's shape: one frozen dataclass and its presets.

Values of `m2()` are the released config.json's (facts/m2-and-forge.md §1.1);
`tiny()` trains on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import functools

from m2jax.checks import require

REMAT = ('none', 'layer', 'attention')
NUMERICS = ('ordinary', 'invariant')
MATMULS = ('plain', 'block_fp8', 'activations_int8', 'activations_int4')


@dataclasses.dataclass(frozen=True)
class Matmuls:
  """Precision of the matmuls by q, k, v, o and the experts' matrices.

  Embedding, head, router, norms and attention scores do not depend on it.

  Attributes:
    kind: operands of the matmuls, forward and backward (docs/low_precision.md).
      'plain': in the activations' dtype.
      'block_fp8': e4m3 with a scale for each 1x128 tile of activations and each 128x128
        block of weights, in all three matmuls; sums in fp32.
      'activations_int8', 'activations_int4': plain, but the activations saved for the
        weights' gradient are rounded to integers with a scale for each token.
    power_of_two: scales are rounded up to powers of two. In bfloat16 the emulation is
      then exact with bfloat16 operands: full speed on a TPU without FP8.
    clip: largest magnitude that is represented, in units of its tile's largest.
      Below 1 is a fault: large values saturate. Not for 'plain'.
  """

  kind: str = 'plain'
  power_of_two: bool = False
  clip: float = 1.0

  def __post_init__(self):
    require(self, self.kind in MATMULS, 'kind', f'one of {MATMULS}')
    require(self, 0 < self.clip <= 1, 'clip', 'above 0 and at most 1')
    if self.kind == 'plain':
      for name in ('power_of_two', 'clip'):
        default = getattr(type(self), name)
        ok = getattr(self, name) == default
        require(self, ok, name, f"{default} with kind='plain'")


PLAIN = Matmuls()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape and precision of an M2 decoder. All sizes in elements unless named.

  Attributes:
    vocab_size: V.
    num_layers: L, decoder blocks; each is attention + mixture of experts.
    embed_dim: D.
    num_heads, num_kv_heads, head_dim: N, K, H; N must be a multiple of K.
    rotary_dim: leading dims of each head that rotate; even, at most H.
    rope_theta: RoPE base.
    num_experts, experts_per_token, expert_dim: E, top-k, F.
    rms_norm_eps: added to the mean square in every RMSNorm.
    max_positions: longest path from a root, in tokens.
    num_mtp_modules: multi-token-prediction modules; 0 is none.
    value_head: a critic's head beside that of words (`rl.critic`, which sets it).
    window: positions that a layer with a sliding window sees, its own included; None:
      all layers have full attention. MTP modules always have.
    full_attention_every: with a window, every n-th layer has full attention.
    sinks: first positions of a path, seen by every layer.
    router_scores: 'sigmoid', or 'softmax' over all experts.
    dtype: activations ('float32', 'bfloat16' or 'float64'); parameters stay fp32.
    param_dtype: 'float32'; 'bfloat16' for serving; 'float64' in tests of exactness.
      Router biases are at least fp32.
    unroll_layers: unroll the loop over layers; faster at tiny sizes on CPU.
    matmuls: precision of the matmuls of attention and experts.
    recovery: precision of layers which are promoted (`optim.gnmr`).
    numerics: 'invariant': log-probabilities, hidden states and chosen experts of a
      token do not depend on what is computed beside it, to the bit; engine and learner
      give the same (docs/rollout.md). MTP modules only draft: they stay ordinary.
      'ordinary': to rounding.
    remat: what a block saves for the backward pass, which recomputes the rest. Bytes
      are of a token and layer in bfloat16, and of M2 on one device; tensor parallelism
      divides them.
        'none': all activations.
        'layer': the block's input, 2·D, and the order of the router's assignments,
          about 12·k: 6.2 kB. The backward pass runs the forward pass again.
        'attention': also attention's output and its logsumexp, 2·N·H + 4·N: 18.7 kB.
          No attention kernel runs again: 7 matmuls over the query-key pairs, not 9.
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rotary_dim: int
  num_experts: int
  experts_per_token: int
  expert_dim: int
  rope_theta: float = 5e6
  rms_norm_eps: float = 1e-6
  max_positions: int = 196_608
  num_mtp_modules: int = 1
  value_head: bool = False
  window: int | None = None
  full_attention_every: int = 1
  sinks: int = 0
  router_scores: str = 'sigmoid'
  dtype: str = 'bfloat16'
  param_dtype: str = 'float32'
  unroll_layers: bool = False
  remat: str = 'none'
  matmuls: Matmuls = PLAIN
  recovery: Matmuls = PLAIN
  numerics: str = 'ordinary'

  def __post_init__(self):
    check = functools.partial(require, self)
    for field in dataclasses.fields(self):
      if field.type == 'int' and field.name not in ('num_mtp_modules', 'sinks'):
        check(getattr(self, field.name) > 0, field.name, 'positive')
    check(self.num_mtp_modules >= 0, 'num_mtp_modules', 'at least 0')
    check(
      self.num_heads % self.num_kv_heads == 0,
      'num_heads',
      f'a multiple of num_kv_heads={self.num_kv_heads}',
    )
    check(
      self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim,
      'rotary_dim',
      f'even and at most head_dim={self.head_dim}',
    )
    check(
      self.experts_per_token <= self.num_experts,
      'experts_per_token',
      f'at most num_experts={self.num_experts}',
    )
    every = self.full_attention_every
    if self.window is None:
      check(self.sinks == 0, 'sinks', '0 without a window')
      check(every == 1, 'full_attention_every', '1 without a window')
    else:
      check(self.window > 0, 'window', 'positive, or None')
      check(self.sinks >= 0, 'sinks', 'at least 0')
      check(
        every > 1 and self.num_layers % every == 0,
        'full_attention_every',
        f'above 1 and a divisor of num_layers={self.num_layers} with a window',
      )
    scores = ('sigmoid', 'softmax')
    check(self.router_scores in scores, 'router_scores', f'one of {scores}')
    check(self.remat in REMAT, 'remat', f'one of {REMAT}')
    for name in ('matmuls', 'recovery'):
      if isinstance(value := getattr(self, name), dict):  # a checkpoint's or config's
        object.__setattr__(self, name, Matmuls(**value))
    check(self.numerics in NUMERICS, 'numerics', f'one of {NUMERICS}')
    if self.invariant:
      for name, want in (('window', None), ('matmuls', PLAIN), ('recovery', PLAIN)):
        ok = getattr(self, name) == want
        check(ok, name, f"{want} with numerics='invariant'")
    dtypes = ('float32', 'bfloat16', 'float64')
    check(self.dtype in dtypes, 'dtype', f'one of {dtypes}')
    check(self.param_dtype in dtypes, 'param_dtype', f'one of {dtypes}')

  @property
  def invariant(self) -> bool:
    return self.numerics == 'invariant'

  @property
  def ordinary(self) -> ModelConfig:
    return dataclasses.replace(self, numerics='ordinary')

  @property
  def windows(self) -> tuple[int | None, ...]:
    """The window of each layer of one period; periods repeat over the layers."""
    return (self.window,) * (self.full_attention_every - 1) + (None,)

  @property
  def paths(self) -> tuple[Matmuls, ...]:
    """What a layer's route indexes; without a route it is the first."""
    return self.matmuls, self.recovery


def m2() -> ModelConfig:
  """The released model: 228.7B parameters in its 62 layers, 9.8B active."""
  return ModelConfig(
    vocab_size=200_064,
    num_layers=62,
    embed_dim=3072,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    rotary_dim=64,
    num_experts=256,
    experts_per_token=8,
    expert_dim=1536,
    remat='layer',
  )


def ablation(fine_grained: bool = True) -> ModelConfig:
  """The shape of the report's MoE ablation: 17.8B parameters, 2.0B active.

  Published (facts/m2-and-forge.md §1.5): both counts, and 128 experts of which 8 are
  active, or with `fine_grained=False` 32 of which 2 are. The rest is ours: M2's
  vocabulary, head and proportions (query width 2·D, 6 query heads to a key head), and
  the D, L and F with which the counts come out, active ones without embedding and head
  as in M2's 9.8B. A coarse expert is as wide as four fine ones. No MTP: that is a row
  of its own in the ablation (`dataclasses.replace(…, num_mtp_modules=1)`).
  """
  num_experts, experts_per_token, expert_dim = (128, 8, 448)
  if not fine_grained:
    num_experts, experts_per_token, expert_dim = (32, 2, 4 * 448)
  return ModelConfig(
    vocab_size=200_064,
    num_layers=40,
    embed_dim=2304,
    num_heads=36,
    num_kv_heads=6,
    head_dim=128,
    rotary_dim=64,
    num_experts=num_experts,
    experts_per_token=experts_per_token,
    expert_dim=expert_dim,
    num_mtp_modules=0,
    remat='layer',
  )


def tiny() -> ModelConfig:
  """0.9M parameters: learns shell tasks on two CPU cores in minutes."""
  return ModelConfig(
    vocab_size=768,
    num_layers=4,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rotary_dim=16,
    num_experts=8,
    experts_per_token=2,
    expert_dim=48,
    rope_theta=100.0,
    max_positions=1024,
    dtype='float32',
    unroll_layers=True,
  )
