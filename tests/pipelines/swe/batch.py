"""Judges many attempts at one task of SWE in one sandbox, by one process; for tests.

`judged` runs on the host. This file is also what runs in the sandbox, in place of the
`main` of grade.py: each attempt has a workspace of its own, which is composed, graded
and cleared as where Harbor runs the task.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_TESTS = '/verifier/tests'
_LOGS = '/dev/shm/logs/verifier'


def judged(task, attempts: Mapping[str, str], limit_s: Mapping[str, float] = {}):
  """{name: what grade.py finds} of {name: commands in the workspace}.

  Args:
    task: a harbor.HarborTask.
    attempts: the commands must succeed.
    limit_s: of attempts whose tests need not have the task's limit.
  """
  return asyncio.run(_judged(task, attempts, limit_s))


async def _judged(task, attempts, limit_s):
  from m2jax import sandbox
  from m2jax.tasks.harbor import verifier
  from m2jax_pipelines.make import LIMITS

  directory = task.directory
  places = verifier.host(directory.dataset).read_only
  host = sandbox.Host(read_only=(*places, (str(directory.path / 'tests'), _TESTS)))
  files = {k: v.decode('latin-1') for k, v in directory.workspace().items()}
  archive = {k: v.decode('latin-1') for k, v in directory.archive().items()}
  policy = directory.metadata.collect, directory.metadata.exclude
  request = [files, archive, policy, dict(attempts), dict(limit_s)]
  contents = {
    'batch.py': Path(__file__).read_bytes(),
    'request.json': json.dumps(request).encode(),
  }
  site = verifier.site(directory, 'namespaces', judges=True)
  command = f'M2JAX_SITE={site} M2JAX_LOGS={_LOGS} M2JAX_PRIVATE=1 python3 -I -S -B'
  try:
    async with await sandbox.create(contents=contents, limits=LIMITS, host=host) as box:
      done = await box.exec(f'{command} batch.py')
  finally:
    await sandbox.shutdown()
  if done.returncode:
    raise RuntimeError(f'{done.returncode}: {done.stderr[-2000:]}')
  return json.loads(done.stdout)


def _inside():
  sys.path.insert(0, _TESTS)
  import compose
  import copies
  import grade
  import processes

  def cleared():
    for name in os.listdir('/workspace'):
      copies.remove(f'/workspace/{name}')

  with open('request.json', encoding='utf-8') as file:
    files, archive, policy, attempts, limit_s = json.load(file)
  files, archive = (
    {path: text.encode('latin-1') for path, text in some.items()}
    for some in (files, archive)
  )
  with open(f'{_TESTS}/config.json', encoding='utf-8') as file:
    config = json.load(file)
  processes.adopt()
  os.makedirs(_LOGS)
  found = {}
  for name, commands in attempts.items():
    cleared()
    compose.write(files, '/workspace')
    subprocess.run(['bash', '-c', commands], cwd='/workspace', check=True)
    own = {**config, 'limit_s': limit_s.get(name, config['limit_s'])}
    try:
      work = compose.gather('/workspace', *policy)
      tree = f'/tmp/tree{len(found)}'
      compose.write(compose.compose(archive, work, {}, *policy), tree)
      found[name] = grade.KINDS[config['kind']](own, tree)
    except (grade.Failed, compose.Rejected) as error:
      found[name] = {'reward': 0.0, 'reason': str(error)}
  processes.end_children()
  print(json.dumps(found))


if __name__ == '__main__':
  _inside()
