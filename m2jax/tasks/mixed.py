"""Several domains in one run: a kind of tasks that is made of other kinds.

docs/facts/m2-and-forge.md §4.10 (mixed-domain RL): every stage mixes domains, and
ratios shift from stage to stage. A domain is a name with a kind of tasks; two domains
may have the same kind, with different scaffolds (`agents.mixed`). Specs are
mixed/DOMAIN/SPEC OF ITS KIND; those of work items mixed/DOMAIN@STAGE/SPEC, since an
agent's context depends on the stage. Families are DOMAIN/FAMILY, so that success is
recorded by domain and by family. Evaluations take the domains in turn: the i-th task of
a domain is the i-th that its kind alone would have.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from m2jax.checks import require
from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib

has_stages = True
RL_ONLY = ('ratios', 'stages')  # fields that demonstrations do not depend on


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """The domains of a run.

  Attributes:
    domains: name -> its tasks.
    ratios: name -> relative frequency of the domain in RL, one per stage; a stage
      beyond the last has the last. A domain without has 1.
    stages: index of the first work item of the second stage, of the third, …
    demonstrated: name, or name/family -> relative frequency in the demonstrations. A
      domain with families has only these there; one that is not given has 1.
  """

  kind: str = 'mixed'
  domains: Mapping[str, task_lib.TasksConfig] = dataclasses.field(default_factory=dict)
  ratios: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
  stages: tuple[int, ...] = ()
  demonstrated: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'stages', tuple(self.stages))
    named = self.domains and not any(set('/@') & set(name) for name in self.domains)
    require(self, bool(named), 'domains', "at least one, with names without '/' or '@'")
    require(self, not self.weights, 'weights', 'empty: each domain has its own')
    rising = list(self.stages) == sorted(set(self.stages))
    require(self, rising and min(self.stages, default=1) > 0, 'stages', 'increasing')
    names = {key.partition('/')[0] for key in self.demonstrated}
    for field, given in (('ratios', set(self.ratios)), ('demonstrated', names)):
      require(self, given <= set(self.domains), field, f'of {tuple(self.domains)}')
    parts = {key.partition('/')[0] for key in self.demonstrated if '/' in key}
    either = not parts & set(self.demonstrated)
    require(self, either, 'demonstrated', 'a domain or its families, not both')
    for stage in range(len(self.stages) + 1):
      ratios = [self.ratio(name, stage) for name in self.domains]
      require(self, min(ratios) >= 0 < max(ratios), 'ratios', 'positive for a domain')

  def ratio(self, domain: str, stage: int) -> float:
    """Relative frequency of a domain in a stage of RL."""
    found = tuple(self.ratios.get(domain, ())) or (1.0,)
    return found[min(stage, len(found) - 1)]

  def stage(self, index: int) -> int:
    """The stage of a work item."""
    return bisect.bisect_right(self.stages, index)

  def shares(self) -> Mapping[str, float]:
    """Relative frequencies in the demonstrations, of domains or of their families."""
    named = {key.partition('/')[0] for key in self.demonstrated}
    rest = {name: 1.0 for name in self.domains if name not in named}
    return dict(self.demonstrated) | rest


class Mixed:
  """A task of a domain: that of its kind, with the domain in spec and family."""

  def __init__(self, domain: str, task: task_lib.Task, spec: str):
    self.domain, self.task, self.spec = domain, task, spec
    self.family = f'{domain}/{task.family}'

  def __getattr__(self, name: str) -> Any:
    return getattr(self.task, name)

  def open(self, **options: Any) -> contextlib.AbstractAsyncContextManager:
    """See `tasks.Task.open`."""
    return self.task.open(**options)

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """See `tasks.Task.verify`."""
    return await self.task.verify(environment, answer)


def families(config: Config, index: int | None = None) -> Mapping[str, float]:
  """Relative frequency of each family for the index-th work item; None: of any stage.

  A family's share of its domain is that of its kind.
  """
  found = {}
  for domain, kind in config.domains.items():
    if index is None:
      ratio = max(config.ratio(domain, s) for s in range(len(config.stages) + 1))
    else:
      ratio = config.ratio(domain, config.stage(index))
    weights = task_lib.families(kind)
    total = sum(weights.values())
    found |= {f'{domain}/{name}': ratio * w / total for name, w in weights.items()}
  return found


def spec(split: str, index: int, seed: int, config: Config, family: str | None) -> str:
  """The spec of the index-th task; see `tasks.spec`.

  Of the training split, one with a family is of a work item, which has a stage; one
  without is a demonstration's.
  """
  names, place = list(config.domains), ''
  if family is not None and split == 'train' and config.stages:
    place = f'@{config.stage(index)}'
  if family is None and split == 'train':
    shares = config.shares()
    rng = random.Random(f'domain/{seed}/{index}')
    family = rng.choices(list(shares), list(shares.values()))[0]
  if family is not None:
    domain, _, family = family.partition('/')
    if domain not in config.domains:
      raise ValueError(f'unknown domain {domain!r}: expected one of {names}')
  else:
    domain, index = names[index % len(names)], index // len(names)
  kind = config.domains[domain]
  if config.partial_credit:
    kind = dataclasses.replace(kind, partial_credit=config.partial_credit)
  inner = task_lib.spec(kind, split, index, seed=seed, family=family or None)
  return f'mixed/{domain}{place}/{inner}'


def domain_of(spec: str) -> tuple[str, str]:
  """Domain, and the spec of its kind. Raises ValueError for a spec without."""
  parts = spec.split('/', 2)
  if len(parts) != 3 or parts[0] != 'mixed':
    raise ValueError(f'{spec!r}: expected mixed/DOMAIN/SPEC')
  return parts[1].partition('@')[0], parts[2]


def stage_of(spec: str) -> int | None:
  """The stage of RL that a spec is of, or None. Raises ValueError for a bad one."""
  _, _, stage = spec.split('/', 2)[1].partition('@')
  return int(stage) if stage else None


def make(spec: str) -> Mixed:
  """The task of a spec."""
  domain, inner = domain_of(spec)
  return Mixed(domain, task_lib.make(inner), spec)


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """The domains' teachers.

  Attributes:
    domains: name -> its teacher.
  """

  kind: str = 'mixed'
  domains: Mapping[str, demonstrations.TeacherConfig] = dataclasses.field(
    default_factory=dict
  )


def lesson(
  task: Mixed, teacher: TeacherConfig, mistakes: list[str]
) -> demonstrations.Lesson:
  """The turns of the domain's teacher."""
  return demonstrations.lesson(task.task, teacher.domains[task.domain], mistakes)


async def demonstrate(
  task: Mixed, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """A demonstration of the domain's teacher."""
  own = teacher.domains[task.domain]
  found = await demonstrations.demonstrate(task.task, environment, own)
  return dataclasses.replace(found, task=task.spec)
