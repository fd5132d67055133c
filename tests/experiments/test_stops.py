"""How every job stops: SIGTERM, losses that stay NaN, and places it cannot write to.

A job ends through `common.run`, so that its fast tests are those of `common.run`, of
the two loops that train (tests/train/test_loop.py, tests/forge/test_rl_loop.py), and of
the table below, which has every job. The long tests run the programs.
"""

import pathlib
import re
import signal

import jax
import numpy as np
import pytest

from experiments import common
from m2jax.checkpoint import CheckpointManager, MissingCheckpoint, StorageError
from m2jax.forge.errors import ProcessLost, RolloutsFailed, Stopped
from m2jax.observe import metrics as metrics_lib
from m2jax.sandbox import SandboxUnavailable
from m2jax.train.step import NotFinite
from m2jax.train.workdir import OtherRun
from tests import processes
from tests.experiments import conftest

# Job: directory of its checkpoints, phase of its records, and its learning rate.
TRAINING = {
  'pretrain': ('pretrain', 'pretrain', 'pretrain.optimizer'),
  'expand_mtp': ('frozen', 'frozen', 'expand.frozen.optimizer'),
  'sft': ('sft', 'sft', 'sft.optimizer'),
  'forge': ('rl', 'rl', 'sft.optimizer'),
}
# What has no steps, and what a stop costs it.
OTHERS = {
  'doctor': 'a rerun, which is made anew',
  'evolve': 'a phase that has not ended',
  'convert': 'one commit: a directory, or a checkpoint',
  'evaluate': 'its table; a suite keeps every attempt that ended',
  'make_all_tasks': 'a task that is being made',
  'make_tasks': 'a task that is being made',
  'plan': 'nothing with --store',
  'replay': 'nothing: it reads',
  'sample': 'an attempt that has not ended',
  'serve': 'requests that run',
  'tasks': 'a task that is being checked',
  'trajectories': 'nothing: it reads',
  'transfer': 'one commit: a file, or a transaction',
  'view': 'nothing: it reads',
}
JOBS = {**TRAINING, **OTHERS}
WRITES = {'convert': 'huggingface', 'transfer': 'to', 'view': 'export', 'plan': 'store'}
EXPERIMENTS = pathlib.Path(common.__file__).parent


def test_every_job_is_in_the_table():
  """And ends through `common.run`, which handles signals, errors and --workdir."""
  ends = re.compile(r"^if __name__ == '__main__':\n(  .*\n)*  common\.run\(main", re.M)
  found = {
    path.stem: bool(ends.search(path.read_text()))
    for path in EXPERIMENTS.glob('*.py')
    if '__main__' in path.read_text()
  }
  assert found == dict.fromkeys(JOBS, True)


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (common.BadInput('x'), 2),
    (NotFinite('loss'), 2),
    (OtherRun('x'), 2),
    (MissingCheckpoint('x'), 2),
    (SandboxUnavailable('x', 'y'), 2),
    (StorageError('UNAVAILABLE'), 1),
    (RolloutsFailed('no engine'), 1),
    (ProcessLost('2'), 1),
    (Stopped('process 0 stopped'), 1),
    (Stopped('process 0 stopped', repeatable=False), 2),
    (KeyboardInterrupt(), 1),
  ],
  ids=repr,
)
def test_what_a_scheduler_repeats(error, code):
  """Code 2 is for errors that the same command meets again; a lost machine is not."""
  assert common.exit_code(error) == code


def test_a_value_error_of_another_package_is_repeated():
  """A storage layer raises ValueErrors for outages; those of ours are the user's."""
  with pytest.raises(ValueError) as caught:
    np.zeros(3).reshape(2)  # NumPy's code in C; the frame that calls it is ours
  assert common.exit_code(caught.value) == 2
  with pytest.raises(ValueError) as caught:
    jax.sharding.Mesh(np.zeros((1, 1)), 'a')
  assert common.exit_code(caught.value) == 1


@pytest.mark.parametrize('path', ['/workdir/x', 'workdir/a:b', '~/x', './c:d/e', None])
def test_paths_are_no_urls(path):
  common.check_path('workdir', path)


@pytest.mark.parametrize('url', ['gs://b/run', 's3://b', 'file:///tmp/x', 'gs:/b/run'])
def test_urls_are_no_paths(url):
  """As a path `gs://bucket/run` is the folder `gs:` here, whose loss nobody notices."""
  with pytest.raises(common.BadInput, match='a URL, but the job writes to local paths'):
    common.check_path('workdir', url)


def test_a_signal_where_nothing_is_lost(capsys):
  """SIGTERM ends a job outside its loop at once, with one line and code 130."""
  with pytest.raises(SystemExit) as ended, common.interruptible():
    signal.raise_signal(signal.SIGTERM)
  assert ended.value.code == common.INTERRUPTED
  assert 'the same command resumes' in capsys.readouterr().err


@pytest.mark.parametrize(('number', 'code'), [('SIGTERM', 130), ('SIGINT', 0)])
def test_a_server_that_is_stopped(capsys, number, code):
  """Ctrl-C ends a server with success; SIGTERM does not, or a scheduler that moves it
  to another machine would not start it there."""
  ended = 0
  try:
    with common.interruptible():
      try:
        signal.raise_signal(getattr(signal, number))
      except KeyboardInterrupt:
        common.check_stopped()
  except SystemExit as error:
    ended = error.code
  assert ended == code and bool(capsys.readouterr().err) == bool(code)


@pytest.mark.long
@pytest.mark.parametrize('job', JOBS)
def test_a_url_is_refused(tmp_path, job):
  """Before anything is read or written, by every flag that names what is written."""
  config = pathlib.Path(f'configs/{job}.py')
  given = [f'--config={config}'] if (conftest.ROOT / config).exists() else []
  flags = [['--workdir=gs://bucket/run']]
  if job in WRITES:
    flags.append([f'--workdir={tmp_path}', f'--{WRITES[job]}=gs://bucket/file'])
  if job == 'convert':
    flags[1].append(f'--checkpoint={tmp_path}')
  if job == 'plan':
    given = ['--config=configs/m2.py']
  for more in flags:
    done = processes.run(f'experiments.{job}', *given, *more)
    assert done.returncode == 2, done.stderr
    assert ': a URL, but the job writes to local paths only' in done.stderr
  assert not (conftest.ROOT / 'gs:').exists()


@pytest.fixture
def training(request, texts, chats):
  """job → its flags but --workdir, of a run that is small."""

  def flags(job):
    if job in ('pretrain', 'expand_mtp'):
      found = conftest.text_flags(texts)
      if job == 'expand_mtp':
        start = request.getfixturevalue('pretrained')[0]
        found += [f'--config.init_from={start}', '--config.expand.check_every=1000000']
      return found
    small = [f'--config.model.{field}' for field in conftest.SMALL]
    if job == 'sft':
      return [f'--config.demonstrations={chats}', *conftest.SFT, *small]
    backend = '--config.episodes.backend=rlimit_only'
    return [*conftest.ENGINE, backend, *small]

  return flags


def endless(job):
  """Flags of a budget that ends only by a signal, without a checkpoint before it."""
  part = dict(expand_mtp='expand.frozen.loop', forge='rl').get(job, f'{job}.loop')
  values = dict(steps=10**6, seconds=0.0, checkpoint_every=10**6)
  return [f'--config.{part}.{name}={value}' for name, value in values.items()]


def trained(workdir, directory):
  """Step of the latest checkpoint."""
  with CheckpointManager(workdir / directory, read_only=True) as manager:
    return manager.latest_step()


@pytest.mark.long
@pytest.mark.parametrize('job', TRAINING)
def test_sigterm_saves(tmp_path, training, job):
  """A machine that is taken away costs no step: the run had no checkpoint before."""
  directory, phase, _ = TRAINING[job]
  workdir, output = tmp_path / 'run', tmp_path / 'output'
  flags = [f'--workdir={workdir}', *training(job), *endless(job)]
  run = conftest.start(job, *flags, variant=':smoke', output=output)
  try:
    pattern = rf'"phase":"{phase}","step":[2-9]'
    conftest.wait_for(workdir / 'metrics.jsonl', pattern, run, seconds=300)
    run.send_signal(signal.SIGTERM)
    assert run.wait(180) == common.INTERRUPTED, output.read_text()
  finally:
    run.kill()
  text = output.read_text()
  assert 'the same command resumes' in text and 'Traceback' not in text
  last = metrics_lib.read(workdir, phase)[-1]['step']
  assert last >= 2 and trained(workdir, directory) == last


@pytest.mark.long
@pytest.mark.parametrize('asked', [0, 1])
@pytest.mark.parametrize('job', ['pretrain', 'forge'])
def test_sigterm_in_one_of_two_processes_saves(tmp_path, training, job, asked):
  """Both end after the same step, with its checkpoint, and neither with code 2."""
  directory, phase, _ = TRAINING[job]
  workdir = tmp_path / 'run'
  flags = [f'--workdir={workdir}', *training(job), *endless(job)]
  children = conftest.two(job, *flags, variant=':smoke')
  pattern = rf'"phase":"{phase}","step":[2-9]'
  try:
    conftest.wait_for(workdir / 'metrics.jsonl', pattern, children[0], seconds=400)
    children[asked].send_signal(signal.SIGTERM)
  finally:
    ended = processes.finish(children, 200)
  for child, (_, err) in zip(children, ended, strict=True):
    assert child.returncode == common.INTERRUPTED, err[-3000:]
    assert 'the same command resumes' in err
  last = metrics_lib.read(workdir, phase)[-1]['step']
  assert last >= 2 and trained(workdir, directory) == last


@pytest.mark.long
@pytest.mark.parametrize('job', TRAINING)
def test_losses_that_stay_nan(tmp_path, training, job):
  """The steps are skipped, and the run ends with a checkpoint and code 2, which a
  scheduler does not repeat. (Of the main job this is SFT; RL's loop is the one of
  tests/forge/test_rl_loop.py.)"""
  directory, phase, optimizer = TRAINING[job]
  if job == 'forge':
    directory = phase = 'sft'
  flags = [f'--workdir={tmp_path}', *training(job)]
  for kind in ('adam', 'muon'):
    flags.append(f'--config.{optimizer}.{kind}.learning_rate=inf')
  part = dict(expand_mtp='expand.frozen', forge='sft').get(job, job)
  loop = dict(steps=40, seconds=0.0, log_every=1, max_skipped=3)
  flags += [f'--config.{part}.loop.{name}={value}' for name, value in loop.items()]
  output = conftest.run(job, *flags, variant=':smoke', code=common.FINAL)
  assert f'{phase} step ' in output and 'max_skipped=3' in output
  assert 'Traceback' not in output
  records = metrics_lib.read(tmp_path, phase)
  assert [r['skipped'] for r in records[-4:]] == [1, 1, 1, 1]
  assert trained(tmp_path, directory) == records[-1]['step'] < 40
