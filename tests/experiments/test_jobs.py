"""pretrain → sft → evaluate and serve, as programs, on checkpoints of each other."""

import contextlib
import json
import re
import signal
import sqlite3
import subprocess
import sys

import httpx
import numpy as np
import pytest

from m2jax.checkpoint import policy
from m2jax.observe import metrics as metrics_lib
from tests.experiments import conftest


def test_pretrain_leaves_a_policy(pretrained):
  """Its checkpoint alone says model, weights, tokenizer and settings; the loss fell."""
  workdir, output = pretrained
  found = policy.load(workdir)
  assert found.step == 6 and found.directory == str(workdir / 'pretrain')
  assert found.tokenizer == (workdir / 'tokenizer.json').read_bytes()
  assert found.load_tokenizer().vocab_size == found.model.vocab_size == 512
  losses = [r['loss'] for r in metrics_lib.read(workdir, 'pretrain')]
  assert len(losses) == 6 and losses[-1] < losses[0]
  (held_out,) = metrics_lib.read(workdir, 'held_out')
  assert 0 < held_out['tokens'] <= 2 * 2 * 63 and held_out['mtp_loss'] > 0
  assert f'held-out loss {held_out["loss"]:.3f}' in output
  host = json.loads((workdir / 'pretrain/6/host/host.json').read_text())
  ran, stored = host['config'], json.loads((workdir / 'config.json').read_text())
  # what a run may resume with other values of is not among its settings
  assert ran['pretrain']['step'].pop('micro_rows') == 2
  del stored['pretrain']['step']['micro_rows']
  assert ran == stored


def test_logs_are_ours(pretrained):
  """No INFO line of a library: Orbax alone writes dozens for every checkpoint."""
  lines = [line for line in pretrained[1].splitlines() if re.match(r'I\d{4} ', line)]
  assert not [line for line in lines if re.search('checkpointer|composite|http', line)]
  assert len(lines) < 10


def test_signals_and_resume(tmp_path, texts):
  """SIGTERM and Ctrl-C end with 130 and a hint; the same command goes on after it."""
  workdir = tmp_path / 'run'
  flags = [
    f'--workdir={workdir}',
    *conftest.text_flags(texts),
    '--config.pretrain.loop.steps=1000000',
  ]
  metrics = workdir / 'metrics.jsonl'
  pattern = r'"lineage":%d,[^\n]*"step":(\d+)[^\n]*\n([^\n]*\n){5}'
  reached = 0
  for lineage, number in enumerate((signal.SIGTERM, signal.SIGINT)):
    output = tmp_path / f'output{lineage}'
    job = conftest.start('pretrain', *flags, variant=':smoke', output=output)
    try:
      first = int(conftest.wait_for(metrics, pattern % lineage, job)[1])
      job.send_signal(number)
      assert job.wait(180) == 130, output.read_text()
    finally:
      job.kill()
    assert 'the same command resumes' in output.read_text()
    assert 'Traceback' not in output.read_text()
    assert first == reached + 1
    reached = policy.load(workdir).step
  steps = [r['step'] for r in metrics_lib.read(workdir, 'pretrain')]
  assert steps == list(range(1, len(steps) + 1))


def test_sft_goes_on_from_a_checkpoint(pretrained, tuned):
  """From a checkpoint, SFT takes its model, weights and tokenizer, not the config's."""
  before, after = policy.load(pretrained[0]), policy.load(tuned[0])
  assert after.model == before.model and after.tokenizer == before.tokenizer
  assert after.directory.endswith('sft') and after.step == 6
  embed, old = after.variables['params']['embed'], before.variables['params']['embed']
  moved = np.linalg.norm(embed - old) / np.linalg.norm(old)
  assert 0 < moved < 1
  losses = [r['loss'] for r in metrics_lib.read(tuned[0], 'sft')]
  assert losses[-1] < losses[0]
  assert 'on 12 chats' in tuned[1]


@pytest.mark.long
def test_sft_from_random_weights(tmp_path, chats):
  """Without a checkpoint it trains a tokenizer on the chats; a second start is done."""
  flags = [f'--workdir={tmp_path / "run"}', f'--config.demonstrations={chats}']
  flags += [f'--config.model.{field}' for field in conftest.SMALL]
  output = conftest.run('sft', *flags, *conftest.SFT, variant=':smoke')
  found = policy.load(tmp_path / 'run')
  assert len(found.load_tokenizer().encode('How many lines has')) <= 5
  again = conftest.run('sft', *flags, *conftest.SFT, variant=':smoke')
  assert output.splitlines()[0] == again.splitlines()[0]
  assert len(metrics_lib.read(tmp_path / 'run', 'sft')) == 6


@pytest.mark.long
def test_sft_on_a_mesh_is_sft(tmp_path, chats):
  """One and two devices give the same losses; a run goes on on another mesh."""

  def losses(name, devices):
    flags = [f'--workdir={tmp_path / name}', f'--config.demonstrations={chats}']
    flags += [f'--config.model.{field}' for field in conftest.SMALL]
    flags += [f'--config.mesh.data={devices}']
    flags += [f'--config.sft.optimizer.by_kind.{k}=adam' for k in ('matrix', 'expert')]
    conftest.run('sft', *flags, *conftest.SFT, variant=':smoke')
    return [r['loss'] for r in metrics_lib.read(tmp_path / name, 'sft')]

  alone, mesh = losses('alone', 1), losses('mesh', 2)
  assert len(mesh) == 6 and mesh == pytest.approx(alone, rel=1e-4)
  assert losses('mesh', 1) == mesh


@pytest.mark.thorough
def test_expansion_on_a_mesh_is_expansion(tmp_path, pretrained, texts):
  """Both parts have the losses of one device; a run goes on on another mesh."""

  def losses(name, devices):
    flags = [f'--workdir={tmp_path / name}', f'--config.init_from={pretrained[0]}']
    flags += [*conftest.text_flags(texts), f'--config.mesh.data={devices}']
    for part in ('frozen', 'joint'):
      by_kind = f'--config.expand.{part}.optimizer.by_kind'
      flags += [f'{by_kind}.{kind}=adam' for kind in ('matrix', 'expert')]
    conftest.run('expand_mtp', *flags, variant=':smoke')
    found = metrics_lib.read(tmp_path / name)
    parts = [r for r in found if r['phase'] in ('frozen', 'pretrain')]
    steps = [(r['phase'], r['step']) for r in parts]
    return steps, np.array([[r['loss'], r['mtp_loss']] for r in parts])

  steps, alone = losses('alone', 1)
  mesh_steps, mesh = losses('mesh', 2)
  assert {phase for phase, _ in steps} == {'frozen', 'pretrain'} and len(steps) > 6
  assert mesh_steps == steps
  np.testing.assert_allclose(mesh, alone, rtol=1e-3)
  np.testing.assert_array_equal(losses('mesh', 1)[1], mesh)


def test_evaluate(tmp_path, tuned):
  """Table and JSON agree; every family's tasks add up; the interval holds the rate."""
  flags = [f'--workdir={tmp_path}', f'--checkpoint={tuned[0]}', *conftest.ENGINE]
  flags += ['--config.episodes.backend=rlimit_only', '--config.temperatures=(0.7,)']
  flags += ['--config.eval_tasks=4', '--config.episodes.agent.max_tokens=16']
  output = conftest.run('evaluate', *flags)
  found = json.loads((tmp_path / 'evaluation.json').read_text())
  assert found['checkpoint'] == str(tuned[0] / 'sft') and found['step'] == 6
  total, *families = found['held_out']
  assert total['family'] == 'all' and total['tasks'] == 4
  assert sum(row['tasks'] for row in families) == 4
  for row in found['held_out']:
    assert row['temperature'] == 0.7
    assert row['low'] <= row['success'] <= row['high']
    assert re.search(rf'0\.7 +{row["family"]} +(\d+ +)?{row["success"]:.3f} ', output)


def test_a_suite_on_a_checkpoint(tmp_path, tuned):
  """A gateway on the weights answers a suite's agents; every attempt is judged."""
  flags = ['--suite=terminal', f'--workdir={tmp_path}', f'--checkpoint={tuned[0]}']
  flags += [*conftest.ENGINE, '--config.suite.count=2', '--config.suite.trials=2']
  flags += ['--config.suite.backend=rlimit_only', '--config.suite.agent.max_tokens=16']
  code = [sys.executable, '-m', 'experiments.evaluate', *flags]
  done = subprocess.run(code, cwd=conftest.ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  total, *_ = json.loads((tmp_path / 'terminal.json').read_text())['rows']
  assert (total['tasks'], total['attempts'], total['failures']) == (2, 4, 0)


def test_rejection_sampling_on_a_checkpoint(tmp_path, tuned):
  """Every scaffold makes its attempts once: a second start only reads them."""
  flags = [f'--workdir={tmp_path}', f'--checkpoint={tuned[0]}', *conftest.ENGINE]
  suite = dict(count=1, trials=2, backend='rlimit_only', concurrency=4)
  flags += [f'--config.sample.suite.{name}={value}' for name, value in suite.items()]
  flags += [f'--config.sample.scaffolds.{n}.max_tokens=16' for n in ('plain', 'bash')]
  flags += ['--config.sample.scaffolds.perturbed.agent.max_tokens=16']
  code = [sys.executable, '-m', 'experiments.sample', '--config=configs/sample.py']
  for _ in range(2):
    done = subprocess.run(
      [*code, *flags], cwd=conftest.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / 'sample.json').read_text())['rows']
    assert {row['scaffold'] for row in rows} == {'plain', 'bash', 'perturbed'}
    assert sum(n for row in rows for n in row.values() if isinstance(n, int)) == 6
  assert (tmp_path / 'verified.jsonl').exists()


def test_serve(tmp_path, tuned):
  """Answers any key, keeps what it sampled, and Ctrl-C stops it with code 0."""
  output = tmp_path / 'output'
  flags = [f'--checkpoint={tuned[0]}', '--port=0', f'--workdir={tmp_path / "served"}']
  job = conftest.start('serve', *flags, *conftest.ENGINE, output=output)
  try:
    conftest.wait_for(output, 'Ctrl-C stops it', job)
    text = output.read_text()
    url = re.search(r'at (http://127\.0\.0\.1:\d+/v1)', text)[1]
    body = json.loads(re.search(r"-d '(.*)'", text)[1])  # the call it tells to try
    response = httpx.post(
      f'{url}/chat/completions',
      json={**body, 'max_tokens': 4},
      headers={'authorization': 'Bearer any-key'},
      timeout=60,
    )
    assert response.status_code == 200, response.text
    assert response.json()['usage']['completion_tokens'] <= 4
    job.send_signal(signal.SIGINT)
    assert job.wait(60) == 0, output.read_text()
  finally:
    job.kill()
  assert output.read_text().rstrip().endswith('stopped')
  assert (tmp_path / 'served' / 'served.db').exists()


@pytest.mark.long
def test_forge_stops_resumes_and_is_evaluated(forged):
  """The main job under a terminal's Ctrl-C, which reaches every process of the job.

  The same command finishes the run, and its RL policy is the one that is evaluated.
  """
  text, workdir = forged.stopped, forged.workdir
  assert forged.code == 130, text
  assert 'the same command resumes' in text and 'Traceback' not in text, text
  assert forged.stopped_policy == str(workdir / 'rl')
  assert 'after RL' in forged.finished and (workdir / 'report.html').exists()
  records = metrics_lib.read(workdir, 'rl')
  assert [r['step'] for r in records] == [1, 2, 3, 4, 5]
  with contextlib.closing(sqlite3.connect(workdir / 'pool.db')) as pool:
    forked = 'SELECT COUNT(*) FROM completions WHERE fork_reason IS NOT NULL'
    assert records[-1]['gateway/forks'] <= pool.execute(forked).fetchone()[0]
  flags = [
    f'--workdir={workdir}',
    *conftest.ENGINE,
    '--config.episodes.backend=rlimit_only',
  ]
  table = conftest.run('evaluate', *flags, variant=':smoke')
  assert f'step 5 of {workdir / "rl"}' in table
