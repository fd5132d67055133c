"""pretrain → sft → serve and more, as programs, on checkpoints of each other."""

import json
import os
import re
import signal
import time

import httpx
import numpy as np
import pytest

from m2jax.checkpoint import policy
from m2jax.observe import metrics as metrics_lib
from tests.experiments import conftest
from tests.experiments.conftest import unlisted, written


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
  assert ran.pop('mesh')['expert'] == -1
  del stored['pretrain']['step']['micro_rows'], stored['mesh']
  assert ran == stored
  found = written(workdir)
  assert set(found) == {'pretrain', 'held_out'} and unlisted(found) == []


def test_logs_are_ours(pretrained):
  """No INFO line of a library: Orbax alone writes dozens for every checkpoint."""
  lines = [line for line in pretrained[1].splitlines() if re.match(r'I\d{4} ', line)]
  assert not [line for line in lines if re.search('checkpointer|composite|http', line)]
  assert len(lines) < 10


def test_other_sizes_are_named(tmp_path, pretrained, texts):
  """Of weights to start from, instead of a message about the shapes of arrays."""
  flags = [f'--workdir={tmp_path}', f'--config.init_from={pretrained[0]}']
  flags += [*conftest.text_flags(texts), '--config.model.num_mtp_modules=3']
  flags += ['--config.model.expert_dim=24']
  output = conftest.run('pretrain', *flags, variant=':smoke', code=2)
  assert 'expert_dim=16, not 24' in output
  assert 'experiments.expand_mtp adds MTP modules' in output


@pytest.mark.long
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


@pytest.mark.long
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
  (measured,) = metrics_lib.read(tuned[0], 'held_out')
  assert measured['tokens'] > 0
  assert f'on 11 chats; held-out loss {measured["loss"]:.3f}' in tuned[1]  # one of 12
  found = written(tuned[0])
  assert set(found) == {'sft', 'held_out'} and unlisted(found) == []


@pytest.mark.long
def test_ctrl_c_while_it_compiles(tmp_path, tuned):
  """In the middle of a compilation, which no other thread survives, too."""
  output = tmp_path / 'output'
  flags = [f'--checkpoint={tuned[0]}', '--port=0', *conftest.ENGINE]
  job = conftest.start('serve', *flags, output=output, JAX_ENABLE_COMPILATION_CACHE='0')
  try:
    conftest.wait_for(output, 'compiling the engine 1 of', job)
    time.sleep(2)  # traced
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(120) == 130, output.read_text()
  finally:
    job.kill()
  assert output.read_text().endswith('stopped: the same command resumes\n')


@pytest.mark.long
def test_a_suite_on_a_checkpoint(tmp_path, tuned):
  """A gateway on the weights answers a suite's agents; every attempt is judged."""
  flags = ['--suite=terminal', f'--workdir={tmp_path}', f'--checkpoint={tuned[0]}']
  flags += [*conftest.ENGINE, '--config.suite.count=2', '--config.suite.trials=2']
  flags += ['--config.suite.backend=rlimit_only', '--config.suite.agent.max_tokens=16']
  conftest.run_module('experiments.evaluate', *flags)
  total, *_ = json.loads((tmp_path / 'terminal.json').read_text())['rows']
  assert (total['tasks'], total['attempts'], total['failures']) == (2, 4, 0)


@pytest.mark.long
def test_rejection_sampling_on_a_checkpoint(tmp_path, tuned):
  """Every scaffold makes its attempts once: a second start only reads them."""
  flags = [f'--workdir={tmp_path}', f'--checkpoint={tuned[0]}', *conftest.ENGINE]
  suite = dict(count=1, trials=2, backend='rlimit_only', concurrency=4)
  flags += [f'--config.sample.suite.{name}={value}' for name, value in suite.items()]
  flags += [f'--config.sample.scaffolds.{n}.max_tokens=16' for n in ('plain', 'bash')]
  flags += ['--config.sample.scaffolds.perturbed.agent.max_tokens=16']
  for _ in range(2):
    conftest.run('sample', *flags)
    rows = json.loads((tmp_path / 'sample.json').read_text())['rows']
    assert {row['scaffold'] for row in rows} == {'plain', 'bash', 'perturbed'}
    assert sum(n for row in rows for n in row.values() if isinstance(n, int)) == 6
  assert (tmp_path / 'verified.jsonl').exists()


@pytest.mark.long
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
