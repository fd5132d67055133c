"""A run as a job records it: text, weights that change, edited contexts, scores."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from m2jax import records
from m2jax.observe import findings, metrics
from m2jax.pool.data_pool import DataPool
from m2jax.text import chat, tokenizer
from m2jax.viewer.run import Run
from tests.gateway.conftest import response_text

_TOOL = {
  'type': 'function',
  'function': {
    'name': 'sh',
    'description': 'Run a shell command.',
    'parameters': {'type': 'object', 'properties': {'cmd': {'type': 'string'}}},
  },
}
_WORDS = 'orders logs notes users drafts images'.split()
FAMILIES = 'count_lines', 'rename_files', 'find_largest'
RANKS, EDITED = 4, 3  # trajectories of a group; the one whose context is edited


def succeeds(item: int, rank: int) -> bool:
  return rank in (0, EDITED) or item % 4 == 3


def _turns(item: int, rank: int) -> list[tuple[str, str, str]]:
  """Thought, command and result of each turn; the last has an answer, no command."""
  word, n = _WORDS[item % len(_WORDS)], 3 + (7 * item) % 40
  if rank == 2:
    last = 'I could not read all of them.', '', f'about {n}'
  else:
    last = f'{n} lines in all.', '', str(n)
  listed = f'{word}.txt\n{word}_old.txt\nREADME é ☃'
  return [
    (f'First see what is in {word}/.', f'ls {word}', listed),
    (
      'Count each.' if rank != 1 else 'Count them all at once.',
      f'wc -l {word}/*.txt',
      f'{n} {word}/{word}.txt\n{n + 2} total',
    ),
    last,
  ]


def chats(item: int, rank: int) -> Iterator[tuple[list[dict[str, Any]], str]]:
  """The messages of each request, and the text of its response."""
  word = _WORDS[item % len(_WORDS)]
  asked = {'role': 'user', 'content': f'How many lines has {word}/{word}.txt?'}
  messages = [{'role': 'system', 'content': 'Use sh. Answer with a number.'}, asked]
  for turn, (thought, command, result) in enumerate(_turns(item, rank)):
    if rank == EDITED and turn == 2:  # the first turn is removed
      messages = messages[:2] + messages[4:]
    calls = [('sh', {'cmd': command})] if command else []
    yield messages, response_text(thought, '' if command else result, calls=calls)
    function = {'name': 'sh', 'arguments': f'{{"cmd": "{command}"}}'}
    reply = {'role': 'assistant', 'reasoning_content': thought}
    if command:
      call = {'id': f'c{turn}', 'type': 'function', 'function': function}
      reply |= {'content': '', 'tool_calls': [call]}
      shown = {'role': 'tool', 'tool_call_id': f'c{turn}', 'content': result}
      messages = [*messages, reply, shown]


def train_tokenizer(items: int) -> tokenizer.Tokenizer:
  texts = [
    chat.render(messages, [_TOOL], True) + response
    for item in range(items)
    for messages, response in chats(item, 0)
  ]
  return tokenizer.train(texts, 700)


def transcript(item: int, rank: int) -> tuple[dict[str, Any], ...]:
  """All messages of a trajectory, as its agent reports them."""
  messages = [*chats(item, 0)][-1][0][:2]
  for turn, (thought, command, result) in enumerate(_turns(item, rank)):
    reply = {'role': 'assistant', 'reasoning_content': thought}
    if not command:
      return (*messages, reply | {'content': result})
    function = {'name': 'sh', 'arguments': f'{{"cmd": "{command}"}}'}
    call = {'id': f'c{turn}', 'type': 'function', 'function': function}
    messages.append(reply | {'content': '', 'tool_calls': [call]})
    shown = {'role': 'tool', 'tool_call_id': f'c{turn}', 'content': result}
    messages.append(shown)


def completions(
  tok: tokenizer.Tokenizer, item: int, rank: int, rng: np.random.Generator
) -> list[records.Completion]:
  """Of one trajectory; the weights change once in its second completion."""
  session, found = f'rl-{item}-{rank}', []
  before, at_s = '', 1e9 + 9.0 * item + 0.3 * rank
  for turn, (messages, response) in enumerate(chats(item, rank)):
    text = chat.render(messages, [_TOOL], True)
    extends = bool(before) and text.startswith(before)
    if extends:
      prompt = np.concatenate([found[-1].tokens, tok.encode(text[len(before) :])])
    else:
      prompt = np.array(tok.encode(text))
    ids = tok.encode(response)
    changed = (len(ids), len(ids) // 2, 0)[turn]
    took_s = 0.4 + 0.02 * len(ids)
    found.append(
      records.Completion(
        *(f'{session}-{turn}', session, turn, found[-1].id if extends else None),
        None if extends else 'context_edited' if turn else 'first',
        *(prompt, ids, -rng.exponential(0.8, len(ids))),
        np.where(np.arange(len(ids)) < changed, item, item + 1),
        *('stop', 'ok'),
        started_s=at_s,
        ended_s=at_s + took_s,
      )
    )
    before, at_s = text + response, at_s + took_s + 0.5
  return found


FINDING = {
  'kind': 'success_falls',
  'summary': 'the success falls from 0.5 to 0.25',
  'severity': 'error',
  'phase': 'rl',
  'first_step': 2,
  'last_step': 3,
  'evidence': [
    {'name': 'success', 'steps': [2, 3], 'values': [0.5, 0.25], 'threshold': 0.3}
  ],
  'log': ['E1130 11:23:45.1 1 agents.py:12] an error'],
  'causes': [{'text': 'the sign of the reward', 'field': 'rl.learner.reward.alpha'}],
}


def write(
  workdir: pathlib.Path, items: int = 12, better: bool = False, url: str = ''
) -> None:
  """A pool, a tokenizer, metrics, and scores of the first group by a learner.

  `better`: a third of the groups succeed, all of them. `url`: of the pool's database.
  """
  rng, tok = np.random.default_rng(0), train_tokenizer(items)
  tok.save(workdir / 'tokenizer.json')
  with DataPool(url or f'sqlite:///{workdir}/pool.db') as pool:
    for item in range(items):
      family, last = FAMILIES[item % 3], item == items - 1
      spec = f'terminal/train/{family}/{item}'
      pool.submit(records.WorkItem(item, spec, RANKS))
      advantages, baseline = {}, np.mean([succeeds(item, r) for r in range(RANKS)])
      for rank in range(1 if last else RANKS):
        session = f'rl-{item}-{rank}'
        success = float(succeeds(item, rank) or (better and item % 3 == 0))
        sampled = completions(tok, item, rank, rng)
        for completion in sampled:
          pool.add_completion(completion)
          advantages[completion.id] = 2 * (success - baseline)
        ended = sampled[-1].ended_s - sampled[0].started_s
        pool.add_trajectory(
          records.Trajectory(
            *(session, item, rank, spec, family, 'answer', success, ended, 2),
            messages=transcript(item, rank),
          )
        )
      pool.flush()
      if last:
        break
      pool.complete(item)
      if item % 2:
        pool.take([item - 1, item], item // 2)
      rewards = {
        f'rl-{item}-{r}': records.TrajectoryReward(
          0.0, 0.1, 1.0, float(succeeds(item, r)) - 0.02 * item + 0.1 * r
        )
        for r in range(RANKS)
      }
      pool.set_rewards(rewards, advantages)
    for i in range(3):
      (sampled, *_) = completions(tok, i, 0, rng)
      moved = dict(id=f'eval-{i}-0', session=f'eval-{i}', ended_s=sampled.ended_s + 1e3)
      pool.add_completion(dataclasses.replace(sampled, **moved))
      pool.add_trajectory(
        records.Trajectory(
          *(f'eval-{i}', -1, 0, f'terminal/test/{FAMILIES[i]}/{i}', FAMILIES[i]),
          *('answer', float(i % 2), 2.5, 2),
          messages=transcript(i, 0),
        )
      )
    pool.flush()
  with metrics.MetricsWriter(workdir, use_tensorboard=False) as writer:
    for step in range(items // 2 - 1):
      success = np.mean([succeeds(2 * step + i // 4, i % 4) for i in range(8)])
      writer.write('rl', step, success=success, reward=success - 0.04 * step + 0.13)
    stage = dict(stage='after RL', split='held_out', temperature=1.0, family='all')
    writer.write('eval', items // 2, stage, successes=1.0, n=3)
  findings.write(workdir, [FINDING])
  _score(workdir, rng, url)


def _score(workdir: pathlib.Path, rng: np.random.Generator, url: str) -> None:
  run = Run(workdir, url)
  for rank in range(RANKS):
    for c in run.reader.completions(f'rl-0-{rank}'):
      noise = rng.normal(0, 0.2, len(c.logprobs))
      learner = np.minimum(c.logprobs + noise, 0.0)
      entropy = rng.exponential(0.9, len(c.logprobs))
      for name, values in ('learner_logprob', learner), ('entropy', entropy):
        run.annotations.tokens(c.session, c.id, name, 4, values)
  run.annotations.note('rl-0-0', 'Counts the file twice.')
  run.close()
