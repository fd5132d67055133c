"""What publishing weights costs: bytes of a difference by learning rate.

  python -m benchmarks.weight_delta [--embed-dim 256] [--json]

Trains a bfloat16 model for a few steps of AdamW on random tokens at each learning rate,
publishes every version in full and as a difference (`checkpoint.published`), reads it,
and compares every bit. Figures are of the last step at each rate: by then Adam's steps
are about as large as the learning rate for every parameter, as in a run. Weights are at
their initial values: what changes in bfloat16 depends on the step relative to the
weight, not on what was learned. Published anchor: over 99 % of the bytes unchanged in
an RL step (docs/facts/rl-systems.md §4.6).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m2jax import forest
from m2jax.checkpoint import published
from m2jax.config import ModelConfig
from m2jax.train import step as train_step

RATES = (1e-7, 5e-7, 1e-6, 3e-6, 1e-5, 1e-4)


def config(embed_dim: int) -> ModelConfig:
  """M2's proportions, small."""
  return ModelConfig(
    vocab_size=512,
    num_layers=4,
    embed_dim=embed_dim,
    num_heads=embed_dim // 32,
    num_kv_heads=max(1, embed_dim // 128),
    head_dim=32,
    rotary_dim=16,
    num_experts=32,
    experts_per_token=4,
    expert_dim=embed_dim // 2,
    dtype='bfloat16',
    num_mtp_modules=1,
  )


def measure(cfg: ModelConfig, rates: Sequence[float], steps: int) -> list[dict]:
  """The rows of the table."""
  optimizer = optax.inject_hyperparams(optax.adamw)(
    rates[0], b1=0.9, b2=0.95, eps=1e-15, weight_decay=0.1
  )
  step = train_step.make_step(
    cfg, optimizer, train_step.nll, train_step.StepConfig(micro_rows=2)
  )
  rows = []
  for rate in rates:
    state = train_step.new_state(cfg, optimizer, jax.random.key(0))
    state.opt_state.hyperparams['learning_rate'] = jnp.float32(rate)
    rows.append({'learning_rate': rate, **_publish(cfg, step, state, steps)})
  return rows


def _publish(cfg: ModelConfig, step, state, steps: int) -> dict[str, float]:
  """Trains, publishes and reads; figures of the last step."""
  rng = np.random.default_rng(0)
  with tempfile.TemporaryDirectory() as directory:
    reader, like = published.Reader(directory), published.like(cfg)
    with published.Publisher(directory, dtype=cfg.dtype, full_every=10**6) as publisher:
      first = publisher.publish(state.variables, 0)
      reader.load(first.version, like)
      for number in range(1, steps + 1):
        tokens = rng.integers(0, cfg.vocab_size, (4, 64)).astype(np.int32)
        state, _ = step(state, forest.causal(tokens))
        last = publisher.publish(state.variables, number)
        started_s = time.monotonic()
        found = jax.block_until_ready(reader.load(last.version, like))
        read_s = time.monotonic() - started_s
  want = published.cast(state.variables, cfg.dtype)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    if np.asarray(a).tobytes() != np.asarray(b).tobytes():
      raise AssertionError('a published version differs from the weights')
  values, changed, narrow_bytes = last.values[str(jnp.dtype('bfloat16'))]
  return {
    'bf16_changed': changed / values,
    'full_mb': first.raw_bytes / 1e6,
    'whole_mb': first.whole_bytes / 1e6,
    'delta_mb': last.delta_bytes / 1e6,
    'bf16_delta_mb': narrow_bytes / 1e6,
    'ratio': first.raw_bytes / last.delta_bytes,
    'bf16_ratio': 2 * values / narrow_bytes,
    'publish_s': last.seconds,
    'read_s': read_s,
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--embed-dim', type=int, default=256)
  parser.add_argument('--steps', type=int, default=4, help='at each learning rate')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args(argv)
  rows = measure(config(args.embed_dim), RATES, args.steps)
  if args.json:
    print(json.dumps(rows))
    return
  print(
    '| learning rate | bf16 values changed | full | delta | full/delta '
    '| of bf16 alone | publish | read |\n|---|---|---|---|---|---|---|---|'
  )
  for r in rows:
    print(
      f'| {r["learning_rate"]:g} | {r["bf16_changed"]:.2%} | {r["full_mb"]:.1f} MB '
      f'| {r["delta_mb"]:.2f} MB | {r["ratio"]:.1f} | {r["bf16_ratio"]:.1f} '
      f'| {r["publish_s"]:.2f} s | {r["read_s"]:.2f} s |'
    )


if __name__ == '__main__':
  main()
