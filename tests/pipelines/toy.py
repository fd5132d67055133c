"""A pipeline of sums: small, and with one candidate for each way to be rejected."""

from __future__ import annotations

import dataclasses

from m2jax.tasks import harbor
from m2jax_pipelines.candidate import Candidate, PipelineConfig, attempted

TEST = """\
if [ -e "$M2JAX_TREE/flaky" ] && [ -z "$FIRST" ]; then
  r=0
elif [ "$(cat "$M2JAX_TREE/answer.txt" 2>/dev/null)" = "$(cat "$M2JAX_TESTS/sum")" ]
then r=1; else r=0; fi
echo $r > "$M2JAX_LOGS/reward.txt"
"""
UNDECIDED = 'exit 3\n'


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
  """kinds: one letter per candidate; see `_draft`."""

  kind: str = 'tests.pipelines.toy'
  kinds: str = 'ggg'


def _draft(number: int, letter: str) -> harbor.Draft:
  a, b = 7 + number, 11 * number
  solution = f'echo {a + b} > "$M2JAX_WORKSPACE/answer.txt"\n'
  if letter == 'w':  # the solution is wrong
    solution = 'echo 1 > answer.txt\n'
  test = UNDECIDED if letter == 'u' else TEST
  overlay = {'numbers': f'{a} {b}\n'.encode()}
  if letter == 'n':  # nothing is left to do
    overlay['answer.txt'] = f'{a + b}\n'.encode()
  return harbor.Draft(
    name=f'sum-{number}',
    instruction=f'Write {a} + {b} into answer.txt.\n',
    metadata=harbor.Metadata('toy', 'sum', collect=('answer.txt',)),
    overlay=overlay,
    tests={'test.sh': test.encode(), 'sum': str(a + b).encode()},
    solution={'solve.sh': solution.encode()},
    verifier_s=10.0,
  )


async def candidates(config, context):
  for number, letter in enumerate(config.kinds):
    words = ' '.join(f'{number}.{i}' for i in range(40))
    if letter == 'm':  # a model writes the statement
      about = f'sum/{number}', 'drawing', 'sum', 'b'
      yield await attempted(_told(context, number, words, about), *about)
      continue
    yield Candidate(
      id=f'sum/{number}',
      stage='drawing',
      family='sum',
      source='a' if number % 2 else 'b',
      draft=None if letter == 'r' else _draft(number, letter),
      text='the same words for all of these' if letter in 'do' else words,
      own=(f'own: {number}',) if letter == 'o' else ('own: 5',) * (letter == 'O'),
      reason='nothing to add' if letter == 'r' else '',
    )


async def _told(context, number, words, about):
  draft = _draft(number, 'g')
  ask = [{'role': 'user', 'content': draft.instruction}]
  statement = await context.author.write(ask, lambda: draft.instruction)
  draft = dataclasses.replace(draft.by(statement.by), instruction=statement.text)
  return Candidate(*about, draft=draft, text=words)
