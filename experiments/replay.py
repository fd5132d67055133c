"""Prints every term of a trajectory's loss, as the learner reads it from the pool.

  python -m experiments.replay --workdir=workdir/forge --trajectory=SESSION
  python -m experiments.replay --workdir=workdir/forge --trajectory=SESSION \
    --checkpoint=workdir/forge --step=16 --record

SESSION, or its unique beginning, is what `experiments.trajectories` and the trajectory
page show. A line is one term: token, text, old log-probability, advantage, weight and
version. With --checkpoint these weights score the tokens too, which adds the learner's
log-probability, the ratio and the entropy; --record also appends them to the run's
annotations, by which the page colours tokens.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
from absl import flags

from experiments import common
from m2jax.checkpoint import CheckpointError
from m2jax.records import Completion
from m2jax.viewer.run import Run

TRAJECTORY = flags.DEFINE_string('trajectory', None, 'Session, or its beginning.')
POOL = flags.DEFINE_string('pool', '', "URL of the pool; default: the workdir's.")
CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Weights that score the tokens.')
STEP = flags.DEFINE_integer('step', None, 'Checkpoint step; default: the latest.')
RECORD = flags.DEFINE_bool('record', False, 'Append the scores to the annotations.')
JSON = flags.DEFINE_bool('json', False, 'Print one JSON object a line.')

_COLUMNS = (
  ('turn', 4), ('token', 6), ('id', 7), ('text', 18), ('old_logprob', 12),
  ('advantage', 10), ('weight', 11), ('version', 7), ('learner_logprob', 15),
  ('ratio', 9), ('entropy', 9),
)  # fmt: skip


def main():
  if not TRAJECTORY.value:
    raise common.BadInput('--trajectory is missing: give a session')
  if RECORD.value and not CHECKPOINT.value:
    raise common.BadInput('--record: needs --checkpoint, whose scores it records')
  run = Run(common.workdir(), POOL.value)
  with contextlib.closing(run):
    session = _session(run)
    recorded = [c for _, c in run.reader.recorded(session) if c is not None]
    if not recorded:
      raise common.BadInput(
        f'--trajectory={session}: its token ids were pruned; the pool keeps those that '
        'a checkpoint may still need'
      )
    scores = {}
    if CHECKPOINT.value:
      scores, version = _score(recorded)
      if RECORD.value:
        _record(run, session, scores, version)
    _print(run, session, recorded, scores)


def _session(run: Run) -> str:
  found = run.reader.sessions_like(TRAJECTORY.value)
  if len(found) != 1:
    several = (
      f'is the beginning of {", ".join(found)}' if found else 'is not in the run'
    )
    raise common.BadInput(f'--trajectory={TRAJECTORY.value}: {several}')
  return found[0]


def _score(completions: list[Completion]) -> tuple[dict[str, tuple], int]:
  """(log-probabilities, entropies) of the response tokens by completion; the step.

  Computed by the learner's forward pass, one completion a row, with the expert ids that
  were recorded.
  """
  import jax

  from m2jax import forest, model
  from m2jax.checkpoint import policy

  found = policy.load(CHECKPOINT.value, STEP.value)
  longest = max(len(c.tokens) for c in completions)
  row_tokens = 1 << (longest - 1).bit_length()  # few shapes to compile
  cfg = found.model
  trunk = {
    kind: {name: leaf for name, leaf in found.variables[kind].items() if name != 'mtp'}
    for kind in ('params', 'router')
  }
  cfg = type(cfg)(**(vars(cfg) | {'num_mtp_modules': 0}))
  forward = jax.jit(lambda variables, batch: model.forward(cfg, variables, batch)[:2])
  scores = {}
  for c in completions:
    sample = forest.Sample(c.tokens, len(c.prompt_ids), c.logprobs, experts=c.experts)
    batch = forest.merge([sample], row_tokens=row_tokens)
    logprob, entropy = forward(trunk, batch)
    own = slice(len(c.prompt_ids), len(c.tokens))  # one chain: in order of position
    scores[c.id] = np.asarray(logprob[0, own]), np.asarray(entropy[0, own])
  return scores, found.step


def _record(run: Run, session: str, scores: dict[str, tuple], version: int) -> None:
  for id_, (logprobs, entropies) in scores.items():
    for name, values in (('learner_logprob', logprobs), ('entropy', entropies)):
      run.annotations.tokens(session, id_, name, version, values)


def _print(run: Run, session: str, completions: list[Completion], scores) -> None:
  bundle = run.bundles.session(session)
  columns = {c['id']: c for c in bundle['completions']}
  shown = [(name, n) for name, n in _COLUMNS if scores or name not in _SCORED]
  if not JSON.value:
    print('  '.join(f'{name:>{n}}' for name, n in shown))
  for c in completions:
    for term in terms(c, columns[c.id], bundle['vocab'], scores.get(c.id)):
      if JSON.value:
        print(json.dumps(term))
      else:
        print('  '.join(_cell(term.get(name), n) for name, n in shown))


_SCORED = 'learner_logprob', 'ratio', 'entropy'


def terms(c: Completion, column: dict[str, Any], vocab, scores=None) -> list[dict]:
  """The loss terms of a completion; `scores`: of `_score`."""
  out = []
  for i, id_ in enumerate(c.response_ids.tolist()):
    term = {
      'completion': c.id,
      'turn': c.turn,
      'token': i,
      'id': id_,
      'text': vocab.get(id_),
      'old_logprob': float(c.logprobs[i]),
      'advantage': column['advantage'],
      'weight': column['weight'],
      'version': int(c.versions[i]),
    }
    if scores is not None:
      learner = float(scores[0][i])
      term |= {'learner_logprob': learner, 'entropy': float(scores[1][i])}
      term['ratio'] = float(np.exp(learner - term['old_logprob']))
    out.append(term)
  return out


def _cell(value: Any, n: int) -> str:
  if value is None:
    return f'{"–":>{n}}'
  if isinstance(value, str):
    return f'{json.dumps(value, ensure_ascii=True)[:n]:>{n}}'
  return f'{value:>{n}.5g}' if isinstance(value, float) else f'{value:>{n}}'


if __name__ == '__main__':
  common.run(main, CheckpointError)
