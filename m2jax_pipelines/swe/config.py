"""Settings of SWE-scaling."""

from __future__ import annotations

import dataclasses

from m2jax.checks import require
from m2jax_pipelines.candidate import PipelineConfig

INJECTED = ('bug', 'merged', 'test', 'review')
FAMILIES = (*INJECTED, 'release', 'performance')


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """Attributes:
  packages: requirements `name==version` or `name`, in the order in which they are used;
    pure Python, with tests in their source distribution.
  families: which kinds of tasks are made.
  releases: consecutive pairs of releases of each package, newest first.
  repairs: most installations until a package's tests run.
  suite_s: tests of a package are used, fastest first, until they take this long.
  test_s: a test that takes longer is not used.
  batch: mutants that are screened in one sandbox command.
  largest_f2p: a mutant that breaks more than this share of the tests is too obvious.
  merge, invert, review_: every n-th bug also gives a task of these families.
  slow: a task of performance is looked for after every n-th candidate of a bug.
  """

  kind: str = 'swe'
  packages: tuple[str, ...] = (
    'isodate==0.7.2',
    'inflection==0.5.1',
    'toolz==1.1.0',
    'cachetools==7.0.0',
    'sqlparse==0.5.5',
    'boltons==25.0.0',
    'schema==0.7.8',
    'tabulate==0.9.0',
    'mistune==3.1.4',
    'more-itertools==10.8.0',
    'pyparsing==3.2.5',
    'tomlkit==0.13.3',
  )
  dev: tuple[str, ...] = ('inflection',)
  held_out: tuple[str, ...] = ('schema', 'isodate')
  families: tuple[str, ...] = FAMILIES
  releases: int = 1
  repairs: int = 4
  suite_s: float = 4.0
  test_s: float = 0.5
  batch: int = 16
  largest_f2p: float = 0.5
  merge: int = 6
  invert: int = 5
  review_: int = 8
  slow: int = 20

  def __post_init__(self):
    super().__post_init__()
    unknown = sorted(set(self.families) - set(FAMILIES))
    require(self, not unknown, 'families', f'of {FAMILIES}; not {unknown}')
    require(self, self.batch > 0, 'batch', 'above 0')
    require(self, self.slow > 0, 'slow', 'above 0')
    require(self, self.packages, 'packages', 'at least one')
