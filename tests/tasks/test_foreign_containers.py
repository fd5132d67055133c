"""Tasks that other tools made, in containers; skipped without podman."""

from __future__ import annotations

import asyncio
import re

import pytest

from m2jax import sandbox
from m2jax.tasks import harbor
from tests.tasks import foreign

_REASON = foreign.unavailable()
pytestmark = [
  pytest.mark.long,
  pytest.mark.skipif(bool(_REASON), reason=_REASON or 'podman is here'),
]
LIMITS = sandbox.Limits(memory_bytes=256 << 20, wall_s=60.0, processes=256)


@pytest.fixture(scope='module')
def image(tmp_path_factory):
  return foreign.base(tmp_path_factory.mktemp('base'))


@pytest.fixture
def attempt(image, tmp_path):
  """attempt(script, **foreign.write's, job={…}): (verdict, what the script printed)."""

  def attempt(script=None, job=None, limits=LIMITS, **files):
    path = foreign.write(tmp_path / 'task', **files)
    task = foreign.task(path, image, **(job or {}))

    async def run():
      async with task.open(limits=limits) as environment:
        if script is None:
          done = await task.solve(environment)
          shown = done.stdout + done.stderr
        else:
          shown = await environment.execute('sh', {'cmd': script})
        return await task.judge(environment), shown

    return asyncio.run(run())

  return attempt


def settings(extra=''):
  return foreign.TOML + extra


def test_the_solution_is_1_and_nothing_0(attempt):
  verdict, _ = attempt()
  assert (verdict.outcome, verdict.reward) == (harbor.PASSED, 1.0), verdict
  verdict, _ = attempt('true')
  assert (verdict.outcome, verdict.reward) == (harbor.FAILED, 0.0), verdict
  assert verdict.details['stdout'] == 'checked 0'


@pytest.mark.parametrize(
  ('end', 'reward'),
  [
    ('echo 0.25 > /logs/verifier/reward.txt; exit 7', 0.25),
    ('echo \'{"reward": 0.5, "x": 3}\' > /logs/verifier/reward.json', 0.5),
    ('echo \'{"score": 1}\' > /logs/verifier/reward.json; echo 0 > reward.txt', 1.0),
    ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', 'several numbers'),
    ('echo nan > /logs/verifier/reward.txt', 'nan'),
    ('echo 2 > /logs/verifier/reward.txt', 'must be in'),
    ('touch /logs/verifier/reward.txt', 'no reward'),
    ('ln -s /etc/passwd /logs/verifier/reward.txt', 'no reward'),
    ('exit 1', 'neither reward.json nor reward.txt.*exited with 1'),
    ('sleep 60', r'more than 2 s \(verifier.timeout_sec\)'),
  ],
)
def test_what_counts_as_a_reward(attempt, end, reward):
  """Without a number in [0, 1] an attempt is not judged, as in Harbor."""
  toml = settings().replace('timeout_sec = 60.0', 'timeout_sec = 2.0', 1)
  verdict, _ = attempt(
    'true', test=f'#!/bin/bash\ncd /logs/verifier\n{end}\n', toml=toml
  )
  if isinstance(reward, float):
    assert verdict.reward == reward and verdict.outcome != harbor.INVALID, verdict
  else:
    assert verdict.outcome == harbor.INVALID, verdict
    assert re.search(reward, verdict.reason), verdict


def test_a_verdict_that_is_none_is_an_error_of_the_machine(image, tmp_path):
  path = foreign.write(tmp_path / 'task', test='#!/bin/bash\necho why >&2\n')
  task = foreign.task(path, image)

  async def run():
    async with task.open(limits=LIMITS) as environment:
      await task.verify(environment, '')

  with pytest.raises(harbor.InvalidVerdict, match='no reward(.|\n)*stderr: why'):
    asyncio.run(run())


def test_what_the_verifier_printed_is_noted(image, tmp_path):
  task = foreign.task(foreign.write(tmp_path / 'task'), image)

  async def run():
    async with task.open(limits=LIMITS) as environment:
      assert await task.verify(environment, '') == 0.0
      return environment.notes

  assert 'checked 0' in asyncio.run(run())[0]


def test_no_process_of_the_agent_is_left(attempt):
  """One that waits for the tests to write the reward itself does not see them."""
  script = (
    'while sleep 0.1; do [ -d /tests ] && echo right > /app/out.txt; '
    'echo 1 > /logs/verifier/reward.txt; done >/dev/null 2>&1 &'
  )
  test = foreign.TEST.replace('grep', 'sleep 2; grep', 1)
  verdict, _ = attempt(script, test=test)
  assert verdict.outcome == harbor.FAILED, verdict
  # The file system is the agent's own still.
  verdict, _ = attempt('echo right > out.txt', test=test)
  assert verdict.outcome == harbor.PASSED, verdict


def test_a_server_is_there_only_for_a_live_verifier(attempt):
  files = dict(test='#!/bin/bash\n[ -e /proc/$(cat /app/pid)/fd ] && r=1 || r=0\n'
               'echo $r > /logs/verifier/reward.txt\n')  # fmt: skip
  script = 'sleep 1000 >/dev/null 2>&1 & echo $! > /app/pid'
  assert attempt(script, job={'verifier': 'live'}, **files)[0].reward == 1.0


@pytest.mark.parametrize(
  'script',
  [
    'mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt',
    'rm -rf /logs; mkdir /app/l; echo 1 > /app/l/reward.txt; ln -s /app /logs',
    'mkdir /tests; echo "echo 1 > /logs/verifier/reward.txt" > /tests/test.sh',
    'ln -s /app /tests',
    'rm -rf /logs/verifier; ln -s /app /logs/verifier',
    'kill -9 -1',
    'rm -rf /bin /lib*',
  ],
)
def test_an_attempt_to_game_it_fails(attempt, script):
  verdict, _ = attempt(script)
  assert verdict.outcome == harbor.FAILED, verdict


def program(path, body):
  """Replaces a program; what replaces it is executable, as the old one was."""
  return f"cp /bin/cat /tmp/p; echo '#!/bin/bash\n{body}' > /tmp/p; mv /tmp/p {path}"


@pytest.mark.parametrize(
  'script',
  [
    'rm /bin/bash',
    program('/bin/mkdir', 'exit 1'),
    program('/bin/grep', 'sleep 60'),
    # The main process of the verifier's container ends.
    program('/bin/sh', '[ $$ = 1 ] || exec bash "$@"'),
  ],
)
def test_an_agent_does_not_choose_that_it_is_not_judged(attempt, script):
  toml = settings().replace('timeout_sec = 60.0', 'timeout_sec = 3.0', 1)
  verdict, _ = attempt(script, toml=toml)
  assert verdict.outcome == harbor.FAILED, verdict
  assert 'without the agent there is a reward' in verdict.reason


def test_volumes_of_an_image_are_judged(attempt):
  dockerfile = f'FROM {foreign.BASE}\nWORKDIR /app\nVOLUME /app\n'
  assert attempt(dockerfile=dockerfile)[0].reward == 1.0


def test_the_agent_sees_neither_tests_nor_solution_nor_this_machine(
  attempt, monkeypatch
):
  monkeypatch.setenv('HOST_SECRET', 'secret')
  monkeypatch.setenv('ALLOWED', 'seen')
  toml = settings(
    'env = {A = "1", B = "${ALLOWED}", C = "${OTHER:-c}"}\n'
    '[solution]\nenv = {SOLVES = "x"}\n'
  ).replace('[agent]', 'env = {JUDGES = "${ALLOWED}"}\n[agent]')
  test = '#!/bin/bash\necho "env $JUDGES $A"; echo 1 > /logs/verifier/reward.txt\n'
  job = {'variables': ('ALLOWED',)}
  verdict, shown = attempt(
    'ls /tests /solution /work 2>&1; env; cat /proc/net/dev', job, toml=toml, test=test
  )
  assert verdict.details['stdout'] == 'env seen 1'
  for name in ('/tests', '/solution', '/work'):
    assert f"cannot access '{name}'" in shown
  assert 'A=1' in shown and 'B=seen' in shown and 'C=c' in shown
  assert 'secret' not in shown and 'JUDGES' not in shown and 'SOLVES' not in shown
  assert 'lo:' in shown and 'eth' not in shown
  with pytest.raises(harbor.BadTask, match=r'B needs .*ALLOWED.*containers\.variables'):
    attempt('true', toml=toml)


def test_declared_settings_are_those_of_the_container(attempt):
  toml = settings(
    'workdir = "/data"\n'
    'healthcheck = {command = "echo x >> /tmp/n; test $(grep -c x /tmp/n) = 2", '
    'interval_sec = 0.1}\n'
  ).replace('[agent]', '[agent]\nuser = "worker"')
  _, shown = attempt(
    'pwd; id -u; cat /tmp/n; cat /sys/fs/cgroup/memory/memory.limit_in_bytes '
    '/sys/fs/cgroup/memory.max 2>/dev/null',
    toml=toml,
    dockerfile=f'FROM {foreign.BASE}\nWORKDIR /app\n',
  )
  assert shown.split()[:4] == ['/data', '1000', 'x', 'x'], shown


def test_a_task_that_is_not_healthy_fails_as_the_machine(attempt):
  toml = settings(
    'healthcheck = {command = "echo no >&2; false", interval_sec = 0.1}\n'
  )
  with pytest.raises(harbor.SetupFailed, match='healthcheck failed 3 times.*no'):
    attempt('true', toml=toml)


def test_a_compose_file_of_one_service_runs(attempt):
  composed = """\
services:
  main:
    build: {context: sub}
    working_dir: /srv
    environment: {MODE: fast}
    command: [sh, -c, 'echo $$MODE > /srv/started; sleep 1000']
"""
  files = {
    'environment/docker-compose.yaml': composed,
    'environment/sub/Dockerfile': f'FROM {foreign.BASE}\nWORKDIR /app\n',
  }
  test = (
    '#!/bin/bash\nsleep 1; grep -q fast /srv/started && echo 1 '
    '> /logs/verifier/reward.txt\n'
  )
  verdict, shown = attempt('pwd; sleep 1; cat /srv/started', files=files, test=test)
  assert shown.split() == ['/srv', 'fast'] and verdict.reward == 1.0, verdict


def test_a_separate_verifier_gets_the_artifacts_alone(attempt):
  toml = 'artifacts = ["/app/out.txt", {source = "/data", exclude = ["*.tmp"]}]\n'
  toml += settings().replace('[agent]', 'environment_mode = "separate"\n[agent]')
  test = foreign.TEST + 'ls /app /data\n'
  script = (
    'mkdir /data; touch /data/a /data/b.tmp /app/other; echo right > /app/out.txt; '
    'echo "#!/bin/sh" > /bin/grep'
  )
  verdict, _ = attempt(script, toml=toml, test=test)
  shown = verdict.details['stdout'].split()
  assert verdict.reward == 1.0 and 'out.txt' in shown and 'a' in shown, verdict
  assert 'other' not in shown and 'b.tmp' not in shown
  # What replaces its programs reaches nothing there.
  cheat = 'printf "#!/bin/sh\\nexit 0\\n" > /bin/grep; ln -s /etc/passwd /app/out.txt'
  assert attempt(cheat, toml=toml, test=test)[0].outcome == harbor.FAILED


def test_a_verifier_may_have_an_image_with_its_tests(attempt):
  toml = settings().replace('[agent]', 'environment_mode = "separate"\n[agent]')
  files = {
    'tests/Dockerfile': f'FROM {foreign.BASE}\nCOPY test.sh /tests/test.sh\n',
  }
  test = '#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n'
  assert attempt('true', toml=toml, test=test, files=files)[0].reward == 1.0


def test_an_image_that_cannot_be_built_is_no_failure_of_the_agent(attempt):
  with pytest.raises(sandbox.SandboxError, match='build'):
    attempt('true', dockerfile='FROM localhost/m2jax/absent:none\n')


def test_a_file_of_a_prebuilt_task_is_uploaded(image, tmp_path):
  toml = settings(f'docker_image = "{foreign.BASE}"\nworkdir = "/app"\n')
  path = foreign.write(tmp_path / 'task', toml, files={'environment/data.txt': 'x'})
  (path / 'environment' / 'Dockerfile').unlink()
  task = foreign.task(path, image)

  async def run():
    async with task.open(limits=LIMITS) as environment:
      return await environment.execute('sh', {'cmd': 'cat data.txt'})

  assert asyncio.run(run()) == 'x'


def test_a_large_output_and_a_full_disk_are_the_agents(attempt):
  limits = sandbox.Limits(memory_bytes=64 << 20, wall_s=30.0, file_bytes=1 << 20)
  toml = settings().replace('memory_mb = 256\n', 'memory_mb = 64\n')
  verdict, _ = attempt('head -c 9000000 /dev/zero > big; :', limits=limits, toml=toml)
  assert verdict.outcome == harbor.FAILED


def test_a_made_task_runs_as_harbor_would(image, tmp_path):
  """With the backend of an engine: by its Dockerfile and its test.sh."""
  draft = harbor.Draft(
    'made',
    'x',
    harbor.Metadata('test', 'test'),
    tests={'test.sh': foreign.TEST.replace('/app', '/workspace').encode()},
    solution={'solve.sh': b'echo right > /workspace/out.txt'},
  )
  path = harbor.write(draft, tmp_path / 'tasks' / 'train')
  dockerfile = f'FROM {foreign.BASE}\nWORKDIR /workspace\n'
  (path / 'environment' / 'Dockerfile').write_text(dockerfile)
  task = foreign.task(path, image)
  assert task.directory.settings is None

  async def run(solve):
    async with task.open(backend='podman', limits=LIMITS) as environment:
      if solve:
        await task.solve(environment)
      return (await task.judge(environment)).reward

  assert [asyncio.run(run(solve)) for solve in (True, False)] == [1.0, 0.0]


def test_what_only_a_sandbox_judges_is_named(tmp_path):
  draft = harbor.Draft(
    'made',
    'x',
    harbor.Metadata('test', 'test', answer='answer.txt'),
    tests={'test.sh': b''},
    solution={'solve.sh': b''},
  )
  task = foreign.task(harbor.write(draft, tmp_path / 'tasks' / 'train'))

  async def run():
    async with task.open(backend='podman', limits=LIMITS):
      pass

  with pytest.raises(harbor.BadTask, match=r'answer.*episodes\.backend=namespaces'):
    asyncio.run(run())
