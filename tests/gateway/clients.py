"""A multi-turn tool task for real clients, and what must hold of its records."""

from __future__ import annotations

import itertools

from tests.gateway.conftest import response_text

QUESTION = 'count the lines of a.txt'
ANSWER = 'the answer is 3'
# What the model writes after 0, 1, … tool results; the second turn has parallel calls.
TURNS = {
  0: response_text('I should look', 'Ok', [('sh', {'cmd': 'ls <a', 'n': 2})]),
  1: response_text('both é', '', [('sh', {'cmd': 'wc a'}), ('sh', {'cmd': 'wc b'})]),
  3: response_text('I think', ANSWER),
}


def script(tok):
  """The task's model: it answers by the number of tool results in its prompt."""

  def answer(request):
    prompt = tok.decode(request.prompt_ids)
    return tok.encode(TURNS[prompt.count('\n<response>')])

  return answer


def shell(cmd: str, n: int = 0) -> str:
  """Run a shell command."""
  return f'3 {cmd} {n}'


def assert_recorded(engine, records) -> None:
  """Law 4: the records are what the engine was asked and sampled, token by token."""
  assert len(records) == len(engine.results)
  for record, (request, result) in zip(records, engine.results, strict=True):
    assert record.prompt_ids.tolist() == list(request.prompt_ids)
    assert record.response_ids.tolist() == result.tokens.tolist()
    assert record.logprobs.tolist() == result.logprobs.tolist()


def assert_extends(records) -> None:
  """Each prompt starts with the whole prompt and response before it."""
  for first, second in itertools.pairwise(records):
    known = first.tokens.tolist()
    assert second.prompt_ids[: len(known)].tolist() == known, second.fork_reason
    assert second.parent == first.id
