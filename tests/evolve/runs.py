"""Records of runs that never were: healthy noise of several shapes, and faults in it.

Written as the JSON lines that docs/tensorboard.md describes, by no code of m2jax: a
shared helper would hide an error of the reader.
"""

from __future__ import annotations

import json
import math
import random

SHAPES = 'white', 'log_normal', 'heavy_tail', 'correlated', 'seasonal', 'learning'


def noise(shape: str, rng: random.Random, n: int) -> list[float]:
  """n factors around 1."""
  out, state = [], 0.0
  for i in range(n):
    z = rng.gauss(0, 1)
    state = 0.9 * state + math.sqrt(1 - 0.9**2) * z
    chi = sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3
    student = min(8.0, max(-8.0, z / math.sqrt(chi)))
    exponent = {
      'white': 0.1 * z,
      'log_normal': 0.35 * z,
      'heavy_tail': 0.08 * student,
      'correlated': 0.2 * state,
      'seasonal': 0.15 * math.sin(i / 7) + 0.05 * z,
      'learning': -0.3 * (1 - math.exp(-i / 40)) + 0.08 * z,
    }[shape]
    out.append(math.exp(exponent))
  return out


def rl(shape: str, seed: int, n: int) -> list[dict]:
  """Records of healthy RL: 8 groups of 16 an update, every 5 s or so."""
  rng = random.Random(f'{shape}/{seed}')
  of = lambda mean: [mean * x for x in noise(shape, rng, n)]
  series = {
    'entropy': of(0.5),
    'grad_norm': of(0.2),
    'max_violation': of(0.4),
    'tokens_per_s': of(3000.0),
    'rollouts_per_s': of(25.0),
    'engine/tokens_per_s': of(2000.0),
    'abs_log_ratio': of(0.02),
    'mismatch/mean': of(2e-6),
    'mismatch/max': of(1e-5),
    'policy/lag_mean': of(1.5),
    'step_s': of(5.0),
    'approx_kl': of(1e-3),
  }
  out, time_s, taken, forks = [], 1.7e9, 0, 0
  for i in range(n):
    success = min(0.95, max(0.02, 0.3 + 0.4 * i / (i + 60) + rng.gauss(0, 0.06)))
    step_s = series['step_s'][i]
    time_s += step_s + rng.random() * 0.2
    groups = 8 + rng.randrange(8)
    taken += groups
    forks += rng.randrange(12)
    row = {name: values[i] for name, values in series.items()}
    row |= {
      'loss': rng.gauss(0, 0.2),
      'ratio': 1 + rng.gauss(0, 0.01),
      'clip_fraction': abs(rng.gauss(0, 0.002)),
      'success': success,
      'reward': success - 0.1 * rng.random(),
      'groups': groups,
      'groups_zero_advantage': groups - 8,
      'trajectories': 16 * groups,
      'trajectories_masked': int(rng.random() < 0.05),
      'skipped': 0,
      'wait_s': step_s * rng.uniform(0.1, 0.6),
      'pool/completed': rng.randrange(16),
      'pool/taken': taken,
      'pool/failed': i // 50,
      'pool/reissued': 0,
      'gateway/forks': forks,
      'progress': 0.9 * (i + 1) / n,
      'trained/prompt': 0.0,
      'router_bias_rms': 0.1 + 0.001 * (i % 7) + 1e-5 * rng.random(),
      'engine/version': i - i % 2,
      'disk/free_bytes': 5e10 - 1e6 * i,
      'generated_length/64': rng.randrange(20, 60),
      'generated_length/128': rng.randrange(20, 60),
    }
    if i % 8 == 0:
      row['checkpoint/save_s'] = 0.5 + rng.random()
    out.append(record('rl', i + 1, time_s, row))
  return out


def sft(shape: str, seed: int, n: int) -> list[dict]:
  """Records of healthy SFT: a loss that falls, experts that become even."""
  rng = random.Random(f'sft/{shape}/{seed}')
  flat = [noise('white' if shape == 'log_normal' else shape, rng, n) for _ in range(3)]
  out, time_s = [], 1.7e9
  for i in range(n):
    time_s += 1.5 * flat[2][i]
    falling = 0.1 + 5.0 * math.exp(-i / 25)
    row = {
      'loss': falling * (1 + 0.3 * (flat[0][i] - 1)),
      'entropy': falling,
      'grad_norm': (0.3 + 2 * math.exp(-i / 10)) * flat[1][i],
      'max_violation': (0.3 + 2.3 * math.exp(-i / 30)) * flat[1][i],
      'tokens_per_s': 400 * flat[2][i],
      'skipped': 0.0,
      'trained/tool': 0.0,
      'router_bias_rms': 0.01 * i + 1e-5 * rng.random(),
      'progress': 0.9 * (i + 1) / n,
    }
    out.append(record('sft', 5 * (i + 1), time_s, row))
  return out


def record(phase: str, step: int, time_s: float, row: dict, lineage: int = 0) -> dict:
  """One record of metrics.jsonl."""
  head = {'schema': 1, 'lineage': lineage, 'time_s': round(time_s, 3)}
  return head | {'phase': phase, 'step': step} | row


def void(phase: str, after_step: int, lineage: int) -> dict:
  """A marker of metrics.jsonl."""
  head = {'schema': 1, 'lineage': lineage, 'time_s': 1.7e9}
  return head | {'supersedes': {'phase': phase, 'after_step': after_step}}


def write(workdir, records: list[dict]) -> None:
  """metrics.jsonl of the records."""
  lines = [json.dumps(r, separators=(',', ':')) + '\n' for r in records]
  (workdir / 'metrics.jsonl').write_text(''.join(lines))
