"""GEPA's reflective mutation (L. Agrawal et al., 2025; package `gepa`), by URL.

Each round one text of the scaffold is rewritten by a model that reads it and failing
trajectories, with GEPA's own prompt and parser. Its Pareto selection is not used: the
archive chooses parents and the gate decides, as for every proposer.
"""

from __future__ import annotations

import dataclasses

from m2jax.checks import InvalidSetting
from m2jax.evolve import proposers
from m2jax.evolve.proposers import model

_TEXTS = 'system', 'instruction', 'loops.message'


@dataclasses.dataclass(frozen=True)
class Config(model.Config):
  """The model that rewrites; `attempts` and `recorded` are not used."""

  kind: str = 'gepa'


class Gepa:
  """See the module."""

  def __init__(self, config: Config):
    """Raises InvalidSetting without the package, or with recorded answers."""
    if config.recorded:
      raise InvalidSetting("proposer.kind='gepa' takes a url, no recorded answers")
    try:
      from gepa.strategies import instruction_proposal
    except ModuleNotFoundError as error:
      raise InvalidSetting(
        "proposer.kind='gepa' needs gepa: pip install 'm2jax[evolve]'"
      ) from error
    self._signature = instruction_proposal.InstructionProposalSignature
    self._model, self._config = model.make(config), config

  def propose(self, view: proposers.View) -> proposers.Proposal:
    """See `Proposer.propose`. Without failing trajectories there is no proposal."""
    if not view.failures:
      raise proposers.ProposerFailed('no failing trajectory to reflect on')
    field = _TEXTS[view.round % len(_TEXTS)]
    tokens = 0

    def ask(prompt: str) -> str:
      nonlocal tokens
      text, tokens = self._model.ask([{'role': 'user', 'content': prompt}])
      return text.rpartition('</think>')[2]

    examples = [
      {
        'Trajectory': failure['text'],
        'Feedback': f'score {failure["score"]}, ended with: {failure["end_reason"]}',
      }
      for failure in view.failures
    ]
    current = view.parent.values[field] or ''
    answer = self._signature.run(
      ask,
      {
        'current_instruction_doc': current,
        'dataset_with_feedback': examples,
        'prompt_template': None,
      },
    )
    text = answer['new_instruction'].strip()
    if field == 'instruction' and '{instruction}' not in text:
      text += '\n\n{instruction}'  # where the task is
    source = f'GEPA with {self._config.model} at {self._config.url}'
    changes = {field: text} if text != current else {}
    return proposers.Proposal(
      changes, f'reflection on {field}', tokens=tokens, source=source
    )


make = Gepa
