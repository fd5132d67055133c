"""m2jax alone runs all jobs but those of m2jax_pipelines, which say what to install."""

import re

import pytest

from tests import processes

MISSING = r'm2jax_pipelines(\.\w+)? is missing: pip install -e \./m2jax_pipelines'
# name: job with its flags ({tmp} is a directory), and the error that it ends with
CASES = {
  **{
    job: ([job, f'--config=configs/{job}.py'], '--workdir is missing')
    for job in ('evaluate', 'forge', 'pretrain', 'sft')
  },
  'serve': (['serve', '--config=configs/serve.py'], '--checkpoint is missing'),
  'sample': (['sample', '--config=configs/sample.py'], MISSING),
  'make_tasks': (['make_tasks', '--pipeline=swe'], MISSING),
  'make_all_tasks': (['make_all_tasks'], MISSING),
  'a suite': (['evaluate', '--suite=reasoning'], MISSING),
  'a suite with another config': (
    ['evaluate', '--suite=reasoning', '--config=configs/serve.py', '--workdir={tmp}'],
    MISSING,
  ),
}


@pytest.mark.parametrize('name', CASES)
def test_one_line_and_code_2(name, tmp_path):
  (job, *flags), message = CASES[name]
  flags = [flag.replace('{tmp}', str(tmp_path)) for flag in flags]
  done = processes.run('tests.experiments.without_pipelines', job, *flags)
  assert done.returncode == 2, done
  assert len(re.findall(f'^error: {message}', done.stderr, re.M)) == 1, done.stderr
  assert 'Traceback' not in done.stderr, done.stderr
