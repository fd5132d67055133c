r"""Ablations of M2's choices, at a size for two CPU cores.

COMMAND: python -m experiments.pretrain --config=configs/ablations.py:hybrid \
           --workdir=workdir/hybrid
HARDWARE: two CPU cores. TIME: `pretrain.loop.seconds`, and the compilations.
RESULT: prints the held-out loss. All variants side by side, on text and on retrieval:
  `python -m benchmarks.ablations`.

Variants, each one change away from `m2`:
  m2               full attention; fine-grained experts; sigmoid scores with a bias
  hybrid           3 of 4 layers see a window and the sink tokens only
  coarse           half as many experts, each twice as wide, half as many active:
                   parameters, active ones too, are equal but for the routers
  softmax          softmax scores, with the bias
  no_bias          sigmoid scores, no bias and nothing else that balances
  softmax_no_bias  softmax scores, no bias and nothing else that balances

The report compares full attention with a hybrid and fine with coarse experts (32 and
128, a factor of 4), and keeps a much reduced balance loss beside its bias, of unknown
size (facts/m2-and-forge.md §1.5, §7). Windows, sinks and sizes here are ours. The same
choices at the report's ablation size: configs/pretrain_ablation.py.
"""

import dataclasses
from typing import Any

import ml_collections

from configs import pretrain
from m2jax import config as model_config

# Changes to the model; NO_BIAS ones also stop the bias's updates.
VARIANTS: dict[str, dict[str, Any]] = {
  'm2': {},
  'hybrid': dict(window=16, full_attention_every=4, sinks=4),
  'coarse': dict(num_experts=8, experts_per_token=2, expert_dim=48),
  'softmax': dict(router_scores='softmax'),
  'no_bias': {},
  'softmax_no_bias': dict(router_scores='softmax'),
}
NO_BIAS = ('no_bias', 'softmax_no_bias')


def model(variant: str, vocab_size: int) -> model_config.ModelConfig:
  """A variant's shape: tiny, narrower, with 16 experts of which 4 are active."""
  base = dict(vocab_size=vocab_size, embed_dim=64, head_dim=24, rotary_dim=12)
  base.update(num_experts=16, experts_per_token=4, expert_dim=24, num_mtp_modules=0)
  return dataclasses.replace(model_config.tiny(), **{**base, **VARIANTS[variant]})


def bias_update_rate(variant: str) -> float:
  """Rate of the router bias in the train step."""
  return 0.0 if variant in NO_BIAS else 1e-3


def get_config(variant: str = 'm2') -> ml_collections.ConfigDict:
  if variant not in VARIANTS:
    raise ValueError(f'unknown variant {variant!r}: want one of {tuple(VARIANTS)}')
  c = pretrain.get_config('tiny')
  c.model = dataclasses.asdict(model(variant, c.model.vocab_size))
  c.pretrain.step.bias_update_rate = bias_update_rate(variant)
  return c
