"""An environment of Harbor for tests: a directory and processes of this machine."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import types
from pathlib import Path


def _fakes() -> None:
  """Stands for the part of Harbor that is used, if Harbor is not installed."""

  class Any:
    def __init__(self, *arguments, **options):
      self.arguments = arguments
      vars(self).update(options)

  class Factory:
    @staticmethod
    def create_environment_from_import_path(import_path, **options):
      module, _, name = import_path.partition(':')
      return getattr(sys.modules[module], name)(**options)

    @staticmethod
    def create_environment(type, **options):
      raise RuntimeError(f'{type}: no credentials')

  class Kind(str):
    def __new__(cls, name):
      if name != 'daytona':
        raise ValueError(f'{name!r} is not a valid EnvironmentType')
      return super().__new__(cls, name)

  modes = types.SimpleNamespace(NO_NETWORK='no-network', PUBLIC='public')
  modules = {
    'harbor.environments.base': dict(BaseEnvironment=Any, ExecResult=Any),
    'harbor.environments.factory': dict(EnvironmentFactory=Factory),
    'harbor.models.environment_type': dict(EnvironmentType=Kind),
    'harbor.models.task.config': dict(
      EnvironmentConfig=Any, NetworkMode=modes, NetworkPolicy=Any
    ),
    'harbor.models.trial.paths': dict(TrialPaths=Any),
  }
  for name, contents in modules.items():
    parts = name.split('.')
    for end in range(1, len(parts) + 1):
      package = '.'.join(parts[:end])
      sys.modules.setdefault(package, types.ModuleType(package))
    vars(sys.modules[name]).update(contents)


try:
  import harbor.environments.base as base
except ImportError:
  _fakes()
  base = sys.modules['harbor.environments.base']


class Local(base.BaseEnvironment):
  """Its root is a directory; `fails` are methods that raise."""

  fails: frozenset[str] = frozenset()
  made: list[Local] = []

  def __init__(self, **options):
    super().__init__(**options)
    self.root = Path(tempfile.mkdtemp(prefix='m2jax-local-'))
    self.options = options
    Local.made.append(self)

  @staticmethod
  def type() -> str:
    return 'local'

  def _validate_definition(self):
    pass

  def _validate_network_policy_support(self):
    pass

  def _validate_resource_mode_support(self):
    pass

  def _check(self, name: str) -> None:
    if name in self.fails:
      raise ConnectionError(f'{name}: the provider is gone')

  async def start(self, force_build: bool) -> None:
    self._check('start')

  async def stop(self, delete: bool) -> None:
    shutil.rmtree(self.root, ignore_errors=True)

  async def upload_file(self, source_path, target_path) -> None:
    shutil.copy(source_path, target_path)

  async def upload_dir(self, source_dir, target_dir) -> None:
    self._check('upload')
    shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

  async def download_file(self, source_path, target_path) -> None:
    shutil.copy(source_path, target_path)

  async def download_dir(self, source_dir, target_dir) -> None:
    shutil.copytree(source_dir, target_dir)

  async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
    self._check('exec')
    process = await asyncio.create_subprocess_exec(
      *('bash', '-c', command),
      cwd=self.root if cwd in (None, '/') else cwd,
      env={'PATH': '/usr/bin:/bin', **(env or {})},
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
    return base.ExecResult(
      stdout=out.decode(errors='replace'),
      stderr=err.decode(errors='replace'),
      return_code=process.returncode,
    )
