"""Log-probabilities of given tokens under the head, without storing all logits."""

from m2jax.kernels.token_logprobs.api import (
  normaliser,
  token_logprobs,
  top_k_logprobs,
)

__all__ = ['normaliser', 'token_logprobs', 'top_k_logprobs']
