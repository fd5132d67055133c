"""Law 5 on the pre-training job: SIGKILL at any moment leaves no mark on the curve.

Real processes of `experiments.pretrain`, all stages and phases in miniature; and of
`experiments.expand_mtp`, on the checkpoint that comes of it.
"""

from __future__ import annotations

import json
import pathlib
import random
import signal
import time

import pytest

from m2jax.checkpoint import policy
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.observe import metrics as metrics_lib
from tests import processes

REPO = pathlib.Path(__file__).parents[2]
STEPS = 40
FLAGS = (
  # 16 batches of 128 tokens, 12 of 256, 12 of 256; both phases fall inside stages
  '--config.pretrain.stages=((32,4,2048),(64,4,3072),(128,2,3072))',
  '--config.pretrain.phases.tokens=8192',
  '--config.pretrain.phases.warmup_tokens=512',
  '--config.pretrain.phases.decay_tokens=4096',
  '--config.pretrain.phases.bias_updates_until=0.8',
  f'--config.pretrain.loop.steps={STEPS}',
  '--config.pretrain.loop.checkpoint_every=4',
  '--config.pretrain.loop.seconds=0.0',
  '--config.text.join_from_context=128',
)


def start(workdir, texts, job='pretrain', flags=FLAGS):
  flags = [f'--config.text.root={texts}', '--config.text.held_out=0.2', *flags]
  flags = [f'--workdir={workdir}', f'--config=configs/{job}.py:smoke', *flags]
  with open(workdir.with_suffix('.log'), 'a') as log:
    return processes.popen(f'experiments.{job}', *flags, stdout=log, stderr=log)


def steps_written(workdir) -> int:
  """Records of surviving steps so far, also while the job writes."""
  return len(metrics_lib.read(workdir, 'pretrain'))


def finish(workdir, texts, *job):
  child = start(workdir, texts, *job)
  output = workdir.with_suffix('.log')
  assert child.wait(3000) == 0, output.read_text()[-5000:]
  return output.read_text()


def steps_saved(workdir) -> int:
  with CheckpointManager(workdir / 'pretrain', read_only=True) as manager:
    return manager.latest_step() or 0


# Lowest and highest step of each kill.
LONG = ((5, 15), (27, 38))
THOROUGH = ((5, 12), (18, 26), (27, 30), (31, 38))


@pytest.mark.parametrize(
  'moments',
  [
    pytest.param(LONG, marks=pytest.mark.long),
    pytest.param(THOROUGH, marks=pytest.mark.thorough),
  ],
)
def test_the_loss_curve_is_bit_identical(tmp_path, moments):
  """Killed at random steps of its stages, the job leaves the curve, the weights and the
  optimizer of the job that ran through."""
  texts = tmp_path / 'texts'
  texts.mkdir()
  for path in sorted((REPO / 'm2jax').glob('*/*.py'))[:40]:
    (texts / f'{path.parent.name}_{path.name}').write_text(path.read_text())
  finish(tmp_path / 'whole', texts)

  rng, workdir, kills, lost = random.Random(0), tmp_path / 'killed', 0, 0
  for low, high in moments:
    child, after = start(workdir, texts), rng.randint(low, high)
    while child.poll() is None and steps_written(workdir) < after:
      time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.02))
    while child.poll() is None:  # killed where something is lost
      child.send_signal(signal.SIGSTOP)
      time.sleep(0.05)  # until all of its threads have stopped
      if steps_written(workdir) > steps_saved(workdir):
        break
      child.send_signal(signal.SIGCONT)
      time.sleep(0.01)
    child.kill()
    kills += child.wait(60) == -signal.SIGKILL
    lost += steps_written(workdir) - steps_saved(workdir)
  finish(workdir, texts)
  assert kills >= len(moments) - 1 and lost > 0  # else the test would be worth nothing

  ignored = {'time_s', 'used_s', 'lineage', 'tokens_per_s'}
  ignored |= {'checkpoint/save_s', 'disk/free_bytes'}

  def curve(run):
    records = metrics_lib.read(run)
    return [{k: v for k, v in r.items() if k not in ignored} for r in records]

  whole = curve(tmp_path / 'whole')
  assert [r['step'] for r in whole[:-1]] == list(range(1, STEPS + 1))
  assert [r['context'] for r in whole[:-1]] == [32] * 16 + [64] * 12 + [128] * 12
  assert curve(workdir) == whole
  states = []
  for run in (tmp_path / 'whole', workdir):
    path = run / 'pretrain' / str(STEPS) / 'host' / 'leaves.json'
    states.append(json.loads(path.read_text()))
  assert states[0] == states[1]  # checksums of every array
  assert all(leaf['crc32'] is not None for leaf in states[0].values())
  assert policy.load(workdir).step == STEPS

  # Expansion starts from such a checkpoint; its result is a policy with 3 modules.
  flags = [f'--config.init_from={workdir}']
  output = finish(tmp_path / 'expanded', texts, 'expand_mtp', flags)
  assert '3 MTP modules; held-out loss' in output
  expanded, before = policy.load(tmp_path / 'expanded'), policy.load(workdir)
  assert expanded.model.num_mtp_modules == 3 and before.model.num_mtp_modules == 1
  assert expanded.tokenizer == before.tokenizer
  (held_out,) = metrics_lib.read(tmp_path / 'expanded', 'held_out')
  assert held_out['loss'] > 0 and held_out['mtp_loss'] > 0
