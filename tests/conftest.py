"""Settings of every test: CPU by default, a compilation cache, profiles of examples.

Set before anything imports jax, and inherited by the processes that tests start.
TEST_TYPES=1 checks the hints of arrays too (`make test-types`), and TEST_TIMINGS=FOLDER
records what each test costs (tests/timings.py).
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import zlib
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

_ROOT = Path(__file__).parent.parent
_CACHE = _ROOT / '.cache' / 'jax'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
# Code that is less optimised compiles in a fraction of the time; XLA's passes over HLO
# are as ever. `make test-smoke` compiles what users run. On other devices the tests do
# so too, but with exact products in fp32.
_XLA_FLAGS = [
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_parallel_codegen_split_count=1',
]
if metadata.version('jaxlib').startswith('0.10.'):  # later ones have no such flag
  _XLA_FLAGS.append('--xla_cpu_use_fusion_emitters=false')
if os.environ['JAX_PLATFORMS'] == 'cpu' and not os.environ.get('TEST_OPTIMISED'):
  os.environ['XLA_FLAGS'] = ' '.join([*_XLA_FLAGS, os.environ.get('XLA_FLAGS', '')])
elif os.environ['JAX_PLATFORMS'] != 'cpu':
  os.environ.setdefault('JAX_DEFAULT_MATMUL_PRECISION', 'highest')

# Each module that has hints of arrays (m2jax/axes.py) is imported with checks of them.
if os.environ.get('TEST_TYPES'):
  from jaxtyping import install_import_hook

  install_import_hook(
    [
      '.'.join(path.relative_to(_ROOT).with_suffix('').parts)
      for path in _ROOT.glob('m2jax/**/*.py')
      if 'from m2jax.axes import' in path.read_text()
    ],
    'beartype.beartype',
  )

# Tracing makes many objects that live on: collections find nothing and take a fifth of
# the time. What has been imported is left out of them (below).
gc.set_threshold(100_000, 50, 50)

# As the jobs do: to trace for TPUs and GPUs too takes most of the time of many tests.
if os.environ['JAX_PLATFORMS'] == 'cpu':
  importlib.import_module('m2jax.platforms').own_only()
  # Eight devices, for meshes; the processes that tests start have one.
  if 'JAX_NUM_CPU_DEVICES' not in os.environ:
    importlib.import_module('jax').config.update('jax_num_cpu_devices', 8)

# A job that a shell starts in the background ignores SIGINT, and so would all that the
# tests start, Ctrl-C tests among them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# Compilation inside an example makes any deadline a lie.
settings.register_profile('default', deadline=None, max_examples=10, print_blob=True)
settings.register_profile('thorough', deadline=None, max_examples=200, print_blob=True)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'default'))

# Long files of both tiers. One that a process begins last would leave others idle.
_FIRST = (
  'sharding/test_mesh.py',
  'experiments/test_jobs.py',
  'experiments/test_two_processes.py',
  'forge/roles/test_roles.py',
  'train/test_pretrain_kill.py',
  'forge/test_resume.py',
  'forge/test_processes.py',
  'rl/test_mesh.py',
  'model/test_forest_chunks.py',
  'rollout/engine/test_mesh.py',
  'sharding/test_distributed.py',
  'experiments/test_evaluate_mesh.py',
  'train/test_hosts.py',
  'faults/test_kills.py',
  'benchmarks/test_prefix_tree.py',
)


def pytest_configure(config):
  """Registers what the environment asks for."""
  if folder := os.environ.get('TEST_TIMINGS'):
    from tests import timings

    config.pluginmanager.register(timings.Recorder(Path(folder)))
  done = os.environ.get('TEST_DONE')
  if done and not hasattr(config, 'workerinput'):
    config.pluginmanager.register(_Done(Path(done)))


class _Done:
  """Appends the ids of tests that passed to a file; a later run leaves these out."""

  def __init__(self, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open('a', buffering=1)

  def pytest_runtest_logreport(self, report):
    if report.when == 'call' and report.passed:
      self._file.write(report.nodeid + '\n')

  def pytest_sessionfinish(self, session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._file.tell():
      session.exitstatus = pytest.ExitCode.OK  # all have passed


def pytest_collection_modifyitems(config, items):
  """Long files first, in the order above; the rest as they were."""
  rank = {str(_ROOT / 'tests' / name): i for i, name in enumerate(_FIRST)}
  items.sort(key=lambda item: rank.get(str(item.path), len(rank)))
  kept = items
  if sample := os.environ.get('TEST_SAMPLE'):
    if not (match := re.fullmatch(r'(\d+)/([1-9]\d*)', sample)):
      raise pytest.UsageError(f'SAMPLE={sample}: must be K/N, such as 1/3')
    part, parts = map(int, match.groups())
    number = lambda item: zlib.crc32(item.location[0].encode())
    kept = [item for item in kept if number(item) % parts == part % parts]
  if (path := os.environ.get('TEST_DONE')) and Path(path).exists():
    done = set(Path(path).read_text().splitlines())
    kept = [item for item in kept if item.nodeid not in done]
  if len(kept) < len(items):
    chosen = set(kept)
    config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = kept


def pytest_collection_finish():
  """Leaves what was imported out of garbage collections."""
  gc.collect()
  gc.freeze()
