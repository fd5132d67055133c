"""`evaluate` and `serve` as two processes on a mesh: one device's tokens."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sqlite3
import time

import httpx
import numpy as np
import pytest

from m2jax import config as model_config
from m2jax.checkpoint import policy
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.pool.data_pool import DataPool
from m2jax.text import tokenizer
from tests import processes, quick
from tests.experiments import conftest

ENGINE = [
  '--config.engine.slots=6',
  '--config.engine.decode_rows=(6,)',  # divide over no mesh here
  '--config.engine.contexts=(768,)',
  '--config.engine.context_tokens=768',
  '--config.engine.prefill_shapes=((4,64),)',
]
EVALUATE = [
  *ENGINE,
  '--config.episodes.backend=rlimit_only',
  '--config.temperatures=(0.0,)',
  '--config.episodes.agent.max_tokens=12',
]
MESH = ['--config.mesh.fsdp=2', '--config.mesh.expert=2', '--config.mesh.tensor=2']
HEARTBEAT_S = 30  # experiments.common


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A policy of random weights."""
  cfg = dataclasses.replace(
    model_config.tiny(),
    **dict(vocab_size=512, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2),
    **dict(head_dim=16, rotary_dim=8, expert_dim=16, num_experts=8),
  )
  directory = tmp_path_factory.mktemp('policy')
  tok = tokenizer.train(['cat notes.txt | wc -l'] * 20, cfg.vocab_size)
  files = {policy.TOKENIZER_FILE: tok.to_json().encode()}
  variables = quick.variables(cfg, 0, noise=0.3)
  with CheckpointManager(directory) as manager:
    manager.save(3, {'variables': variables}, policy.host(cfg), files)
    manager.wait()
  return directory


def found(workdir):
  """The file of results, and of each task the tokens and their log-probabilities."""
  with DataPool(f'sqlite:///{workdir}/evaluation.db') as pool:
    episodes = {
      t.trajectory.task: pool.completions(t.trajectory.session)
      for t in pool.newest_trajectories(100)
    }
  tokens = {
    task: [c.response_ids.tolist() for c in turns] for task, turns in episodes.items()
  }
  logprobs = [
    np.concatenate([c.logprobs for c in episodes[task]]) for task in sorted(episodes)
  ]
  return json.loads((workdir / 'evaluation.json').read_text()), tokens, logprobs


@pytest.mark.long
def test_evaluation_does_not_depend_on_the_mesh(tmp_path, checkpoint):
  """The results, and every token that was drawn, of one device: on 8 devices of two
  processes. Process 1 ends with process 0 and has nothing to report."""
  flags = [f'--checkpoint={checkpoint}', *EVALUATE, '--config.eval_tasks=5']
  conftest.run('evaluate', f'--workdir={tmp_path}/alone', *flags)
  both = conftest.two('evaluate', f'--workdir={tmp_path}/two', *flags, *MESH, devices=4)
  outputs = processes.finish(both)
  for child, (_, err) in zip(both, outputs, strict=True):
    assert child.returncode == 0, err[-3000:]
  assert ['held-out success' in out for out, _ in outputs] == [True, False]
  results, tokens, logprobs = found(tmp_path / 'alone')
  assert len(tokens) == 5 and len({str(x) for x in tokens.values()}) > 2
  other, same_tokens, close = found(tmp_path / 'two')
  assert other == results and same_tokens == tokens
  for a, b in zip(close, logprobs, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.long
def test_the_death_of_a_process_ends_an_evaluation(tmp_path, checkpoint):
  """One line and no table from the other, within the heartbeat: neither a hang nor a
  rate of the episodes that happened to end."""
  flags = [f'--checkpoint={checkpoint}', *EVALUATE, '--config.eval_tasks=300']
  children = conftest.two('evaluate', f'--workdir={tmp_path}', *flags, devices=1)
  try:
    deadline = time.monotonic() + 600
    while not _rows(tmp_path / 'evaluation.db'):
      assert children[0].poll() is None and time.monotonic() < deadline
      time.sleep(0.1)
    children[1].kill()
    killed_s = time.monotonic()
    out, err = children[0].communicate(timeout=2 * HEARTBEAT_S)
  finally:
    processes.finish(children, 1)
  assert time.monotonic() - killed_s < HEARTBEAT_S
  assert children[0].returncode == 1
  assert 'error: the rollout engine has stopped: ' in err.splitlines()[-1]
  assert 'Traceback' not in err and 'held-out success' not in out
  assert not (tmp_path / 'evaluation.json').exists()


def _rows(database) -> int:
  """Completions in a database that another process may be making."""
  try:
    with sqlite3.connect(f'file:{database}?mode=ro', uri=True) as connection:
      return connection.execute('SELECT COUNT(*) FROM completions').fetchone()[0]
  except sqlite3.OperationalError:
    return 0


@pytest.mark.long
def test_two_processes_serve(checkpoint):
  """Any client of process 0; Ctrl-C of it ends both with code 0. Without a mesh in the
  config the rows of a call are split over all devices."""
  flags = [f'--checkpoint={checkpoint}', '--port=0', *ENGINE]
  children = conftest.two('serve', *flags, devices=2)
  try:
    for line in children[0].stdout:
      if 'serving step' in line:
        url = re.search(r'http://127\.0\.0\.1:\d+/v1', line)[0]
      if 'Ctrl-C' in line:
        break
    hello = {'role': 'user', 'content': 'Hello'}
    response = httpx.post(
      f'{url}/chat/completions',
      json={'model': 'm2jax', 'messages': [hello], 'max_tokens': 4},
      headers={'authorization': 'Bearer any-key'},
      timeout=60,
    )
    assert response.json()['usage']['completion_tokens'] <= 4, response.text
    children[0].send_signal(signal.SIGINT)
    outputs = processes.finish(children, 60)
  finally:
    for child in children:
      child.kill()
  for child, (_, err) in zip(children, outputs, strict=True):
    assert child.returncode == 0, err[-3000:]
  assert outputs[0][0].rstrip().endswith('stopped')
