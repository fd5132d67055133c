"""Mistakes at the keys: one line that names it, code 2, nothing left behind."""

import pytest

from tests import processes
from tests.experiments import conftest

CONFIGS = ('evaluate', 'evolve', 'forge', 'pretrain', 'serve', 'sft')
# name: job, flags ({tmp} is a directory), what the message must say
CASES = {
  'unknown field': ('pretrain', ['--workdir={tmp}/w', '--config.nosuch=1'], 'nosuch'),
  'nearly a field': (
    'pretrain',
    ['--workdir={tmp}/w', '--config.mesh.fdsp=2'],
    '--config.mesh.fdsp=2',
  ),
  'unknown nested field': (
    'forge',
    ['--workdir={tmp}/w', '--config.sft.loop.nosuch=1'],
    "--config.sft.loop.nosuch=1: the config has no field 'nosuch'; config.sft.loop has "
    'checkpoint_every, keep_every_steps, log_every, max_skipped, seconds, steps',
  ),
  'unknown group': ('sft', ['--workdir={tmp}/w', '--config.no.such=1'], '--config.no'),
  'not a number': ('evaluate', ['--workdir={tmp}/w', '--config.eval_tasks=a'], "'a'"),
  'out of range': (
    'forge',
    ['--workdir={tmp}/w', '--config.model.num_heads=3'],
    'config.model: ModelConfig.num_heads=3',
  ),
  **{
    f'{job}: GNMR in one precision': (
      job,
      ['--workdir={tmp}/w', f'--config.{part}.optimizer.gnmr.max_active=1'],
      'config: GnmrConfig.max_active=1: must be 0 for a model whose',
    )
    for job, part in (('forge', 'rl'), ('pretrain', 'pretrain'), ('sft', 'sft'))
  },
  'unknown flag': ('serve', ['--nosuch=1'], 'nosuch'),
  'stray argument': ('pretrain', ['--workdir={tmp}/w', 'smoke'], "'smoke'"),
  'one process only': ('convert@serve', ['--distributed'], 'one process'),
  'nobody to join': (
    'pretrain',
    ['--workdir={tmp}/w', '--distributed'],
    'JAX_COORDINATOR_ADDRESS',
  ),
  'no checkpoint flag': ('serve', [], '--checkpoint'),
  'missing checkpoint': ('serve', ['--checkpoint={tmp}/gone'], '{tmp}/gone'),
  'open to everyone': (
    'serve',
    ['--checkpoint={tmp}', '--workdir={tmp}/w', '--config.gateway.host=0.0.0.0'],
    "accept_unknown_keys=True with host='0.0.0.0': beyond loopback everyone",
  ),
  'nobody has a key': (
    'serve',
    ['--checkpoint={tmp}', '--config.gateway.accept_unknown_keys=False'],
    'without --workdir: nobody would have a key',
  ),
  'empty workdir': ('evaluate', ['--workdir={tmp}'], '{tmp}'),
  'no policy to evolve': (
    'evolve',
    ['--workdir={tmp}/w', '--config.checkpoint={tmp}/gone'],
    '{tmp}/gone',
  ),
  'no record to replay': ('evolve', ['--workdir={tmp}/w', '--replay'], 'no record'),
  'missing source': (
    'sft',
    [
      '--workdir={tmp}/w',
      '--config.demonstrations={tmp}/chats.jsonl',
      '--config.init_from={tmp}/gone',
    ],
    '{tmp}/gone',
  ),
  'missing demonstrations': (
    'sft',
    ['--workdir={tmp}/w', '--config.demonstrations={tmp}/gone.jsonl'],
    '--config.demonstrations={tmp}/gone.jsonl: no such file',
  ),
  'bad demonstration': (
    'sft',
    ['--workdir={tmp}/w', '--config.demonstrations={tmp}/bad.jsonl'],
    'bad.jsonl, line 2',
  ),
  'no text': (
    'pretrain',
    ['--workdir={tmp}/w', '--config.text.root={tmp}/gone'],
    '{tmp}/gone',
  ),
  'missing tokenizer': (
    'pretrain',
    [
      '--workdir={tmp}/claimed',
      '--config.text.root={tmp}/texts',
      '--config.text.held_out=0.5',
      '--config.tokenizer={tmp}/gone.json',
    ],
    '{tmp}/gone.json',
  ),
  'vocabulary too small': (
    'pretrain',
    [
      '--workdir={tmp}/claimed',  # what failed before claims nothing
      '--config.text.root={tmp}/texts',
      '--config.text.held_out=0.5',
      '--config.model.vocab_size=100',
    ],
    'vocab_size=100',
  ),
  'a URL as workdir': (
    'pretrain',
    ['--workdir=gs://bucket/run'],
    '--workdir=gs://bucket/run: a URL, but the job writes to local paths only',
  ),
  'other run': ('pretrain', ['--workdir={tmp}/other'], '--fresh'),
  **{
    f'{job}: no workdir': (job, [], '--workdir is missing')
    for job in ('evaluate', 'forge', 'pretrain', 'sft')
  },
  **{
    f'{job}: variant': (f'{job}:nosuch', ['--workdir={tmp}/w'], "variant 'nosuch'")
    for job in CONFIGS
  },
  'no config': ('', ['--workdir={tmp}/w'], '--config is missing'),
  'missing config': ('pretrain@gone', ['--workdir={tmp}/w'], 'configs/gone.py'),
}


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
  """(directory, name → finished process) of all cases, run as programs."""
  tmp = tmp_path_factory.mktemp('bad')
  message = {'role': 'user', 'content': 'hi'}
  answer = {'role': 'assistant', 'content': 'ho'}
  lines = [{'messages': [message, answer]}]
  conftest.write_chats(tmp / 'chats.jsonl', lines)
  conftest.write_chats(tmp / 'bad.jsonl', [*lines, {'messages': [message]}])
  (tmp / 'texts').mkdir()
  for i in range(20):
    (tmp / 'texts' / f'{i}.py').write_text('print(1)\n' * 10)
  (tmp / 'other').mkdir()
  (tmp / 'other' / 'config.json').write_text('{"seed": 17}')
  (tmp / 'other' / 'metrics.jsonl').write_text('')
  found = {}
  for name, (job, flags, _) in CASES.items():
    job, _, file = job.partition('@')
    job, colon, variant = job.partition(':')
    config = [f'--config=configs/{file or job}.py{colon}{variant}'] if job else []
    flags = [flag.replace('{tmp}', str(tmp)) for flag in flags]
    found[name] = processes.run(f'experiments.{job or "pretrain"}', *config, *flags)
  return tmp, found


@pytest.mark.parametrize('name', CASES)
def test_one_line_and_code_2(outcomes, name):
  """The person learns what was wrong and where, without a traceback."""
  tmp, results = outcomes
  found = results[name]
  assert found.returncode == 2, found
  lines = [line for line in found.stderr.splitlines() if line.startswith('error: ')]
  assert len(lines) == 1 and 'Traceback' not in found.stderr, found.stderr
  assert CASES[name][2].replace('{tmp}', str(tmp)) in lines[0]
  assert '.py, line' not in lines[0]  # where settings are checked is not of interest


def test_nothing_is_left_behind(outcomes):
  """A mistake must not claim the workdir, or the corrected command would be refused."""
  tmp, _ = outcomes
  assert not (tmp / 'w').exists()
  left = {p.name for p in (tmp / 'claimed').iterdir()}
  assert left == {'config.json', '.lock'}
