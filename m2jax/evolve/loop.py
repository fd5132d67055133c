"""The loop: rounds of propose, check, smoke, evaluate, decide; then the third split.

Each phase ends with a line of the record, so a killed process continues after the last
one; whatever a phase needs is a function of the lines before it (`lineage`). Candidates
are read back from their worktree, so that what is checked is what is evaluated.

The third split is opened once, at the end: a marker file holds for whom. A process that
was killed while it was open may finish for the same scaffolds only.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from m2jax.evolve import gate, lineage, record, scaffold, trees
from m2jax.evolve.budget import Cost
from m2jax.evolve.evaluator import Evaluator, Result
from m2jax.evolve.lineage import Lineage, LoopConfig
from m2jax.evolve.proposers import Proposal, Proposer, ProposerFailed
from m2jax.evolve.scaffold import Scaffold
from m2jax.observe import printable, progress

_MARKER = 'sealed.opened'
_SHOWN_FAILURES = 3
_CHANGES_BYTES = 64 << 10
_MEMORY_CHARACTERS = 16_000


class EvaluationFailed(RuntimeError):
  """The incumbent's attempts fail for reasons of the infrastructure."""


class AlreadyOpened(RuntimeError):
  """The third split was opened before, for other scaffolds."""

  repeatable = False


@dataclasses.dataclass(frozen=True)
class Splits:
  """Specs of the tasks by split; no task is in two."""

  development: Sequence[str]
  second: Sequence[str]
  sealed: Sequence[str]

  def __post_init__(self):
    parts = [set(self.development), set(self.second), set(self.sealed)]
    if not all(parts):
      raise ValueError('splits: each needs one or more tasks')
    if len(set().union(*parts)) < sum(map(len, parts)):
      raise ValueError('splits: a task is in two splits')


class Loop:
  """One lineage in one workdir, which this process has locked."""

  def __init__(
    self,
    workdir: pathlib.Path,
    config: LoopConfig,
    start: Scaffold,
    splits: Splits,
    evaluator: Evaluator,
    proposer: Proposer,
    *,
    tools: Sequence[Mapping[str, str]] = (),
    proposer_settings: Mapping[str, Any] | None = None,
    others: Mapping[str, Scaffold] | None = None,
  ):
    """Opens the record, and makes the repository follow it.

    Args:
      workdir: the directory of the lineage.
      config: settings.
      start: the first incumbent.
      splits: the tasks.
      evaluator: runs attempts.
      proposer: proposes changes.
      tools: name and description of the tasks' tools, for the proposer.
      proposer_settings: the proposer's, for the record.
      others: scaffolds that the third split compares too, by name.

    Raises:
      InvalidScaffold: the start is not within the bounds.
      DamagedRecord: see `record.read`.
      ValueError: the record is of other settings.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    self._workdir, self._evaluator, self._proposer = workdir, evaluator, proposer
    self._others = dict(others or {})
    bounds = scaffold.narrowed(config.bounds)
    for name, one in {'start': start, **self._others}.items():
      if found := scaffold.problems(one.values, bounds):
        raise scaffold.InvalidScaffold(f'{name}: {"; ".join(found)}')
    self._record = record.Record(workdir / record.FILE_NAME)
    begin = json.loads(
      json.dumps(
        dict(
          config=dataclasses.asdict(config),
          proposer=dict(proposer_settings or {}),
          files=start.files(),
          digest=start.digest,
          tools=list(tools),
          splits=dataclasses.asdict(splits),
        )
      )
    )
    if self._record.lines:
      first = self._record.lines[0]
      if differing := [name for name in begin if first.get(name) != begin[name]]:
        raise ValueError(
          f'{workdir}: its record has other {", ".join(differing)}: give another '
          '--workdir, or --fresh'
        )
    self.state = lineage.fold(self._record.lines)
    if not self._record.lines:
      self._append('begin', **begin)
    self._trees = trees.Trees(workdir)
    nodes = {k: (node.scaffold, node.parent) for k, node in self.state.nodes.items()}
    self._trees.repair(nodes, self.state.incumbent)

  def run(self) -> Lineage:
    """Runs what is left of the lineage; returns its state.

    Raises:
      EvaluationFailed: more than half of an incumbent's attempts have no score.
      AlreadyOpened: see the class.
    """
    state = self.state
    if not state.attempts:
      self._baseline()
    while not state.stopped:
      for number in sorted({0, state.incumbent} - state.second):
        self._second(number)
      if not state.current and (reason := state.stop()):
        self._append('stop', reason=reason)
      else:
        self._round(state.rounds + 1)
    if state.sealed is None:
      self._sealed()
    return state

  def close(self) -> None:
    """Closes the record."""
    self._record.close()

  def _append(self, kind: str, **fields: Any) -> None:
    self.state.apply(self._record.append(kind, **fields))
    if kind == 'decision':
      reason = printable.one_line(fields['reason'], 200)
      logging.info('round %d: %s: %s', fields['round'], fields['decision'], reason)

  def _say(self, number: int, phase: str) -> None:
    progress.report(f'round {number} of {self.state.config.budget.rounds}: {phase}')

  # --- Phases.

  def _round(self, number: int) -> None:
    state = self.state
    if 'proposal' not in state.current:
      self._say(number, 'propose')
      self._propose(number)
    proposal = state.current['proposal']
    if not proposal['error']:
      if 'checked' not in state.current:
        self._say(number, 'static checks')
        problems, readded = state.problems(proposal)
        self._append('checked', round=number, problems=problems, readded=readded)
      if not state.current['checked']['problems']:
        self._evaluated(number, proposal)
    if (decision := state.decision()) is not None:
      self._say(number, decision['decision'])
      self._append('decision', round=number, **decision)

  def _propose(self, number: int) -> None:
    state, began_s = self.state, time.monotonic()
    parent = state.parent(number)
    proposal, error = Proposal({}), ''
    try:
      proposal = self._proposer.propose(state.view(number, parent))
      size = len(json.dumps(dict(proposal.changes), allow_nan=False))
      if size > _CHANGES_BYTES:
        raise ProposerFailed(f'changes of {size} bytes; at most {_CHANGES_BYTES}')
    except (TypeError, ValueError, RecursionError) as failure:
      error = f'the changes are no JSON object: {failure}'
    except ProposerFailed as failure:
      error = str(failure) or repr(failure)
    changes = {} if error else dict(proposal.changes)
    before = state.nodes[parent].scaffold
    proposed = before.changed(changes)
    valid = not error and not scaffold.problems(proposed.values, state.bounds)
    cost = Cost(proposal.tokens, time.monotonic() - began_s)
    self._append(
      'proposal',
      round=number,
      parent=parent,
      changes=changes,
      files=proposed.files() if valid else {},
      digest=proposed.digest if valid else '',
      diff=scaffold.diff(before, proposed) if valid else '',
      note=_text(proposal.note, 300),
      memory=_text(proposal.memory, _MEMORY_CHARACTERS),
      criticism=_text(proposal.criticism, _MEMORY_CHARACTERS),
      source=_text(proposal.source, 100),
      error=_text(error, 600),
      cost=cost.as_dict(),
    )

  def _evaluated(self, number: int, proposal: record.Line) -> None:
    """Smoke and looks, up to a decision, in a worktree of the round."""
    state = self.state
    folder = self._trees.open(number, proposal['parent'])
    lineage.of_files(proposal['files']).write(folder)
    candidate = scaffold.read(folder, state.bounds)
    commit = self._trees.commit(number, trees.title(number))
    if 'smoke' not in state.current:
      self._say(number, 'smoke')
      drawn = state.drawn(number, state.config.smoke_tasks, 'smoke')
      results, cost = self._attempts(candidate, drawn)
      ends = [result.end_reason for result in results]
      self._append('smoke', round=number, ends=ends, cost=cost.as_dict())
    while (decision := state.decision()) is None:
      self._look(number, len(state.looks), candidate)
    evaluated = bool(state.looks)
    self._say(number, decision['decision'])
    self._append('decision', round=number, **decision)
    self._say(number, 'merge' if decision['decision'] == gate.KEEP else 'prune')
    if evaluated:  # a stepping stone, kept or not
      self._trees.keep(number, commit)
    if decision['decision'] == gate.KEEP:
      self._trees.merge(number)
    self._trees.close(number)

  def _look(self, number: int, look: int, candidate: Scaffold) -> None:
    state = self.state
    drawn = lineage.look_of(state, number, look)
    incumbent = state.incumbent
    self._say(number, f'incumbent on {len(drawn)} tasks')
    before, before_cost = self._attempts(state.nodes[incumbent].scaffold, drawn)
    if sum(result.score is None for result in before) * 2 > len(before):
      raise EvaluationFailed(
        f'of {len(before)} attempts of the incumbent more than half failed for reasons '
        'of the infrastructure (the log has them); the same command continues'
      )
    self._say(number, f'candidate on {len(drawn)} tasks')
    own = drawn if state.config.paired_seeds else [(t, s ^ 1 << 40) for t, s in drawn]
    after, cost = self._attempts(candidate, own)
    pairs = [
      [*one, b.score, a.score] for one, b, a in zip(drawn, before, after, strict=True)
    ]
    self._append(
      'look',
      round=number,
      look=look,
      pairs=pairs,
      incumbent=incumbent,
      failures=_failures(after) if look == 0 else [],
      cost=cost.as_dict(),
      incumbent_cost=before_cost.as_dict(),
    )

  def _baseline(self) -> None:
    self._say(0, 'the start on development tasks')
    drawn = self.state.drawn(0, self.state.config.gate.looks[0], 'pairs')
    results, cost = self._attempts(self.state.nodes[0].scaffold, drawn)
    self._append(
      'baseline',
      round=0,
      scores=_scores(drawn, results),
      failures=_failures(results),
      cost=cost.as_dict(),
    )

  def _second(self, number: int) -> None:
    self._say(number, 'second split')
    scores, cost = self._split('second', self.state.nodes[number].scaffold)
    mean = lineage.mean([s for *_, s in scores if s is not None])
    self._append('second', round=number, scores=scores, mean=mean, cost=cost.as_dict())

  def _sealed(self) -> None:
    state = self.state
    compared = {
      'start': state.nodes[0].scaffold,
      'incumbent': state.nodes[state.incumbent].scaffold,
      **self._others,
    }
    digests = json.dumps({name: one.digest for name, one in compared.items()})
    marker = self._workdir / _MARKER
    try:
      with marker.open('x') as file:
        file.write(digests)
    except FileExistsError:
      if marker.read_text() not in ('', digests):
        raise AlreadyOpened(
          f'{marker}: the third split was opened for other scaffolds; it is opened once'
        ) from None
      marker.write_text(digests)  # '' if it was killed before it wrote
    results, spent = {}, Cost()
    for name, one in compared.items():
      progress.report(f'third split, opened once: {name}')
      results[name], cost = self._split('sealed', one)
      spent += cost
    means = {
      name: lineage.mean([s for *_, s in scores if s is not None])
      for name, scores in results.items()
    }
    pairs = zip(results['start'], results['incumbent'], strict=True)
    d = [b[2] - a[2] for a, b in pairs if a[2] is not None and b[2] is not None]
    low, high = gate.interval(d) if d else (None, None)
    self._append(
      'sealed',
      results=results,
      means=means,
      effect=lineage.mean(d),
      low=low,
      high=high,
      cost=spent.as_dict(),
    )

  def _split(self, name: str, one: Scaffold) -> tuple[list[list], Cost]:
    """Scores on a whole split, with seeds that depend on the task only."""
    specs = self.state.splits[name]
    drawn = [(spec, self.state.seed(name, spec) >> 8) for spec in specs]
    results, cost = self._attempts(one, drawn)
    return _scores(drawn, results), cost

  def _attempts(
    self, one: Scaffold, drawn: Sequence[tuple[str, int]]
  ) -> tuple[list[Result], Cost]:
    began_s = time.monotonic()
    results = self._evaluator.run(one, [s for s, _ in drawn], [x for _, x in drawn])
    if len(results) != len(drawn):
      raise ValueError(f'the evaluator gave {len(results)} results of {len(drawn)}')
    tokens = sum(result.tokens for result in results)
    return results, Cost(tokens, time.monotonic() - began_s, len(drawn))


def _scores(drawn: Sequence[tuple[str, int]], results: Sequence[Result]) -> list[list]:
  return [[*one, result.score] for one, result in zip(drawn, results, strict=True)]


def _failures(results: Sequence[Result]) -> list[dict[str, Any]]:
  """What the proposer is shown of failing attempts: no spec, no seed."""
  failed = [r for r in results if r.score is not None and r.score < 1]
  return [
    {'score': r.score, 'end_reason': r.end_reason, 'text': _text(r.text, 4000)}
    for r in failed[:_SHOWN_FAILURES]
  ]


def _text(value: Any, characters: int) -> str:
  """A text that files and requests accept, cut."""
  return str(value).encode(errors='replace').decode()[:characters]
