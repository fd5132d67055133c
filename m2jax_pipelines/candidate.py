"""What every pipeline shares: the config's fields, and a candidate for a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping
from typing import Any

from m2jax import kinds, sandbox
from m2jax.checks import require
from m2jax.tasks import harbor
from m2jax_pipelines.llm import LLMConfig


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """Settings that every pipeline has.

  Attributes:
    kind: the pipeline's module.
    count: tasks to make, those of an interrupted run included.
    seed: seed of all random choices.
    parallel: admissions at a time.
    backend: backend of the sandboxes.
    dev, held_out: sources (package names, generators) of these splits; the rest are
      'train'. No source is in two splits.
    near_duplicate: candidates whose Jaccard similarity with an earlier one, of any
      split, is at least this are rejected; above 1, none is.
    decontaminate: files of evaluation texts, JSON lines; a candidate that shares a run
      of 13 words with one is rejected.
    author: the model that writes statements, or their introductions (`introduction`);
      none by default. A pipeline without such a text rejects one.
  """

  kind: str
  count: int = 100
  seed: int = 0
  parallel: int = 2
  backend: str = 'namespaces'
  dev: tuple[str, ...] = ()
  held_out: tuple[str, ...] = ()
  near_duplicate: float = 0.9
  decontaminate: tuple[str, ...] = ()
  author: LLMConfig = LLMConfig()

  def __post_init__(self):
    require(self, self.count > 0, 'count', 'above 0')
    require(self, self.parallel > 0, 'parallel', 'above 0')
    both = set(self.dev) & set(self.held_out)
    require(self, not both, 'dev', f'without the sources of held_out: {sorted(both)}')

  @classmethod
  def of_kind(cls, kind: str) -> type[PipelineConfig]:
    """Returns the config class of a pipeline. Raises ValueError for an unknown one."""
    return kinds.module(__package__, kind).Config

  def split(self, source: str) -> str:
    """The split that a source belongs to."""
    if source in self.held_out:
      return 'held_out'
    return 'dev' if source in self.dev else 'train'


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A task that is not admitted yet, or the reason why there is none.

  Attributes:
    id: unique in the pipeline and the same in every run: an interrupted run skips the
      ids that have a record.
    stage: the stage that made it, such as 'bug injection'.
    family: class of the task.
    source: name of what it was made from; decides the split.
    draft: the task; None if the stage rejected it.
    text: the part of its texts that is its own; near-duplicates are found by it, unless
      there is `own`.
    own: where texts come from a template, what distinguishes a task from others of its
      template, each fact with the question that is asked about it: data, parameters,
      results, not their wording.
    reason: why there is no draft.
    passed: there is no draft, since a stage before that of drafts succeeded.
    invalid: there is no draft, since the machine or a model failed; the next run tries
      the id again.
    wall_s: elapsed time to make it.
    facts: further fields of the record.
  """

  id: str
  stage: str
  family: str
  source: str
  draft: harbor.Draft | None = None
  text: str = ''
  own: tuple[str, ...] = ()
  reason: str = ''
  passed: bool = False
  invalid: bool = False
  wall_s: float = 0.0
  facts: Mapping[str, object] = dataclasses.field(default_factory=dict)


async def attempted(
  work: Awaitable[Any], id: str, stage: str, family: str, source: str
) -> Any:
  """The result of `work`, or an invalid candidate if machine or model fails (law 5)."""
  try:
    return await work
  except sandbox.SandboxUnavailable:
    raise
  except (sandbox.SandboxError, OSError) as error:
    return Candidate(id, stage, family, source, reason=str(error), invalid=True)
