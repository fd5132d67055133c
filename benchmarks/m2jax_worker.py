"""m2jax's side of `train_vs_transformers`: train steps, and the times of their parts.

`train_vs_transformers` starts it as a process of its own, with Settings as JSON in its
argument. It reads one JSON command per line from stdin and answers each with one line:

  {"do": "save", "directory": DIRECTORY}  → {"device", "version"}; writes the weights
  {"do": "step"}                          → {"seconds", "cpu_s", "loss"}
  {"do": "parts"}                         → seconds of each part, "matmul_flops_s"
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks import prefix_tree_rows
from m2jax import config as model_config_lib
from m2jax import forest, platforms, sharding, startup
from m2jax.checkpoint import huggingface
from m2jax.kernels import tree_attention
from m2jax.kernels.token_logprobs import token_logprobs
from m2jax.moe import dispatch
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import feeds
from m2jax.train import step as train_step


@dataclasses.dataclass(frozen=True)
class Settings:
  """What both sides train; each field is the flag of that name."""

  rows: int
  row_tokens: int
  layers: int
  dtype: str
  threads: int

  @property
  def batch_tokens(self) -> int:
    return self.rows * self.row_tokens


def model_config(settings: Settings) -> model_config_lib.ModelConfig:
  return dataclasses.replace(
    prefix_tree_rows.small('float32'),
    num_layers=settings.layers,
    dtype=settings.dtype,
    unroll_layers=True,
  )


def optimizer_config() -> optimizer_lib.OptimizerConfig:
  return optimizer_lib.OptimizerConfig(
    adam=optimizer_lib.AdamConfig(learning_rate=1e-3), clip_norm=None
  )


def rows_of_tokens(settings: Settings) -> np.ndarray:
  shape = settings.rows, settings.row_tokens
  return np.random.default_rng(0).integers(0, 512, shape).astype(np.int32)


class Trainer:
  """The step as training runs it, and its parts."""

  def __init__(self, settings: Settings):
    self.settings = settings
    on_cpu = jax.default_backend() == 'cpu'  # else one, as transformers
    self.where = sharding.make(sharding.MeshConfig(expert=-1 if on_cpu else 1))
    self.cfg = model_config(settings)
    self.optimizer = optimizer_lib.make(optimizer_config())
    self.state = train_step.new_state(
      self.cfg, self.optimizer, jax.random.key(0), self.where
    )
    tokens = rows_of_tokens(settings)
    rows, length = tokens.shape
    self.batch = forest.chain(
      list(tokens), row_tokens=length, rows=rows, row_terms=length
    )
    # transformers does not update the router bias
    self.config = train_step.StepConfig(micro_rows=rows, bias_update_rate=0.0)
    self.run = train_step.make_step(
      self.cfg, self.optimizer, train_step.nll, self.config, self.where
    )

  def save(self, directory: str) -> None:
    huggingface.save(directory, self.cfg, self.state.variables)

  def step(self) -> float:
    self.state, metrics = self.run(self.state, self.batch)
    jax.block_until_ready(self.state)
    return float(metrics['loss'])

  def parts(self) -> dict[str, float]:
    """Seconds of each part over all layers, the fastest of a few runs."""
    cfg, tokens = self.cfg, self.settings.batch_tokens
    rng = np.random.default_rng(1)

    def normal(*shape):
      return jnp.array(rng.normal(size=shape), cfg.dtype)

    def heads(count):
      return normal(self.settings.rows, self.settings.row_tokens, count, cfg.head_dim)

    state = jax.device_get(self.state)  # not on the mesh
    p = {k: x[0] for k, x in state.variables['params']['layers'].items()}
    p = {k: jnp.array(x, cfg.dtype) for k, x in p.items()}
    order = np.argsort(rng.random((tokens, cfg.num_experts)), axis=1)
    ids = jnp.array(order[:, : cfg.experts_per_token], jnp.int32)
    x, weights = normal(tokens, cfg.embed_dim), jnp.abs(normal(*ids.shape))
    head = jnp.array(state.variables['params']['head'])
    targets = jnp.array(self.batch.tokens.reshape(-1))
    ends = jnp.array(self.batch.subtree_end)
    kernels = p['gate'], p['up'], p['down']
    n, kv = cfg.num_heads, cfg.num_kv_heads
    time_of = functools.partial(timed, self.where)

    def attention(qkv, ends, _):
      return tree_attention.attend(*qkv, tree_attention.Visibility(ends))

    def moe(x_weights, ids, kernels):
      x, weights = x_weights
      return dispatch.apply(x, ids, weights, *kernels, sharding=self.where)

    def logprobs(hidden, targets, head):
      return token_logprobs(hidden, head, targets)[0]

    qkv = heads(n), heads(kv), heads(kv)
    seconds = {
      'attention': cfg.num_layers * time_of(attention, qkv, ends, ()),
      'experts': cfg.num_layers * time_of(moe, (x, weights), ids, kernels, 'experts'),
      'head': time_of(logprobs, x, targets, head),
      'optimizer': self.update_seconds(),
    }
    a, b = x, normal(cfg.embed_dim, cfg.embed_dim)
    matmul = fastest(jax.jit(jnp.matmul), a, b, runs=30)
    return seconds | dict(matmul_flops_s=2 * tokens * cfg.embed_dim**2 / matmul)

  def update_seconds(self) -> float:
    programs = train_step.programs(
      self.cfg, self.optimizer, train_step.nll, self.config, self.where
    )
    feed = feeds.rows(programs, self.config, self.where)
    (sums,) = jax.block_until_ready(list(feed(self.state.variables, self.batch)))
    times = []
    for _ in range(6):
      started = time.perf_counter()
      self.state, metrics = programs.apply(self.state, sums)
      jax.block_until_ready((self.state, metrics))
      times.append(time.perf_counter() - started)
    return min(times[1:])


def fastest(function, *arrays, runs: int) -> float:
  jax.block_until_ready(function(*arrays))
  times = []
  for _ in range(runs):
    started = time.perf_counter()
    jax.block_until_ready(function(*arrays))
    times.append(time.perf_counter() - started)
  return min(times)


def timed(where, function, rows, integers, weights, axis=None) -> float:
  """Seconds of the value and all gradients of `function(rows, integers, weights)`.

  Args:
    where: its devices share rows and integers in the way they share a batch.
    rows, weights: trees of floating-point arrays.
    integers: an array.
    axis: the logical axis along which weights are split; None: not split.
  """
  split = PartitionSpec(where.axes('rows') or None)
  whole = PartitionSpec(where.axes(axis) or None) if axis else PartitionSpec()
  if where.mesh is not None:
    function = where.shard_map(function, (split, split, whole), split)

  @jax.jit
  def both(cotangent, rows, integers, weights):
    out, vjp = jax.vjp(lambda r, w: function(r, integers, w), rows, weights)
    return out, vjp(cotangent)

  out = jax.eval_shape(function, rows, integers, weights)
  cotangent = jnp.array(np.random.default_rng(2).normal(size=out.shape), out.dtype)
  arrays = where.place((cotangent, rows, integers), split)
  return fastest(both, *arrays, where.place(weights, whole), runs=6)


def main() -> None:
  answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
  startup.prepare(startup.devices())  # as the jobs do
  platforms.own_only()
  trainer = Trainer(Settings(**json.loads(sys.argv[1])))
  for line in sys.stdin:
    command = json.loads(line)
    if command['do'] == 'save':
      trainer.save(command['directory'])
      answer = dict(device=jax.default_backend(), version=f'jax {jax.__version__}')
    elif command['do'] == 'parts':
      answer = trainer.parts()
    else:
      started, cpu = time.perf_counter(), time.process_time()
      loss = trainer.step()
      answer = dict(
        seconds=time.perf_counter() - started,
        cpu_s=time.process_time() - cpu,
        loss=loss,
      )
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
