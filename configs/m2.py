r"""The full model on TPU v5p: what is planned before a pod is rented.

COMMAND: python -m experiments.plan --config=configs/m2.py --topology=v5p:8x8x8
HARDWARE: any machine with libtpu (`pip install -e '.[tpu]'`) and 5 GB of memory; what
  is planned are the slices TOPOLOGIES, of 256, 512 and 1,024 chips.
PLAN FIGURES: `python -m benchmarks.plan_table --directory=DIR` (docs/plan.md).
RESULT: for each program memory against 95 GiB, FLOPs, collectives, a bound and an
  estimate of the time. The goal is that every workload fits, and an estimate of 40 % of
  peak for pretrain_8k and rl_192k on 512 chips; docs/plan.md says what it takes.
  Compile-time figures: nobody has run them on a TPU.

The batch is that of configs/pretrain_m2.py. Meshes are a choice; `--search` looks for
others. Not published, so ours: all of it but the model.
"""

import dataclasses

import ml_collections

from m2jax import config as model_config

TOPOLOGIES = ('v5p:4x8x8', 'v5p:8x8x8', 'v5p:8x8x16')

# Collectives on the SparseCores, several queued at once: weights are gathered while the
# TensorCores compute. Names of libtpu's options; the rest of XLA's stay as they are.
# All-reduces are kept off them: libtpu 0.0.42.1 offloads them by default and aborts in
# its check `abs(inc) < core_count()` (UniDirRingStrategy) while it compiles some over
# `tensor`. Absent is not enough, the option has to be False. The sums of the residual
# stream are reduce-scatters; the all-reduces that remain are small.
SPARSE_CORES = (
  'xla_tpu_enable_sparse_core_collective_offload_all_gather',
  'xla_tpu_enable_sparse_core_collective_offload_2d_all_gather',
  'xla_tpu_enable_sparse_core_collective_offload_3d_all_gather',
  'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter',
  'xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter',
  'xla_tpu_use_tc_device_shape_on_sc',
  'xla_tpu_enable_sparse_core_offload_queuing_in_lhs',
)
COMPILER_OPTIONS = dict.fromkeys(SPARSE_CORES, True) | {
  'xla_tpu_enable_sparse_core_collective_offload_all_reduce': False
}


def _fsdp(data: int, fsdp: int, context: int = 1, tensor: int = 1) -> dict:
  return dict(data=data, fsdp=fsdp, context=context, tensor=tensor, rules='fsdp')


def _serve(data: int, expert: int, tensor: int) -> dict:
  return dict(data=data, expert=expert, tensor=tensor, rules='serve')


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant:
    raise ValueError(f'unknown variant {variant!r}: there is none')
  c = ml_collections.ConfigDict()
  c.model = dataclasses.asdict(model_config.m2())
  c.optimizer = dict(adam=dict(learning_rate=2.4e-4), weight_decay=0.1)
  c.mtp_weight = 0.3
  c.bias_update_rate = 1e-3
  c.estimator = dict(kind='cispo', is_weight_max=5.0)
  c.weights_dtype = 'bfloat16'
  c.compiler_options = dict(COMPILER_OPTIONS)
  # 12,582,912 tokens a step, as configs/pretrain_m2.py; meshes of 256, 512 and 1,024
  c.workloads = dict(
    pretrain_8k=dict(
      kind='pretrain',
      rows=1_536,
      context=8_192,
      meshes=(_fsdp(2, 128), _fsdp(4, 128), _fsdp(4, 128, tensor=2)),
      passes=(2, 1, 1),
    ),
    pretrain_32k=dict(
      kind='pretrain',
      rows=384,
      context=32_768,
      meshes=(_fsdp(1, 64, tensor=4), _fsdp(1, 128, tensor=4), _fsdp(1, 128, tensor=8)),
      passes=(3, 1, 1),
    ),
    rl_192k=dict(
      kind='rl',
      rows=64,
      context=196_608,
      remat='attention',
      chunk_tokens=8_192,  # of trees that do not fit into a row
      # the stack of a path of 196,608 tokens needs tensor 4
      meshes=(_fsdp(1, 16, 4, 4), _fsdp(1, 32, 4, 4), _fsdp(2, 32, 4, 4)),
      passes=(4, 2, 1),
    ),
    prefill=dict(
      kind='prefill',
      rows=256,
      context=32_768,
      tokens=4_096,
      meshes=(_serve(32, 1, 8), _serve(64, 1, 8), _serve(128, 1, 8)),
    ),
    decode=dict(
      kind='decode',
      rows=2_048,
      context=32_768,
      meshes=(_serve(2, 32, 4), _serve(4, 32, 4), _serve(8, 32, 4)),
    ),
  )
  # the four programs; the 32K stage differs from 8K in its shapes only
  c.default = ('pretrain_8k', 'rl_192k', 'prefill', 'decode')
  return c
