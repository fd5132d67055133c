"""As much of xmanager 0.8.5.post1 as launch.xm_launch uses, recording what it is given.

tests/launch/test_xm.py runs the same tests on this and, where it is installed, on the
real package.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

ResourceType = enum.Enum('ResourceType', ['CPU', 'TPU_V5P', 'LOCAL_GPU'])
ResourceType.__str__ = lambda self: self.name
ServiceTier = enum.Enum('ServiceTier', {'PROD': 200, 'BATCH': 100})
Architecture = enum.Enum('Architecture', ['HASWELL', 'ARM'])


class JobRequirements:
  """Keywords as the real one's: resources by name, the rest by its own."""

  def __init__(self, location=None, replicas=1, service_tier=None, **resources):
    self.architecture = resources.pop('architecture', None)
    named = {ResourceType[name.upper()]: value for name, value in resources.items()}
    tpus = [r for r in named if r.name.startswith('TPU_')]
    self.task_requirements = named
    self.accelerator = tpus[0] if tpus else None
    self.topology = types.SimpleNamespace(name=named[tpus[0]]) if tpus else None
    self.location, self.replicas, self.num_slices = location, replicas, 1
    self.service_tier = service_tier or ServiceTier.PROD


@dataclasses.dataclass
class Kubernetes:
  requirements: Any = dataclasses.field(default_factory=JobRequirements)
  tpu_capability: Any = None
  Spec = type('KubernetesSpec', (), {})


class Local:
  Spec = type('LocalSpec', (), {})


@dataclasses.dataclass
class Job:
  executable: Any
  executor: Any
  args: list[str]


class MockExperiment:
  """Like xm_mock's: keeps the jobs."""

  def __init__(self):
    self.launched_jobs, self.packaged = [], []

  def package(self, packageables):
    self.packaged += packageables
    return packageables

  def add(self, job):
    self.launched_jobs += job.jobs.values() if hasattr(job, 'jobs') else [job]

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    pass


def modules() -> dict[str, Any]:
  """What to put into sys.modules."""
  record = lambda **kwargs: types.SimpleNamespace(**kwargs)
  xm = record(
    Architecture=Architecture,
    Binary=lambda path: record(path=path),
    Container=lambda image_path: record(image_path=image_path),
    Job=Job,
    JobGroup=lambda **jobs: record(jobs=jobs),
    JobRequirements=JobRequirements,
    Packageable=lambda spec, executor: record(executable_spec=spec),
    ServiceTier=ServiceTier,
  )
  xm_local = record(Kubernetes=Kubernetes, Local=Local)
  xmanager = record(xm=xm, xm_local=xm_local)
  xm_mock = record(MockExperiment=MockExperiment)
  named = {'xm': xm, 'xm_local': xm_local, 'xm_mock': xm_mock}
  return {'xmanager': xmanager, **{f'xmanager.{k}': v for k, v in named.items()}}
