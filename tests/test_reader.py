"""Ten questions of a reader who has not read the code.

With docs/design.md and the names of files, a reader should find where each answer is.
The tests keep the answers true: file and name exist.
"""

from __future__ import annotations

import importlib

import pytest

QUESTIONS = {
  "Where does a sampled token's log-probability enter its record?": [
    'm2jax.gateway.service:ChatService',
    'm2jax.records:Completion',
  ],
  'Where is it decided which completed items the learner may take?': [
    'm2jax.pool.windowed_fifo:WindowedFifo.take'
  ],
  'Where is the rule by which one token sees another?': [
    'm2jax.kernels.tree_attention.visibility:Visibility'
  ],
  'Where is the CISPO loss of a term?': ['m2jax.rl.estimators.cispo:loss'],
  'Where does a fast success earn more than a slow one?': [
    'm2jax.rl.rewards:RewardConfig'
  ],
  'Where is it written over which mesh axis experts are split?': [
    'm2jax.sharding.rules:PRESETS',
  ],
  'Where are shared prefixes of samples merged into a tree?': [
    'm2jax.forest.merging:merge'
  ],
  'Where does the engine draw the next token from its logits?': [
    'm2jax.rollout.engine.sampling:sample'
  ],
  'Where is the pool rolled back to the checkpoint that a restart begins from?': [
    'm2jax.pool.ledger:rollback',
    'm2jax.pool.data_pool:DataPool.rollback',
  ],
  'Where would you add a parameter to every block?': ['m2jax.params:BLOCK'],
}


@pytest.mark.parametrize('question', QUESTIONS)
def test_the_answer_is_there(question):
  """A file or a name that moves takes its answer with it."""
  for answer in QUESTIONS[question]:
    module, _, path = answer.partition(':')
    found = importlib.import_module(module)
    for name in path.split('.'):
      found = getattr(found, name)
