"""Real runs of the mains on the smallest model, shared by the tests of this folder."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# One engine shape of each kind: compilation is most of these tests.
ENGINE = [
  '--config.engine.slots=4',
  '--config.engine.decode_rows=(4,)',
  '--config.engine.contexts=(384,)',
  '--config.engine.context_tokens=384',
  '--config.engine.prefill_shapes=((1,64),(4,64))',
]
SFT = ['--config.sft.row_tokens=640', '--config.sft.tokens_per_step=1280']


def command(job, *flags, variant=''):
  config = f'--config=configs/{job}.py{variant}'
  return [sys.executable, '-m', f'experiments.{job}', config, *map(str, flags)]


def run(job, *flags, variant='', code=0):
  """Runs a main to its end; its output, standard error after standard output."""
  done = subprocess.run(
    command(job, *flags, variant=variant),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout + done.stderr


def start(job, *flags, variant='', output):
  """Starts a main; standard output and error go to the file."""
  with open(output, 'w') as file:
    return subprocess.Popen(
      command(job, *flags, variant=variant),
      cwd=ROOT,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # a process group of its own, as under a terminal
      env={**os.environ, 'PYTHONUNBUFFERED': '1'},
    )


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
  flags.append(f'--config.checkpoint={pretrained[0]}')
  return workdir, run('sft', *flags, variant=':smoke')
