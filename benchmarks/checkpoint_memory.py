"""Host memory for loading and saving a Hugging Face checkpoint, beyond the model's.

  python -m benchmarks.checkpoint_memory --directory=/tmp/checkpoint_memory
  python -m benchmarks.checkpoint_memory --gigabytes=0.3 --devices=8 --json

Claim: at most twice the largest tensor plus 1 GB. A synthetic bf16 checkpoint with M2's
vocabulary is written in many shards, loaded, and saved again, each in a separate
process on CPU devices, where the model itself is in host memory. `before` is the
process's resident memory when it starts to load (without the model) or to save (with
the model), `peak` is the kernel's high-water mark since then, and `beyond` is `peak`
without `before` and the model. Files are read and written through descriptors, never
mapped, and the page cache is not counted. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness

GB = 10**9
SHARD_BYTES = 10**8


def config(gigabytes: float):
  """A bf16 model of about `gigabytes` GB; from 2 GB, its largest tensor has 0.4 GB."""
  from m2jax.config import ModelConfig

  def make(layers):
    return ModelConfig(
      vocab_size=200_064 if gigabytes >= 2 else 20_096,
      num_layers=layers,
      embed_dim=1024,
      num_heads=16,
      num_kv_heads=4,
      head_dim=64,
      rotary_dim=32,
      num_experts=16,
      experts_per_token=2,
      expert_dim=1024,
      num_mtp_modules=0,
      param_dtype='bfloat16',
    )

  one, two = (model_bytes(make(layers)) for layers in (1, 2))
  return make(max(1, 1 + -(-int(gigabytes * GB - one) // (two - one))))


def model_bytes(cfg) -> int:
  """Bytes of the model's tensors in bf16, and of router biases in fp32."""
  from m2jax.checkpoint.huggingface import names

  return sum(
    _size(t.shape) * (4 if t.leaf.startswith('router/') else 2)
    for t in names.tensors(cfg)
  )


def largest_bytes(cfg) -> int:
  """Bytes of the largest tensor of the checkpoint."""
  from m2jax.checkpoint.huggingface import names

  return 2 * max(_size(t.shape) for t in names.tensors(cfg))


def generate(directory: pathlib.Path, gigabytes: float) -> None:
  """Writes the checkpoint; its leaves broadcast one random layer to save memory."""
  import jax.numpy as jnp
  import numpy as np

  from m2jax.checkpoint import huggingface, leaves
  from m2jax.checkpoint.huggingface import names

  cfg = config(gigabytes)
  rng = np.random.default_rng(0)

  def leaf(name, shape):
    dtype = np.float32 if name.startswith('router/') else jnp.bfloat16
    own = shape[1:] if '/layers' in name else shape
    noise = rng.standard_normal(own, np.float32).astype(dtype)
    return np.broadcast_to(noise, shape)

  tree = {name: leaf(name, shape) for name, shape in names.shapes(cfg).items()}
  huggingface.save(directory, cfg, leaves.nest(tree), max_shard_bytes=SHARD_BYTES)


def measure(what: str, directory: pathlib.Path, devices: int) -> dict:
  """Loads in this process, and for 'save' also saves; returns a table row."""
  import jax
  import numpy as np

  from m2jax import sharding
  from m2jax.checkpoint import huggingface

  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', devices)
  mesh = rules = None
  if devices > 1:
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=devices))
    rules = sharding.PRESETS['fsdp']
  jax.block_until_ready(jax.numpy.zeros(8) + 1)  # starts the backend and its threads
  before = _mark()
  started = time.monotonic()
  cfg, variables = huggingface.load(directory, mesh=mesh, rules=rules)
  variables = jax.block_until_ready(variables)
  model_size = sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(variables)
    for shard in leaf.addressable_shards
  )
  model = model_size
  if what == 'save':
    target = directory.with_name('saved')
    shutil.rmtree(target, ignore_errors=True)
    model, before, started = (
      0,
      _mark(),
      time.monotonic(),
    )  # the model is part of `before`
    huggingface.save(target, cfg, variables, max_shard_bytes=SHARD_BYTES)
  seconds = time.monotonic() - started
  peak = _status('VmHWM')
  embed = np.asarray(variables['params']['embed'][:8], np.float32)
  assert np.isfinite(embed).all() and embed.std() > 0.5  # the weights were read
  return {
    'what': what,
    'devices': devices,
    'files': len(list(directory.glob('*.safetensors'))),
    'model': model_size,
    'largest': largest_bytes(cfg),
    'before': before,
    'peak': peak,
    'beyond': peak - before - model,
    'allowed': 2 * largest_bytes(cfg) + GB,
    'seconds': seconds,
  }


def _mark() -> int:
  """Resets the high-water mark; returns the resident bytes."""
  pathlib.Path('/proc/self/clear_refs').write_text('5')
  return _status('VmRSS')


def _status(field: str) -> int:
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith(f'{field}:'):
      return int(line.split()[1]) * 1024
  raise RuntimeError(f'/proc/self/status has no {field}')


def _size(shape) -> int:
  size = 1
  for n in shape:
    size *= n
  return size


def _child(*flags: str) -> str:
  """Runs this program with these flags in a new process; returns its output."""
  command = [sys.executable, '-m', 'benchmarks.checkpoint_memory', *flags]
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
  return done.stdout


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """What was loaded and saved, and its memory, in GB of 10^9 bytes."""
  about = 'devices', 'files', 'model', 'largest'
  memory = 'before', 'peak', 'beyond', 'allowed'
  lines = []
  for r in rows:
    sizes = [f'{r[name] / GB:.2f}' for name in ('model', 'largest', *memory)]
    counts = r['what'], r['devices'], r['files']
    lines.append([*counts, *sizes[:2], f'{r["seconds"]:.0f}', *sizes[2:]])
  groups = {'Checkpoint': (*about, 's'), 'Memory, GB': memory}
  return harness.markdown(['', *about, 's', *memory], lines, groups)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--gigabytes', type=float, default=4.2)
  parser.add_argument('--devices', type=int, default=1, help='virtual CPU devices')
  parser.add_argument(
    '--directory', type=pathlib.Path, help='with space for 2 × --gigabytes'
  )
  parser.add_argument('--json', action='store_true')
  parser.add_argument('--only', choices=['generate', 'load', 'save'], help='(internal)')
  args = parser.parse_args()
  if args.only == 'generate':
    generate(args.directory, args.gigabytes)
    return
  if args.only:
    print(json.dumps(measure(args.only, args.directory, args.devices)))
    return
  if args.directory:
    args.directory.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=args.directory) as folder:
    flags = [f'--directory={folder}/synthetic', f'--gigabytes={args.gigabytes}']
    flags.append(f'--devices={args.devices}')
    _child('--only=generate', *flags)
    rows = [json.loads(_child(f'--only={what}', *flags)) for what in ('load', 'save')]
  if args.json:
    print(json.dumps(rows, indent=2))
  else:
    print(table(rows))
  if any(r['beyond'] > r['allowed'] for r in rows):
    sys.exit('FAILED: `beyond` is more than `allowed`')


if __name__ == '__main__':
  main()
