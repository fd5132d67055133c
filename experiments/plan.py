r"""Memory, collectives and roofline of a run, compiled for TPUs without having one.

python -m experiments.plan --config=configs/m2.py --topology=v5p:8x8x8 [--quick]
python -m experiments.plan --config=configs/m2.py --topology=v5p:8x8x8 \
  --workloads=pretrain_8k --search
python -m experiments.plan --config=configs/m2.py --calibrate
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from concurrent import futures

from absl import flags

from experiments import common

TOPOLOGY = flags.DEFINE_string(
  'topology', 'v5p:8x8x8', 'Slice: generation and shape in chips.'
)
WORKLOADS = flags.DEFINE_list(
  'workloads', [], "Names of the config's workloads; none: its `default`."
)
SEARCH = flags.DEFINE_bool('search', False, 'Search for meshes; compile the best.')
BEST = flags.DEFINE_integer('best', 2, 'How many meshes --search compiles.')
JOBS = flags.DEFINE_integer('jobs', 0, 'Workloads compiled at once; 0: one a core.')
QUICK = flags.DEFINE_bool(
  'quick',
  False,
  'Compile with less effort than for training, in half the time: FLOPs and collectives '
  'are the same, temporaries smaller, and fewer collectives are hidden.',
)
LAYERS = flags.DEFINE_integer('layers', 0, 'Plan a model of fewer layers; 0: as it is.')
TOKENS = flags.DEFINE_integer(
  'tokens', 0, "Tokens of a training step, in one pass; 0: the config's."
)
GRADIENT_DTYPE = flags.DEFINE_string(
  'gradient_dtype',
  None,
  "MeshConfig.gradient_dtype of the meshes; default: the config's.",
)
CALIBRATE = flags.DEFINE_bool(
  'calibrate', False, 'Print the shares of the roofs that estimates have, and exit.'
)
CHUNKS = flags.DEFINE_bool(
  'chunks', True, "Compile RL's chunks as well, which takes longer than its rows."
)
STORE = flags.DEFINE_string(
  'store', None, 'Directory of compiled programs: only others are compiled.'
)
JSON = flags.DEFINE_bool('json', False, 'Print JSON.')


def configuration(values: dict):
  """A PlanConfig from the config's values."""
  from m2jax.plan import workloads
  from m2jax.sharding import MeshConfig

  def workload(name, fields):
    where = f'config.workloads.{name}'
    meshes = tuple(
      common.build(MeshConfig, mesh, f'{where}.meshes[{i}]')
      for i, mesh in enumerate(fields.get('meshes', ()))
    )
    return common.build(workloads.Workload, {**fields, 'meshes': meshes}, where)

  loads = {name: workload(name, w) for name, w in values['workloads'].items()}
  return common.build(workloads.PlanConfig, {**values, 'workloads': loads})


def selected(config) -> dict:
  """The workloads that the flags choose, as they change them."""
  from m2jax.plan import workloads

  chosen = workloads.select(config, WORKLOADS.value)
  if not CHUNKS.value:
    chosen = {
      name: dataclasses.replace(w, chunk_tokens=0) for name, w in chosen.items()
    }
  if GRADIENT_DTYPE.value:
    chosen = {name: w.of_gradients(GRADIENT_DTYPE.value) for name, w in chosen.items()}
  if TOKENS.value:
    chosen = {name: w.of_tokens(TOKENS.value) for name, w in chosen.items()}
  return chosen


def main():
  # nothing runs here: an attached TPU or GPU is not used
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  from m2jax.plan import plan, programs, render, search, topology, workloads
  from m2jax.plan.workloads import TRAINING

  if CALIBRATE.value:
    print(render.calibration())
    return
  common.check_path('store', STORE.value)
  config = configuration(common.values())
  model = programs.layers(config.model, LAYERS.value)
  options = dict(config.compiler_options)
  if QUICK.value:
    options['xla_optimization_level'] = 'EFFORT_O1'
    print(
      'quick: not the programs that train, which need some percent more temporaries '
      'and hide more of their collectives',
      file=sys.stderr,
    )
  config = dataclasses.replace(config, model=model, compiler_options=options)
  chosen = selected(config)
  slice_ = topology.load(TOPOLOGY.value)
  store = pathlib.Path(STORE.value) if STORE.value else None
  found = []

  def show(made):
    found.append(made)
    if not JSON.value:
      print(render.report(made), flush=True)

  def planned(name):
    placed = workloads.place(name, chosen[name], len(slice_.devices))
    return plan.make(config, placed, slice_, store)

  if SEARCH.value:
    for name, workload in chosen.items():
      tried = search.candidates(config, name, workload, slice_)
      if not JSON.value:
        print(render.candidates(name, tried, slice_.name), flush=True)
      for made in search.compiled(config, tried[: BEST.value], slice_, store):
        show(made)
  else:
    # one compilation cannot keep two cores busy; train steps take longest
    with futures.ThreadPoolExecutor(JOBS.value or os.cpu_count()) as pool:
      order = sorted(chosen, key=lambda name: chosen[name].kind not in TRAINING)
      made = {name: pool.submit(planned, name) for name in order}
      try:
        for name in chosen:
          show(made[name].result())
      except KeyboardInterrupt:
        # Ctrl-C does not interrupt a compilation; nothing is lost by exiting
        print('\nstopped: nothing was saved', file=sys.stderr, flush=True)
        os._exit(common.INTERRUPTED)
      finally:
        pool.shutdown(wait=False, cancel_futures=True)
  if JSON.value:
    print(json.dumps([render.as_json(p) for p in found], indent=2))


if __name__ == '__main__':
  common.run(main)
