"""A train step of a small M2 beside the same step of transformers on torch.

  pip install torch transformers      # here or in another environment
  python -m benchmarks.train_vs_transformers
  python -m benchmarks.train_vs_transformers --torch_python=/elsewhere/bin/python --json

Both sides train the same weights (exported by `checkpoint.huggingface`) on the same
rows, plain causal ones, in fp32, with AdamW of the same settings and every parameter in
it. A step is forward, backward and update; m2jax's is `train.step.make_step`, with the
layers unrolled as torch's are. Each side is a process of its own with --threads cores;
they take turns, a step each, so that what else the machine does meets both. On a CPU
m2jax's rows and experts are split over as many virtual devices as there are threads,
for XLA runs much of one device's program on one thread (--nosplit_rows: one device).
Both have memory allocator settings that keep freed memory (--noreuse_memory: neither).
transformers runs with sdpa attention; all of its experts implementations and all forms
of AdamW are tried first, and the fastest is kept. The losses of the first steps must
agree.

`of the matmul floor` is how much of a step its counted operations (those that the
result needs) would take at the speed of a plain dense matmul of T tokens, measured in
the same run. The parts of m2jax's step are timed apart, value and gradient together:
`attention` and `experts` are the kernels of all layers, `head` is the output matrix
with its softmax, `optimizer` the update; `rest` is what the whole step takes beyond.
CPU seconds depend less than wall seconds on what else runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import PartitionSpec

from benchmarks import prefix_tree
from m2jax import forest, sharding
from m2jax.checkpoint import huggingface
from m2jax.kernels import tree_attention
from m2jax.kernels.token_logprobs import token_logprobs
from m2jax.moe import dispatch
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import feeds
from m2jax.train import step as train_step

# a set of their own: tests import this beside programs with flags of the same names
FLAGS = flags.FlagValues()
_STEPS = flags.DEFINE_integer(
  'steps', 9, 'timed steps a side', lower_bound=1, flag_values=FLAGS
)
_ROWS = flags.DEFINE_integer(
  'rows', 8, 'rows of a batch', lower_bound=1, flag_values=FLAGS
)
_ROW_TOKENS = flags.DEFINE_integer(
  'row_tokens', 512, 'tokens of a row', lower_bound=2, flag_values=FLAGS
)
_LAYERS = flags.DEFINE_integer(
  'layers', 4, 'layers of the model', lower_bound=1, flag_values=FLAGS
)
_THREADS = flags.DEFINE_integer(
  'threads', 2, 'CPU cores of each side', lower_bound=1, flag_values=FLAGS
)
_SPLIT_ROWS = flags.DEFINE_bool(
  'split_rows', True, "m2jax: a CPU thread's rows are a device's", flag_values=FLAGS
)
_DEVICE = flags.DEFINE_enum(
  'device', 'auto', ['auto', 'cpu'], 'auto: a GPU if any', flag_values=FLAGS
)
_DTYPE = flags.DEFINE_enum(
  'dtype',
  'float32',
  ['float32', 'bfloat16'],
  'activations; torch: autocast',
  flag_values=FLAGS,
)
_TORCH_PYTHON = flags.DEFINE_string(
  'torch_python',
  sys.executable,
  'Python that has torch and transformers',
  flag_values=FLAGS,
)
_REUSE_MEMORY = flags.DEFINE_bool(
  'reuse_memory',
  True,
  'glibc keeps freed memory, in huge pages, on both sides',
  flag_values=FLAGS,
)
_EXPERTS = flags.DEFINE_list(
  'experts',
  ['grouped_mm', 'eager', 'batched_mm'],
  'implementations to try',
  flag_values=FLAGS,
)
_UPDATES = flags.DEFINE_list(
  'updates',
  ['fused', 'foreach', 'loop'],
  'forms of torch.optim.AdamW to try',
  flag_values=FLAGS,
)
_EXPERTS_GB = flags.DEFINE_float(
  'experts_gb',
  3.0,
  'batched_mm, which copies weights per token, is skipped above',
  flag_values=FLAGS,
)
_JSON = flags.DEFINE_bool('json', False, 'print JSON', flag_values=FLAGS)
_SIDE = flags.DEFINE_enum(
  'side', None, ['m2jax'], 'what this process is; internal', flag_values=FLAGS
)

TUNABLES = ':'.join(  # as in the Makefile, and one arena: others give memory back
  [
    'glibc.malloc.arena_max=1',
    'glibc.malloc.hugetlb=1',
    'glibc.malloc.mmap_threshold=1073741824',
    'glibc.malloc.trim_threshold=4294967296',
  ]
)
# XLA's own default is vectors of 256 bits where there are wider ones
XLA_FLAGS = '--xla_cpu_prefer_vector_width=512'
# a schedule for two devices on two threads needs no independent work for more threads
SPLIT_XLA_FLAGS = '--xla_cpu_enable_concurrency_optimized_scheduler=false'
PARTS = ('attention', 'experts', 'head', 'optimizer', 'rest')
PAUSE_S = 0.3  # for threads that wait in a loop for more work to go to sleep
LOSS_TOLERANCE = {'float32': 1e-4, 'bfloat16': 5e-2}


def model_config():
  cfg = prefix_tree.small('float32')
  return dataclasses.replace(
    cfg, num_layers=_LAYERS.value, dtype=_DTYPE.value, unroll_layers=True
  )


def optimizer_config() -> optimizer_lib.OptimizerConfig:
  return optimizer_lib.OptimizerConfig(
    adam=optimizer_lib.AdamConfig(learning_rate=1e-3), clip_norm=None
  )


def rows_of_tokens() -> np.ndarray:
  shape = _ROWS.value, _ROW_TOKENS.value
  return np.random.default_rng(0).integers(0, 512, shape).astype(np.int32)


def operations(cfg) -> float:
  """FLOPs that the result of a step needs."""
  rows, length = _ROWS.value, _ROW_TOKENS.value
  pairs = rows * length * (length + 1) // 2
  return prefix_tree.Operations(rows * length, pairs).flops(cfg)


# --- m2jax's side ---------------------------------------------------------------------


def split_rows() -> sharding.Sharding:
  """Rows, and experts, over as many CPU devices as threads; one if uneven."""
  threads = _THREADS.value
  experts_too = model_config().num_experts % threads == 0
  if not _SPLIT_ROWS.value or _ROWS.value % threads or not experts_too:
    return sharding.ONE_DEVICE
  jax.config.update('jax_num_cpu_devices', threads)  # before the first use of jax
  if jax.default_backend() != 'cpu':
    return sharding.ONE_DEVICE
  return sharding.make(sharding.MeshConfig(expert=threads))


class Trainer:
  """m2jax's side: the step as training runs it, and its parts."""

  def __init__(self):
    self.where = split_rows()
    self.cfg = model_config()
    self.optimizer = optimizer_lib.make(optimizer_config())
    self.state = train_step.new_state(
      self.cfg, self.optimizer, jax.random.key(0), self.where
    )
    tokens = rows_of_tokens()
    rows, length = tokens.shape
    self.batch = forest.chain(
      list(tokens), row_tokens=length, rows=rows, row_terms=length
    )
    # transformers' router bias does not move
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
    """Seconds of each of PARTS but the rest, of all layers, fastest of a few."""
    cfg, tokens = self.cfg, _ROWS.value * _ROW_TOKENS.value
    rng = np.random.default_rng(1)

    def normal(*shape):
      return jnp.array(rng.normal(size=shape), cfg.dtype)

    def heads(count):
      return normal(_ROWS.value, _ROW_TOKENS.value, count, cfg.head_dim)

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
    where: rows and integers are split over its devices as a batch is.
    rows, weights: trees of floating-point arrays.
    integers: an array.
    axis: the logical axis that weights lie along; None for the same everywhere.
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


def serve() -> None:
  """Answers commands as transformers_worker does; also 'save' and 'parts'."""
  answers, sys.stdout = sys.stdout, sys.stderr
  trainer = Trainer()
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


# --- both sides -----------------------------------------------------------------------


class Side:
  """A process that answers commands."""

  def __init__(self, name: str, command: list[str]):
    self.name = name
    cores = sorted(os.sched_getaffinity(0))[: _THREADS.value]
    environment = dict(os.environ, OMP_NUM_THREADS=str(len(cores)))
    if _REUSE_MEMORY.value:
      environment['GLIBC_TUNABLES'] = TUNABLES
    if _DEVICE.value == 'cpu':
      environment['JAX_PLATFORMS'] = 'cpu'
    environment['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'  # the GPU is torch's, too
    settings = [XLA_FLAGS]
    if _SPLIT_ROWS.value:
      settings.append(SPLIT_XLA_FLAGS)
    settings.append(environment.get('XLA_FLAGS', ''))  # the last one holds
    environment['XLA_FLAGS'] = ' '.join(settings).strip()
    self.process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=environment,
      text=True,
      preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )

  def ask(self, do: str, **more) -> dict:
    """The answer to a command; `error` in it says that it failed."""
    try:
      self.process.stdin.write(json.dumps(dict(do=do, **more)) + '\n')
      self.process.stdin.flush()
      answer = self.process.stdout.readline()
    except BrokenPipeError:
      answer = ''
    if not answer:
      raise SystemExit(f"{self.name}'s process died at {do!r}; see its message above")
    return json.loads(answer)

  def close(self) -> None:
    self.process.stdin.close()
    self.process.wait(timeout=60)


def check_torch() -> None:
  """Says what to install where torch or transformers is missing."""
  code = 'import torch; from transformers import MiniMaxM2ForCausalLM'
  try:
    done = subprocess.run(
      [_TORCH_PYTHON.value, '-c', code], capture_output=True, text=True
    )
    problem = done.stderr.strip().split('\n')[-1] if done.returncode else None
  except OSError as e:
    problem = str(e)
  if problem:
    raise SystemExit(
      f'{_TORCH_PYTHON.value}: {problem}\n'
      'The other side needs torch and transformers >= 5: `pip install torch '
      'transformers` here, or in another environment whose Python is then '
      '--torch_python=…/bin/python.'
    )


def experts_gb(cfg) -> float:
  """What batched_mm copies in a forward pass: weights of each token's experts."""
  each = 3 * cfg.embed_dim * cfg.expert_dim * cfg.experts_per_token
  return 4e-9 * each * cfg.num_layers * _ROWS.value * _ROW_TOKENS.value


def fastest_torch(side: Side, cfg) -> tuple[dict, dict]:
  """The settings of the fastest step, and seconds or problems of all."""
  found = {}
  for name in _EXPERTS.value:
    for optimizer in _UPDATES.value:
      label = f'{name}, {optimizer}'
      if name == 'batched_mm' and experts_gb(cfg) > _EXPERTS_GB.value:
        found[label] = f'skipped: would copy {experts_gb(cfg):.0f} GB of weights'
        continue
      made = side.ask('make', experts=name, optimizer=optimizer)
      steps = [] if 'error' in made else [side.ask('step') for _ in range(4)]
      problem = next((a['error'] for a in [made, *steps] if 'error' in a), None)
      found[label] = problem or min(a['seconds'] for a in steps[1:])
      logging.info('transformers, %s: %s', label, found[label])
  ran = {k: v for k, v in found.items() if isinstance(v, float)}
  if not ran:
    raise SystemExit(f'transformers ran with no experts implementation: {found}')
  name, optimizer = min(ran, key=ran.get).split(', ')
  return dict(experts=name, optimizer=optimizer), found


def compare() -> dict:
  """Everything that `show` shows."""
  check_torch()
  cfg = model_config()
  here = os.path.dirname(os.path.abspath(__file__))
  adam = optimizer_config().adam
  settings = dict(
    tokens=rows_of_tokens().tolist(),
    threads=_THREADS.value,
    device=_DEVICE.value,
    dtype=_DTYPE.value,
    learning_rate=adam.learning_rate,
    b1=adam.b1,
    b2=adam.b2,
    eps=adam.eps,
  )
  passed = _ROWS, _ROW_TOKENS, _LAYERS, _DTYPE, _THREADS, _SPLIT_ROWS
  given = [f'--{f.name}={f.value}' for f in passed]
  with tempfile.TemporaryDirectory() as directory:
    weights = os.path.join(directory, 'weights')
    ours = Side('m2jax', [sys.executable, '-m', __spec__.name, '--side=m2jax', *given])
    us = ours.ask('save', directory=weights)
    theirs = Side(
      'transformers',
      [
        _TORCH_PYTHON.value,
        '-P',  # transformers would take benchmarks/kernels.py for a library
        os.path.join(here, 'transformers_worker.py'),
        weights,
        json.dumps(settings),
      ],
    )
    chosen, tried = fastest_torch(theirs, cfg)
    them = theirs.ask('make', **chosen)
    if {us['device'], them['device']} not in ({'cpu'}, {'gpu', 'cuda'}):
      raise SystemExit(
        f'jax runs on {us["device"]} and torch on {them["device"]}: install both for '
        'the GPU, or give --device=cpu'
      )
    answers = {'m2jax': [], 'transformers': []}
    for number in range(_STEPS.value + 2):  # two to compile and to warm up
      for side in (ours, theirs):
        answers[side.name].append(side.ask('step'))
        time.sleep(PAUSE_S)
      logging.info(
        'step %d of %d: m2jax %.3f s, transformers %.3f s',
        number + 1,
        _STEPS.value + 2,
        *(a[-1]['seconds'] for a in answers.values()),
      )
    theirs.close()
    parts = ours.ask('parts')
    ours.close()
  first = [a[0]['loss'] for a in answers.values()]
  if not abs(first[0] - first[1]) <= LOSS_TOLERANCE[_DTYPE.value]:
    raise SystemExit(f'the two sides compute different losses: {first}')
  return report(cfg, answers, parts) | dict(
    device=us['device'],
    versions=[us['version'], them['version']],
    transformers=chosen,
    tried=tried,
  )


def report(cfg, answers, parts) -> dict:
  """Figures from the answers to 'step' and to 'parts'."""
  tokens = _ROWS.value * _ROW_TOKENS.value
  sides = {}
  for name, steps in answers.items():
    wall = [a['seconds'] for a in steps[2:]]
    sides[name] = dict(
      step_s=statistics.median(wall),
      fastest_s=min(wall),
      cpu_s=statistics.median(a['cpu_s'] for a in steps[2:]),
      tokens_s=tokens / statistics.median(wall),
      losses=[a['loss'] for a in steps],
    )
  parts = dict(parts)
  speed = parts.pop('matmul_flops_s')
  step_s = sides['m2jax']['step_s']
  parts['rest'] = step_s - sum(parts.values())
  pairs = zip(answers['transformers'][2:], answers['m2jax'][2:], strict=True)
  return dict(
    tokens=tokens,
    sides=sides,
    speed_up=sides['m2jax']['tokens_s'] / sides['transformers']['tokens_s'],
    speed_ups=[a['seconds'] / b['seconds'] for a, b in pairs],
    matmul_gflop_s=speed / 1e9,
    step_gflop=operations(cfg) / 1e9,
    matmul_fraction=operations(cfg) / speed / step_s,
    parts_s=parts,
  )


def show(found: dict) -> None:
  print(f'{found["device"]}; {", ".join(found["versions"])}')
  print('transformers: sdpa,', ', '.join(found['transformers'].values()))
  for label, seconds in found['tried'].items():
    said = f'{seconds:.3f} s' if isinstance(seconds, float) else seconds
    print(f'  tried {label:<20} {said}')
  line = '{:<14}{:>10}{:>10}{:>12}{:>10}'
  print(line.format('', 'tokens/s', 'step s', 'fastest s', 'CPU s'))
  for name, side in found['sides'].items():
    seconds = (f'{side[k]:.3f}' for k in ('step_s', 'fastest_s', 'cpu_s'))
    print(line.format(name, f'{side["tokens_s"]:.0f}', *seconds))
  low, high = min(found['speed_ups']), max(found['speed_ups'])
  print(f'm2jax / transformers: {found["speed_up"]:.2f} ({low:.2f} to {high:.2f})')
  print(
    f'{found["step_gflop"]:.1f} GFLOP a step at {found["matmul_gflop_s"]:.0f} GFLOP/s:'
    f' {found["matmul_fraction"]:.2f} of the matmul floor'
  )
  for name in PARTS:
    seconds = found['parts_s'][name]
    share = seconds / found['sides']['m2jax']['step_s']
    print(f'  {name:<12}{1e3 * seconds:>8.1f} ms{100 * share:>6.0f} %')


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if _SIDE.value:
    serve()
    return
  found = compare()
  if _JSON.value:
    print(json.dumps(found, indent=1))
  else:
    show(found)


if __name__ == '__main__':
  flags.FLAGS.append_flag_values(FLAGS)
  FLAGS.mark_as_parsed()  # as part of the other set
  for flag in FLAGS:  # what --help shows
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[flag])
  app.run(main)
