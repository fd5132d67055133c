"""What is released: wheels, sdists and versions, and the commands that readers paste.

The wheels are installed into an environment of their own that reads the other packages
of this one, but not its editable m2jax; commands run in an empty folder.
"""

from __future__ import annotations

import configparser
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import types
import venv
import zipfile

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.experiments import conftest

ROOT = pathlib.Path(__file__).parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / 'setup.cfg')
PIPELINES = tomllib.loads((ROOT / 'm2jax_pipelines' / 'pyproject.toml').read_text())
LOCK = tomllib.loads((ROOT / 'uv.lock').read_text())
# Not part of a release: .gitignore, and what git itself has.
LEFT_OUT = shutil.ignore_patterns(
  *('.git', '.venv*', '.cache', '.*_cache', '.hypothesis', '__pycache__', '*.egg-info'),
  *('build', 'dist', 'workdir'),
)
# Command of a page → the test that executes it, or what it abbreviates; '.ci/run' does.
COMMANDS = {
  'm2jax forge --config=forge:smoke --workdir=workdir/smoke': 'test_the_wheel_trains',
  'pip install . ./m2jax_pipelines -c constraints.txt': 'test_metadata',
  'make forge': 'test_the_wheel_trains',
  'make forge-tasks': 'tests/pipelines/test_make_all.py',
  'make lock ARGS=--upgrade': 'test_the_lock_has_every_requirement',
  'make setup': '.ci/run',
  'make test': '.ci/run',
  'python -m experiments.forge --config=configs/forge.py:smoke '
  '--workdir=workdir/smoke': 'test_the_wheel_trains',
  'python -m experiments.serve --config=configs/serve.py --checkpoint=workdir/forge '
  '--port=8000': 'test_the_wheel_serves',
  'uv sync --all-packages --extra test': 'test_the_lock_has_every_requirement',
}
# Smaller than `:smoke`, as in tests/experiments.
SMALL = [
  *conftest.ENGINE,
  *(f'--config.model.{field}' for field in conftest.SMALL),
  '--config.episodes.backend=rlimit_only',
  '--config.rl.steps=1',
]


def requirements() -> list[str]:
  """Those of both distributions, with every extra."""
  lists = [SETUP['options']['install_requires']]
  lists += SETUP['options.extras_require'].values()
  lines = [line for text in lists for line in text.splitlines()]
  lines += PIPELINES['project']['dependencies']
  return [line for line in lines if line and not line.startswith('#')]


def commands(page: str) -> set[str]:
  """Lines of the page's fenced blocks of commands, without comments."""
  text = (ROOT / page).read_text()
  found = set()
  for language, block in re.findall(r'(?ms)^```(\w*)\n(.*?)^```', text):
    if language not in ('', 'bash', 'sh'):
      continue
    for line in re.sub(r'\\\n\s*', '', block).splitlines():
      line = line.partition('#')[0].strip()
      if re.match(r'(make|python|pip|uv|m2jax|\.venv/\S+|git|curl)\s', line):
        found.add(line)
  return found


def test_every_command_of_a_page_is_tested():
  """Of the pages that one reads first; none is listed that no page has."""
  pages = ('README.md', 'docs/quickstart.md', 'CONTRIBUTING.md')
  assert set().union(*map(commands, pages)) == set(COMMANDS)
  for command, where in COMMANDS.items():
    if where.startswith('test_'):
      assert where in globals(), where
    elif where == '.ci/run':
      target = {'make setup': '.venv/.installed'}.get(command, command)
      assert target in (ROOT / where).read_text(), command
    else:
      assert (ROOT / where).exists(), where


def test_make_forge_is_the_command_of_the_readme():
  """The target's recipe is the job that the other commands name."""
  recipe = re.search(
    r'(?m)^forge: setup\n((?:\t.*\n)+)', (ROOT / 'Makefile').read_text()
  )
  assert (
    '-m experiments.forge' in recipe[1] and '--config=configs/forge.py' in recipe[1]
  )


def test_one_version():
  """Package, pipelines, changelog and citation agree."""
  version = SETUP['metadata']['version']
  assert PIPELINES['project']['version'] == version
  assert f'version = {{{version}}}' in (ROOT / 'README.md').read_text()
  changes = (ROOT / 'CHANGELOG.md').read_text()
  assert re.findall(r'(?m)^## \[(\d\S*)\] - ', changes)[0] == version


def test_the_lock_has_every_requirement():
  """In a version that fits, from PyPI alone; constraints.txt has the same versions."""
  locked: dict[str, set[str]] = {}
  for package in LOCK['package']:
    if 'editable' not in package['source']:
      assert package['source'] == {'registry': 'https://pypi.org/simple'}, package
      locked.setdefault(package['name'], set()).add(package['version'])
    urls = [file['url'] for file in package.get('wheels', ())]
    urls += [package['sdist']['url']] if 'sdist' in package else []
    assert all(u.startswith('https://files.pythonhosted.org/') for u in urls), package
  for line in requirements():
    need = Requirement(line)
    if need.name != 'm2jax':
      versions = locked[canonicalize_name(need.name)]
      assert any(need.specifier.contains(v) for v in versions), line
  pins = (ROOT / 'constraints.txt').read_text().splitlines()[1:]
  assert len(pins) > 100
  for pin in map(Requirement, pins):
    (equal,) = pin.specifier
    assert equal.version in locked[canonicalize_name(pin.name)], pin


@pytest.fixture(scope='module')
def release(tmp_path_factory):
  """Wheels and sdists by distribution, the files they are of, and an installation."""
  pytest.importorskip('pip')
  root = tmp_path_factory.mktemp('release')
  source = root / 'source'
  shutil.copytree(ROOT, source, ignore=LEFT_OUT)
  files = {str(p.relative_to(source)) for p in source.rglob('*') if p.is_file()}
  wheels, sdists = {}, {}
  for name, folder in (('m2jax', '.'), ('m2jax_pipelines', 'm2jax_pipelines')):
    out = root / 'dist' / name
    build = [sys.executable, '-m', 'build', '--no-isolation', '--outdir', out]
    done = subprocess.run([*build, source / folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheels[name],), (sdists[name],) = out.glob('*.whl'), out.glob('*.tar.gz')
  python = root / 'venv' / 'bin' / 'python'
  venv.create(root / 'venv', with_pip=False)
  site = sysconfig.get_path('purelib', vars={'base': str(root / 'venv')})
  # Files that make the checkout importable are read in the first folder only.
  pathlib.Path(site, 'others.pth').write_text(sysconfig.get_path('purelib'))
  install = [sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet']
  install += ['--no-deps', '--no-index', '--force-reinstall', *wheels.values()]
  subprocess.run(install, check=True)
  outside = root / 'outside'
  outside.mkdir()
  return types.SimpleNamespace(
    files=files,
    wheels=wheels,
    sdists=sdists,
    site=site,
    python=python,
    m2jax=python.with_name('m2jax'),
    outside=outside,
  )


def run(release, *command, code=0) -> str:
  """Runs a command outside the checkout; its output."""
  env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  done = subprocess.run(
    command, cwd=release.outside, env=env, capture_output=True, text=True
  )
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout + done.stderr


@pytest.mark.long
def test_wheels_and_sdists_have_every_file(release):
  """Code, templates, scripts and configs; and no name of others at the top."""
  for name, wheel in release.wheels.items():
    packed = set(zipfile.ZipFile(wheel).namelist())
    moved = {f for f in packed if f.startswith('m2jax/_jobs/')}
    plain = {f for f in packed - moved if '.dist-info/' not in f}
    assert {f.partition('/')[0] for f in plain} == {name}
    in_tree = {f for f in release.files if f.startswith(f'{name}/')}
    assert plain == in_tree - {f'{name}/pyproject.toml'}
    if name == 'm2jax':
      folders = 'configs/', 'experiments/'
      jobs = {f'm2jax/_jobs/{f}' for f in release.files if f.startswith(folders)}
      assert moved == jobs
    with tarfile.open(release.sdists[name]) as sdist:
      packed = {member.partition('/')[2] for member in sdist.getnames()}
    want = release.files if name == 'm2jax' else {f.partition('/')[2] for f in in_tree}
    assert want <= packed


@pytest.mark.long
def test_metadata(release):
  """What an index shows."""
  for name, wheel in release.wheels.items():
    packed = zipfile.ZipFile(wheel)
    (path,) = (f for f in packed.namelist() if f.endswith('.dist-info/METADATA'))
    text = packed.read(path).decode()
    head, _, body = text.partition('\n\n')
    assert f'\nName: {name}\n' in head and '\nRequires-Python: >=3.11' in head
    assert '\nDescription-Content-Type: text/markdown' in head and body.strip()
    assert '\nLicense-Expression: Apache-2.0\n' in head
    assert '\nSummary: ' in head and head.count('\nClassifier: ') > 3


@pytest.mark.long
def test_the_readme_s_python_runs_on_the_wheel(release):
  """As pasted, with the installed package."""
  page = (ROOT / 'README.md').read_text()
  (code,) = re.findall(r'(?s)```python\n(import jax.*?)```', page)
  code += 'print(logits.shape, logprobs.shape, model.__file__)'
  output = run(release, release.python, '-c', code)
  assert '(1, 4, 768) (1, 8)' in output and release.site in output


@pytest.mark.long
def test_user_errors_of_the_command(release):
  """One line that says what there is, and code 2."""
  forge = release.m2jax, 'forge'
  assert "unknown job 'nosuch'" in run(release, release.m2jax, 'nosuch', code=2)
  assert 'The main job' in run(release, release.m2jax, '--help')
  output = run(release, *forge, '--config=nosuch:smoke', code=2)
  assert 'these are ablations, ' in output and 'forge, ' in output
  output = run(release, *forge, '--config=forge', '--config.rl.stepz=1', code=2)
  assert "no field 'stepz'; config.rl has " in output and ' steps' in output
  assert not any(release.outside.iterdir())


def outside_command(release, command: str, **values: str) -> list[str]:
  """A command of a page, by the installed program and with these values of flags."""
  (listed,) = (c for c in COMMANDS if c.startswith(command))
  job, *flags = re.split(r'm2jax |python -m experiments\.', listed)[1].split()
  pairs = dict(flag.split('=', 1) for flag in flags) | values
  return [release.m2jax, job, *(f'{flag}={value}' for flag, value in pairs.items())]


@pytest.fixture(scope='module')
def trained(release):
  """(workdir, output) of the README's command, smaller still."""
  command = outside_command(release, 'm2jax forge')
  return release.outside / 'workdir' / 'smoke', run(release, *command, *SMALL)


@pytest.mark.long
def test_the_wheel_trains(trained):
  """Every phase, with the packaged config, the sandbox and the report."""
  workdir, output = trained
  assert 'after SFT' in output and 'after RL' in output
  page = (workdir / 'report.html').read_text()
  assert '<style>' in page and 'held-out' in page.lower()


@pytest.mark.long
def test_the_wheel_serves(release, trained):
  """The README's command on that run's checkpoint: its API and the page are there."""
  workdir, _ = trained
  values = {'--checkpoint': str(workdir), '--port': '0'}
  command = outside_command(release, 'python -m experiments.serve', **values)
  log = release.outside / 'log'
  with log.open('w') as file:
    server = subprocess.Popen(
      [*command, *conftest.ENGINE], cwd=release.outside, stdout=file, stderr=file,
      start_new_session=True,
    )  # fmt: skip
  try:
    url = conftest.wait_for(log, r'at (http://127\.0\.0\.1:\d+/v1)', server)[1]
    key = {'authorization': 'Bearer any-key'}
    found = httpx.get(f'{url}/models', headers=key, timeout=60).json()
    assert [model['id'] for model in found['data']] == ['m2jax']
    conftest.wait_for(log, 'Ctrl-C stops it', server)
    os.killpg(server.pid, signal.SIGINT)
    assert server.wait(60) == 0, log.read_text()
  finally:
    server.kill()
