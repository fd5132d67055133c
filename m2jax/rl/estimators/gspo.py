"""GSPO: PPO's clipped surrogate with the importance ratio of whole sequences.

arXiv:2507.18071 §4, in the form of its GSPO-token, which has the same value and
gradient where Â is that of the sequence:

  J = 1/G Σ_i 1/|y_i| Σ_t min(s_{i,t} Â_{i,t}, clip(s_{i,t}, 1 − ε_low, 1 + ε_high)
      Â_{i,t}),  s_{i,t} = sg(s_i) · π/sg(π),  s_i = exp(1/|y_i| Σ_t log π/π_old).

s_i is a constant of the gradient pass: a forward pass with the same weights gives it,
so that the terms of a sequence may be in different chunks. ε is that of the paper's
experiments (§5.1): s_i is a geometric mean, whose ratios are close to 1. What is a
sequence in a trajectory of several completions is ours: all of them, or each.

Axes: *M loss terms.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from m2jax.axes import Array, Float
from m2jax.checks import require
from m2jax.rl import ppo_clip
from m2jax.rl import terms as terms_lib

SEQUENCES = ('trajectory', 'completion')


@dataclasses.dataclass(frozen=True)
class Config(ppo_clip.Config):
  """GSPO.

  Attributes:
    sequence: 'trajectory' or 'completion', whose ratio a term has.
  """

  normalise: ClassVar[str] = 'group'

  kind: str = 'gspo'
  normaliser: str = 'trajectory'
  clip_low: float = 3e-4
  clip_high: float = 4e-4
  sequence: str = 'trajectory'

  def __post_init__(self):
    require(self, self.sequence in SEQUENCES, 'sequence', f'one of {SEQUENCES}')
    super().__post_init__()

  @property
  def inputs(self) -> frozenset[str]:
    return super().inputs | {self.sequence}

  def loss(self, terms: terms_lib.Terms) -> Float[Array, '*M']:
    return super().loss(self._of_sequences(terms))

  def metrics(self, terms: terms_lib.Terms) -> dict[str, Array]:
    """Ratio and clipping are those of sequences, the rest is that of tokens."""
    found = super().metrics(self._of_sequences(terms))
    by_token = terms_lib.metrics(terms.logprob, terms.old_logprob, terms.weight)
    return found | {name: by_token[name] for name in terms_lib.OF_TOKENS}

  def _of_sequences(self, terms: terms_lib.Terms) -> terms_lib.Terms:
    """Terms whose π/π_old is s: its value, and the gradient of log π alone."""
    log_s = getattr(terms, self.sequence).mean
    return terms._replace(old_logprob=jax.lax.stop_gradient(terms.logprob) - log_s)
