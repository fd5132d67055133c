"""Real runs of the mains on the smallest model, shared by the tests of this folder."""

import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import time
import types

import pytest

from m2jax.checkpoint import policy
from m2jax.observe import metrics, names
from tests import processes

ROOT = pathlib.Path(__file__).parents[2]

# One engine shape of each kind: compilation is most of these tests.
ENGINE = [
  '--config.engine.slots=4',
  '--config.engine.decode_rows=(4,)',
  '--config.engine.contexts=(384,)',
  '--config.engine.context_tokens=384',
  '--config.engine.prefill_shapes=((1,64),(4,64))',
]
SMALL = ('vocab_size=512', 'num_layers=1', 'embed_dim=32', 'num_heads=2')
SMALL += ('num_kv_heads=1', 'head_dim=16', 'rotary_dim=8', 'expert_dim=16')
SFT = ['--config.sft.row_tokens=640', '--config.sft.tokens_per_step=1280']


def command(job, *flags, variant=''):
  """Module and arguments of a job."""
  return [f'experiments.{job}', f'--config=configs/{job}.py{variant}', *flags]


def two(job, *flags, variant='', devices=1):
  """Two processes of a job, started together."""
  port = processes.free_port()
  return [
    processes.start(
      *command(job, *flags, variant=variant),
      '--distributed',
      PYTHONUNBUFFERED='1',
      JAX_NUM_CPU_DEVICES=str(devices),
      JAX_COORDINATOR_ADDRESS=f'localhost:{port}',
      JAX_NUM_PROCESSES='2',
      JAX_PROCESS_ID=str(process),
    )
    for process in range(2)
  ]


def run(job, *flags, variant='', code=0):
  """Runs a main to its end; its output, standard error after standard output."""
  return run_module(*command(job, *flags, variant=variant), code=code)


def run_module(module, *flags, code=0):
  """The same of a module whose flags name the config, if it has one."""
  done = processes.run(module, *flags, timeout_s=900)
  assert done.returncode == code, done.stdout + done.stderr
  check_progress(done.stdout, ended=code == 0)
  return done.stdout + done.stderr


def check_progress(text, ended):
  """What a job said of its progress: named phases, never backwards, true at the end."""
  lines = [line.split(' | ') for line in text.splitlines() if line.startswith('m2jax ')]
  where = [line[2] for line in lines if len(line) > 2]
  totals = [int(n) for n in re.findall(r'^m2jax .* \| total (\d+)%', text, re.M)]
  assert totals == sorted(totals), text
  if where:
    assert 'starting' not in where, text
    assert (where[-1] == 'done' and totals[-1] == 100) == ended, text
    assert 100 not in totals[:-1], text


def start(job, *flags, variant='', output, **environment):
  """Starts a main; standard output and error go to the file."""
  with open(output, 'w') as file:
    return processes.popen(
      *command(job, *flags, variant=variant),
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # a process group of its own, as under a terminal
      env={**os.environ, 'PYTHONUNBUFFERED': '1', **environment},
    )


def wait_for(path, pattern, process, seconds=600):
  """The match of a pattern in a growing file."""
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    text = path.read_text() if path.exists() else ''
    if match := re.search(pattern, text):
      return match
    assert process.poll() is None, text
    time.sleep(0.05)
  raise AssertionError(f'{pattern!r} did not appear in {path}:\n{text}')


def written(workdir) -> dict[str, set[str]]:
  """phase → every key of its records, superseded ones included."""
  found = collections.defaultdict(set)
  for record in metrics.read(workdir):
    found[record['phase']] |= set(record) - metrics.RESERVED
  return found


def unlisted(found: dict[str, set[str]]) -> list[str]:
  return [what for phase in found for what in names.unlisted(phase, found[phase])]


def text_flags(root):
  # Few files: by chance none might be among the default share.
  return [f'--config.text.root={root}', '--config.text.held_out=0.2']


def write_chats(path, chats):
  path.write_text(''.join(json.dumps(chat) + '\n' for chat in chats))
  return path


@pytest.fixture(scope='session')
def texts(tmp_path_factory):
  """A small tree of text: this project's own sources, and a directory to leave out."""
  root = tmp_path_factory.mktemp('texts')
  for path in sorted((ROOT / 'm2jax').glob('*/*.py'))[:40]:
    (root / f'{path.parent.name}_{path.name}').write_text(path.read_text())
  (root / 'tests').mkdir()
  (root / 'tests' / 'bad.py').write_text('not to be read')
  return root


@pytest.fixture(scope='session')
def pretrained(tmp_path_factory, texts):
  """(workdir, output) of a short pre-training run."""
  workdir = tmp_path_factory.mktemp('pretrained') / 'run'
  flags = [f'--workdir={workdir}', *text_flags(texts)]
  return workdir, run('pretrain', *flags, variant=':smoke')


@pytest.fixture(scope='session')
def chats(tmp_path_factory):
  """Demonstrations as JSON lines: one with its own tools, one with an own system."""

  def chat(i):
    call = {'name': 'sh', 'arguments': {'cmd': f'wc -l file_{i}.txt'}}
    return [
      {'role': 'user', 'content': f'How many lines has file_{i}.txt?'},
      {
        'role': 'assistant',
        'reasoning_content': 'count them',
        'tool_calls': [{'id': 'c', 'type': 'function', 'function': call}],
      },
      {'role': 'tool', 'tool_call_id': 'c', 'content': str(i)},
      {'role': 'assistant', 'reasoning_content': 'the number', 'content': str(i)},
    ]

  lines = [{'task': f't{i}', 'messages': chat(i)} for i in range(12)]
  other = {'function': {'name': 'other', 'parameters': {}}, 'type': 'function'}
  lines[0]['tools'] = [other]
  lines[1]['messages'].insert(0, {'role': 'system', 'content': 'Be brief.'})
  return write_chats(tmp_path_factory.mktemp('chats') / 'chats.jsonl', lines)


@pytest.fixture(scope='session')
def tuned(tmp_path_factory, pretrained, chats):
  """(workdir, output) of SFT from the pre-trained weights."""
  workdir = tmp_path_factory.mktemp('tuned') / 'run'
  flags = [f'--workdir={workdir}', f'--config.demonstrations={chats}', *SFT]
  flags.append(f'--config.init_from={pretrained[0]}')
  return workdir, run('sft', *flags, variant=':smoke')


@pytest.fixture(scope='session')
def forged(tmp_path_factory):
  """A run of the main job, stopped in RL by a terminal's Ctrl-C and then finished.

  It has the workdir, and code and output of both parts.
  """
  root = tmp_path_factory.mktemp('forged')
  workdir, output = root / 'run', root / 'output'
  flags = [f'--workdir={workdir}', *ENGINE, '--config.episodes.backend=rlimit_only']
  flags += [f'--config.model.{field}' for field in SMALL]
  flags += ['--config.rl.steps=5', '--config.rl.checkpoint_every=1']
  job = start('forge', *flags, variant=':smoke', output=output)
  try:
    wait_for(workdir / 'metrics.jsonl', r'"phase":"rl","step":2,', job, seconds=300)
    os.killpg(job.pid, signal.SIGINT)  # reaches every process of the job
    code = job.wait(180)
  finally:
    job.kill()
  check_progress(output.read_text(), ended=False)
  return types.SimpleNamespace(
    workdir=workdir,
    code=code,
    stopped=output.read_text(),
    stopped_policy=policy.find(workdir),
    finished=run('forge', *flags, variant=':smoke'),
  )
