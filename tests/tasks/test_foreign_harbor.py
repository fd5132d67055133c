"""Task directories that other tools made: what is read, what is refused, and why."""

from __future__ import annotations

import collections
import dataclasses
import os

import pytest

from m2jax import tasks
from m2jax.checks import InvalidSetting
from m2jax.tasks import harbor
from m2jax.tasks.harbor import directory, service, standard
from tests.tasks import foreign

FULL = """\
schema_version = "1.4"
artifacts = ["/app/out.txt", {source = "/data", exclude = ["*.pyc"]}]
[metadata]
category = "software-engineering"
[agent]
timeout_sec = 120.0
user = 1000
network_mode = "no-network"
[verifier]
timeout_sec = 60
user = "judge"
env = {MODEL = "${JUDGE:-none}"}
[[verifier.collect]]
command = "dump > /data/state"
timeout_sec = 5
[verifier.environment]
docker_image = "localhost/judge:1"
memory_mb = 64
[solution]
env = {KEY = "x"}
[environment]
build_timeout_sec = 30
cpus = 1.5
memory = "2G"
storage = "512M"
allow_internet = false
workdir = "/app"
env = {A = "1", B = "${B}"}
healthcheck = {command = "test -f /ready", retries = 5, interval_sec = 0.5}
unknown = 1
"""


def parsed(toml, path, **ceilings):
  foreign.write(path, toml)
  limits = dataclasses.replace(harbor.Ceilings(), **ceilings)
  return harbor.read(path, limits).settings


def test_every_field_that_matters_is_read(tmp_path):
  found = parsed(FULL, tmp_path / 'a')
  machine = found.machine
  assert (machine.cpus, machine.memory_bytes) == (1.5, 2 << 30)
  assert (machine.storage_bytes, machine.build_s) == (512 << 20, 30)
  assert (machine.network, machine.workdir) == ('none', '/app')
  assert machine.env == {'A': '1', 'B': '${B}'}
  assert machine.healthcheck == standard.Healthcheck('test -f /ready', 0.5, retries=5)
  assert (found.agent_s, found.agent_user, found.agent_network) == (120, '1000', 'none')
  assert (found.verifier_s, found.verifier_user) == (60, 'judge')
  assert (found.verifier_env, found.solution_env) == (
    {'MODEL': '${JUDGE:-none}'},
    {'KEY': 'x'},
  )
  assert found.separate.image == 'localhost/judge:1'
  assert found.separate.memory_bytes == 64 << 20
  assert found.artifacts == (
    standard.Artifact('/app/out.txt'),
    standard.Artifact('/data', ('*.pyc',)),
  )
  assert found.collect == (standard.Collect('dump > /data/state', 5.0),)
  assert found.family == 'software-engineering'


def test_defaults_are_those_of_harbor_within_the_ceilings(tmp_path):
  """But for the network, which `Containers` bounds."""
  found = parsed('', tmp_path / 'a')
  assert (found.verifier_s, found.machine.build_s, found.agent_s) == (600, 600, None)
  assert found.machine.network == 'public' and found.separate is None
  assert harbor.Containers().network == 'none'
  low = parsed('', tmp_path / 'a', wall_s=30.0)
  assert low.verifier_s == 30


def test_harbor_reads_the_same(tmp_path):
  config = pytest.importorskip('harbor.models.task.config', reason='needs harbor')
  if not hasattr(config, 'TaskConfig'):  # what another test has in its place
    pytest.skip('needs harbor')
  theirs = config.TaskConfig.model_validate_toml(FULL)
  ours = parsed(FULL, tmp_path / 'a')
  environment = theirs.environment
  assert environment.memory_mb << 20 == ours.machine.memory_bytes
  assert environment.storage_mb << 20 == ours.machine.storage_bytes
  assert environment.network_mode.value == 'no-network'


FAULTS = {
  '[environment]\ngpus = 1': 'environment.gpus.*remove',
  '[environment]\ntpu = {type = "v4", topology = "2x2x1"}': 'tpu.*remove',
  '[environment]\nos = "windows"': 'environment.os is .windows.*linux',
  '[[environment.mcp_servers]]\nname = "x"': 'environment.mcp_servers',
  '[[steps]]\nname = "one"': 'steps: .*split the task',
  '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org"]': 'allowlist',
  '[environment]\nallowed_hosts = ["x.org"]': 'allowlist',
  '[agent]\nnetwork_mode = "evil"': 'agent.network_mode is .evil',
  '[environment]\nmemory = "2 bananas"': 'environment.memory is .*size',
  '[environment]\nmemory = "2G"\nmemory_mb = 1': 'environment.memory .*contradicts',
  '[environment]\nmemory_mb = 0': 'environment.memory_mb is 0: must be above 0',
  '[environment]\nmemory_mb = 99999999': 'environment.memory_mb.*ceilings.memory_bytes',
  '[environment]\nstorage_mb = 99999999': 'ceilings.storage_bytes',
  '[environment]\ncpus = 9': 'environment.cpus is 9, above 8.*tasks.ceilings.cpus',
  '[environment]\ncpus = "2"': 'environment.cpus',
  '[environment]\nbuild_timeout_sec = 9999': 'ceilings.build_s',
  '[environment]\nworkdir = "../x"': 'environment.workdir',
  '[environment]\nworkdir = "/a/../b"': 'environment.workdir',
  '[environment]\ndocker_image = "--privileged"': 'docker_image',
  '[environment]\nenv = {"A=B" = "x"}': 'environment.env has .A=B',
  '[environment]\nenv = {A = 1}': 'environment.env.A',
  '[environment.healthcheck]\nretries = 1': 'healthcheck.command is missing',
  '[environment.healthcheck]\ncommand="x"\ninterval_sec=1e9': 'healthcheck.interval',
  '[agent]\ntimeout_sec = 1e9': 'agent.timeout_sec.*ceilings.agent_s',
  '[agent]\nuser = "--privileged"': 'agent.user',
  '[agent]\nuser = -1': 'agent.user',
  '[verifier]\ntimeout_sec = 1e9': 'verifier.timeout_sec.*ceilings.wall_s',
  '[verifier]\ntimeout_sec = 0': 'verifier.timeout_sec is 0',
  '[verifier]\nenvironment_mode = "evil"': 'environment_mode',
  '[verifier]\nenvironment_mode = "shared"\nenvironment = {}': 'remove one of them',
  'artifacts = ["../x"]': r'artifacts\[0\].source',
  'artifacts = [{source = "/x", service = "db"}]': r'artifacts\[0\].service',
  '[[verifier.collect]]\ncommand = "x"\nservice = "db"': r'collect\[0\].service',
  f'x = {"[" * 3000}{"]" * 3000}': 'nested too deep',
  f'x = "{"x" * 70_000}"': 'more than 65536 bytes',
  '[metadata]\nx = nan': 'metadata.x: nan',
}


@pytest.mark.parametrize('toml', FAULTS, ids=lambda toml: ' '.join(toml.split())[:40])
def test_what_is_not_supported_is_named(tmp_path, toml):
  with pytest.raises(harbor.BadTask, match=FAULTS[toml]) as fault:
    parsed(toml, tmp_path / 'a')
  assert 'task.toml' in str(fault.value) and '\n' not in str(fault.value)


COMPOSED = {
  'services: {main: {}, db: {image: x}}': "services.'db': only the service main",
  'services: {main: {privileged: true}}': 'privileged.*not supported',
  'services: {main: {network_mode: host}}': 'network_mode is .host',
  'services: {main: {volumes: ["/:/host"]}}': 'volumes has ./:/host',
  'services: {main: {volumes: [{type: bind, source: /, target: /x}]}}': 'volumes has',
  'services: {main: {build: {context: ../..}}}': 'build.context',
  'services: {main: {build: {context: /}}}': 'build.context',
  'services: {main: {build: {dockerfile: ../../x}}}': 'build.dockerfile',
  'services: {main: {build: {args: {A: 1}}}}': 'build.*args.*not supported',
  'services: {main: {environment: [A B=1]}}': 'environment has .A B',
  'services: {main: {cap_add: [ALL]}}': 'cap_add',
  'services: {main: {image: /}}': "main.image is '/'",
  'services: {main: {image: x, working_dir: ../x}}': 'main.working_dir is',
  'services: {main: {image: x, user: [0]}}': 'main.user is',
  'services: [1]': 'services is',
  'services: {main: {expose: [{80: 1}]}}': 'the key 80: must be text',
  '? [a]\n: 1': 'not YAML',
  'services: {main: {command: "' + '${a:-' * 12_000 + '", x: 1}}': "main.'x'",
  'volumes: {x: {}}': 'volumes: not supported',
  'a: &a [1]\nb: [*a, *a]': 'aliases',
  'a: [': 'not YAML',
  '!!python/object/apply:os.system ["true"]': 'not YAML',
  '[' * 2000: 'nested too deep|not YAML',
}


@pytest.mark.parametrize('text', COMPOSED, ids=lambda text: text[:40])
def test_what_a_compose_file_may_not_have_is_named(tmp_path, text):
  foreign.write(tmp_path / 'a', files={'environment/docker-compose.yaml': text})
  with pytest.raises(harbor.BadTask, match=COMPOSED[text]) as fault:
    harbor.read(tmp_path / 'a')
  assert 'docker-compose.yaml' in str(fault.value) and '\n' not in str(fault.value)


def test_variables_of_a_compose_file_do_not_multiply():
  text = 'services: {main: {command: "' + '$A' * 30_000 + '"}}'
  with pytest.raises(ValueError, match='65536 characters with its variables'):
    service.parse(text, {'A': 'x' * (1 << 20)})


def test_a_compose_file_of_harbor_is_read():
  """As its templates have it."""
  text = """\
services:
  main:
    build: {context: "${CONTEXT_DIR}", dockerfile: Dockerfile.agent}
    image: ${MAIN_IMAGE_NAME}
    command: [sh, -c, sleep infinity]
    working_dir: /app
    environment: ["TEST_DIR=${TEST_DIR}", "MODE=${MODE:-fast}", "KEY=$KEY", HOME]
    volumes: ["${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}"]
    deploy: {resources: {limits: {cpus: "${CPUS}"}}}
"""
  found = service.parse(text, {'KEY': 'k'})
  assert found == service.Service(
    dockerfile='Dockerfile.agent',
    env={'TEST_DIR': '/tests', 'MODE': 'fast', 'KEY': 'k'},
    workdir='/app',
  )
  other = service.parse('services: {main: {image: a/b, command: serve -p 1}}', {})
  assert (other.image, other.command) == ('a/b', 'serve -p 1')


def test_templates_read_only_what_the_job_allows():
  env = {'A': '${SECRET}', 'B': '${OTHER:-b}', 'C': 'x${SECRET}'}
  ours = {'SECRET': 's', 'OTHER': 'o'}
  found = standard.resolved(env, ('SECRET',), ours)
  assert found == {'A': 's', 'B': 'b', 'C': 'x${SECRET}'}
  with pytest.raises(ValueError, match='A needs .*SECRET.*containers.variables'):
    standard.resolved(env, (), ours)
  with pytest.raises(ValueError, match='SECRET.*set it'):
    standard.resolved(env, ('SECRET',), {})


def dataset(root, names):
  for name in names:
    foreign.write(root / name)
  return root


def test_a_flat_dataset_is_split_by_name(tmp_path):
  names = [f'task-{i}' for i in range(60)]
  root = dataset(tmp_path / 'flat', names)
  (root / 'README.md').write_text('x')
  config = harbor.Config(dataset=str(root))
  found = collections.defaultdict(set)
  for split in harbor.SPLITS:
    for index in range(60):
      task = tasks.make(tasks.spec(config, split, index))
      assert task.split == split
      found[split].add(task.directory.path.name)
  assert sorted(name for split in found.values() for name in split) == sorted(names)
  assert len(found['train']) > len(found['dev']) > 0 < len(found['held_out'])
  # The same when the dataset has grown, and on every machine.
  assert harbor.split_of('task-0') == 'train' and 'task-0' in found['train']
  all_train = dataclasses.replace(config, shares={'train': 1.0})
  assert {harbor.split_of(name, all_train.shares) for name in names} == {'train'}


def test_further_forms_of_a_dataset(tmp_path):
  single = foreign.write(tmp_path / 'one')
  for split in harbor.SPLITS:
    task = tasks.make(tasks.spec(harbor.Config(dataset=str(single)), split, 0))
    assert task.directory.path == single and task.split == split
  below = dataset(tmp_path / 'data' / 'tasks', ['a', 'b'])
  config = harbor.Config(dataset=str(below.parent), shares={'dev': 1})
  assert tasks.make(tasks.spec(config, 'dev', 0)).directory.path.parent == below
  assert tasks.families(dataclasses.replace(config, shares={'train': 1})) == {
    'files': 2.0
  }
  made = dataset(tmp_path / 'made' / 'tasks' / 'held_out', ['a'])
  config = harbor.Config(dataset=str(tmp_path / 'made'))
  assert tasks.make(tasks.spec(config, 'held_out', 0)).directory.path == made / 'a'
  with pytest.raises(ValueError, match=r'tasks\.shares'):
    tasks.spec(config, 'train', 0)


def test_settings_reach_every_process_in_the_spec(tmp_path):
  root = foreign.write(tmp_path / 'one')
  job = harbor.Containers(network='public', replace={'a:1': 'b@sha256:x'})
  ceilings = dataclasses.replace(harbor.Ceilings(), cpus=2)
  config = harbor.Config(dataset=str(root), containers=job, ceilings=ceilings)
  spec = tasks.spec(config, 'train', 0)
  task = tasks.make(spec)
  assert task.containers == job and task.wall_s == 60
  assert task.containers.replaced == {'a:1': 'b@sha256:x'}
  assert spec.count('@') == 1
  with pytest.raises(harbor.BadTask, match='cpus is 1, above 0|cpus'):
    low = spec.replace('"cpus":2', '"cpus":1')
    (root / 'task.toml').write_text('[environment]\ncpus = 2')
    tasks.make(low)
  with pytest.raises(ValueError, match='no ceilings of Harbor tasks'):
    tasks.make(spec.replace('network', 'evil'))


def test_tasks_that_cannot_run_fail_together_or_are_left_out(tmp_path):
  root = dataset(tmp_path / 'flat', ['a', 'b', 'c'])
  for name in 'ab':
    (root / name / 'task.toml').write_text('[environment]\ngpus = 1')
  config = harbor.Config(dataset=str(root), shares={'train': 1})
  with pytest.raises(harbor.BadTask, match=r'2 of 3 .*unsupported=skip.*gpus'):
    tasks.spec(config, 'train', 0)
  config = dataclasses.replace(config, unsupported='skip')
  assert tasks.make(tasks.spec(config, 'train', 5)).directory.path.name == 'c'


@pytest.mark.parametrize(
  ('name', 'fault'),
  [
    ('task.toml', 'no task.toml'),
    ('instruction.md', 'no instruction.md'),
    ('tests/test.sh', 'no tests/test.sh'),
    ('environment/Dockerfile', 'no environment/Dockerfile'),
  ],
)
def test_what_is_missing_is_named(tmp_path, name, fault):
  path = foreign.write(tmp_path / 'a')
  (path / name).unlink()
  with pytest.raises(harbor.BadTask, match=fault):
    harbor.read(path)


def test_some_files_are_needed_only_without_others(tmp_path):
  path = foreign.write(tmp_path / 'a', '[environment]\ndocker_image = "localhost/x"')
  (path / 'environment/Dockerfile').unlink()
  assert harbor.read(path).settings.machine.image == 'localhost/x'
  toml = '[verifier]\nenvironment_mode = "separate"'
  path = foreign.write(tmp_path / 'b', toml, files={'tests/Dockerfile': 'FROM x'})
  (path / 'tests/test.sh').unlink()
  assert harbor.read(path).settings.separate


def hostile_link(path):
  (path / 'environment' / 'secret').symlink_to('/etc/passwd')


def hostile_pipe(path):
  os.mkfifo(path / 'solution' / 'pipe')


def hostile_size(path):
  (path / 'environment' / 'big').touch()
  os.truncate(path / 'environment' / 'big', 6 << 30)


def hostile_folder(path):
  (path / 'tests' / 'test.sh').unlink()
  (path / 'tests').rmdir()
  (path / 'tests').symlink_to('/usr/bin')


def hostile_depth(path):
  (path / '/'.join(['tests', *'d' * 70])).mkdir(parents=True)


@pytest.mark.parametrize(
  'attack', [hostile_link, hostile_pipe, hostile_size, hostile_folder, hostile_depth]
)
def test_hostile_directories_are_refused(tmp_path, attack):
  path = foreign.write(tmp_path / 'a')
  attack(path)
  with pytest.raises(harbor.BadTask):
    harbor.read(path)


def test_hostile_names_are_refused(tmp_path):
  foreign.write(tmp_path / 'x@y?{}')
  with pytest.raises(harbor.BadTask, match='the name of a task is'):
    harbor.read(tmp_path / 'x@y?{}')
  path = foreign.write(tmp_path / 'a', '[metadata]\ncategory = "a/../b\\n"')
  assert harbor.read(path).metadata.family == 'harbor'
  assert harbor.read(path).metadata.max_tool_calls == directory.TOOL_CALLS


@pytest.mark.parametrize(
  'settings',
  [
    {'network': 'host'},
    {'engine': 'sh'},
    {'variables': ('A=B',)},
    {'verifier': 'same'},
    {'build_network': 'evil'},
    {'replace': {'a': ''}},
    {'replace': ('a',)},
  ],
)
def test_settings_of_the_job_are_checked(settings):
  with pytest.raises(InvalidSetting, match=min(settings)):
    harbor.Containers(**settings)


def test_shares_are_checked():
  for shares in ({}, {'evil': 1}, {'train': 0}, {'train': -1, 'dev': 2}):
    with pytest.raises(InvalidSetting, match='shares'):
      harbor.Config(shares=shares)


def test_settings_of_a_spec_that_are_too_deep_are_named():
  with pytest.raises(ValueError, match='no ceilings of Harbor tasks.*recursion'):
    tasks.make('harbor/train/a?' + '[' * 5000 + '@/nowhere')
