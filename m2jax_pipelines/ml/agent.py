"""The agent `draft_improve`: drafts programs, debugs failed ones, improves the best.

The search of AIDE (arXiv 2502.13138, and its package aideml 0.2.2): a tree whose nodes
are whole programs. A step is a draft until there are `drafts`; then, with a
probability, the repair of a program that failed, and otherwise a change of the best
one. A program prints its own validation score; the model never sees the task's labels.
Each step is one completion in a new chat, to any OpenAI-compatible URL, and one call of
`sh`. At the end the best program's submission is the task's.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from m2jax.agents import http, model_client
from m2jax.agents.agent import Agent, AgentConfig, Endpoint, Outcome
from m2jax.agents.model_client import ContextExceeded, InfrastructureFailure
from m2jax.agents.whitebox import cut
from m2jax.checks import require
from m2jax.tasks import BadCall, Environment, Task
from m2jax.tasks.terminal import shell

DRAFT, DEBUG, IMPROVE = 'draft', 'debug', 'improve'
_MAX_PROGRAM_BYTES = 60_000  # of a command, in base64
_TIME_SHARE = 0.9  # of the task's; the rest is for the last step
_PLAN_CHARS = 200
_PROGRAM = re.compile(r'```(?:python|py)?[ \t]*\n(.*?)```', re.DOTALL)
_SCORE = re.compile(r'^validation: ([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*$', re.M)
_RULES = """\
Answer with a short plan and one Python program in a ```python block. The program fits
on a part of the training data, prints the line `validation: NUMBER` with its score on
the rest (higher is better: negate an error; without labels, any score of your own),
and writes submission.csv. It has {seconds:g} seconds.
"""
_ASKED = {
  DRAFT: 'Write a first program, different from those before.',
  DEBUG: 'This program failed. Correct it:\n{program}\nIts output:\n```\n{output}\n```',
  IMPROVE: 'Make one change to this program that should raise its score, '
  '{score:.6g}:\n{program}',
}


@dataclasses.dataclass(frozen=True)
class Config(AgentConfig):
  """How the search runs; the defaults of the first three are AIDE's.

  Attributes:
    drafts: programs that are written from nothing.
    debug_probability: probability that a program that failed is repaired, if there is
      one.
    max_debug_depth: repairs in a row.
    steps: programs in all; the task's tool calls limit them too.
    script_s: elapsed time of a program.
    output_chars: end of a program's output that the model is shown.
    seed: seed of the choice of nodes, with the task's spec.
    max_tokens, sampling, retries, retry_delay_s, request_timeout_s: as in
      `whitebox.WhiteboxConfig`.
  """

  kind: str = 'm2jax_pipelines.ml.agent'
  drafts: int = 5
  debug_probability: float = 0.5
  max_debug_depth: int = 3
  steps: int = 20
  script_s: float = 300.0
  output_chars: int = 2000
  seed: int = 0
  max_tokens: int = 4096
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  retries: int = 3
  retry_delay_s: float = 0.2
  request_timeout_s: float = 600.0

  def __post_init__(self):
    for name in ('drafts', 'steps', 'script_s', 'max_tokens'):
      require(self, getattr(self, name) > 0, name, 'above 0')
    share = 0 <= self.debug_probability <= 1
    require(self, share, 'debug_probability', 'in [0, 1]')
    shown = 0 < self.output_chars <= 3000  # an observation has 4000
    require(self, shown, 'output_chars', '1 to 3000')


@dataclasses.dataclass
class Node:
  """A program.

  Attributes:
    number: place in the order of steps.
    action: 'draft', 'debug' or 'improve'.
    parent: the node that was debugged or improved.
    plan: the model's words before the program.
    program: its text; '' if the answer had none.
    output: the end of what it printed, or why it did not run.
    score: its validation score; None if it failed.
    debugged: repairs in a row that end here.
    leaf: whether no node has it as its parent.
  """

  number: int
  action: str
  parent: Node | None = None
  plan: str = ''
  program: str = ''
  output: str = ''
  score: float | None = None
  debugged: int = 0
  leaf: bool = True


def best(nodes: Sequence[Node]) -> Node | None:
  """The node with the highest score, the first of equal ones; None if all failed."""
  good = [node for node in nodes if node.score is not None]
  return max(good, key=lambda node: node.score, default=None)


def choose(
  nodes: Sequence[Node], config: Config, rng: random.Random
) -> tuple[str, Node | None]:
  """The next action and its node; see the module."""
  if sum(node.action == DRAFT for node in nodes) < config.drafts:
    return DRAFT, None
  failed = [
    node
    for node in nodes
    if node.score is None and node.leaf and node.debugged < config.max_debug_depth
  ]
  if failed and rng.random() < config.debug_probability:
    return DEBUG, rng.choice(failed)
  found = best(nodes)
  return (DRAFT, None) if found is None else (IMPROVE, found)


def request(
  instruction: str,
  nodes: Sequence[Node],
  action: str,
  node: Node | None,
  config: Config,
) -> str:
  """The user's message of a step."""
  parts = [instruction.rstrip(), _RULES.format(seconds=config.script_s)]
  lines = [f'- {n.score:.6g}: {n.plan}' for n in nodes if n.score is not None]
  if lines:
    parts.append('\n'.join(['Scores and plans of the programs so far:', *lines]))
  asked = _ASKED[action]
  if node is not None:
    program = f'```python\n{node.program}```'
    asked = asked.format(program=program, output=node.output, score=node.score or 0.0)
  return '\n\n'.join([*parts, asked])


@dataclasses.dataclass
class _Episode:
  task: Task
  environment: Environment
  post: Callable
  body: dict[str, Any]
  rng: random.Random
  started_s: float
  outcome: Outcome
  nodes: list[Node] = dataclasses.field(default_factory=list)


class DraftImprove(Agent):
  """The agent; its methods raise for no output of the model or of a program."""

  def __init__(self, config: Config):
    self._config = config
    self._client = http.make_client()

  async def prepare(
    self, task: Task, environment: Environment, endpoint: Endpoint
  ) -> _Episode:
    config = self._config
    tools = task.tools if environment.tools is None else environment.tools
    if shell.NAME not in [tool['function']['name'] for tool in tools]:
      raise ValueError(f'task {task.spec}: draft_improve needs the tool {shell.NAME}')
    post, _ = model_client.make(self._client, endpoint, config, ())
    sampling = {**config.sampling, **endpoint.sampling}
    return _Episode(
      task,
      environment,
      post,
      {'model': endpoint.model, 'max_tokens': config.max_tokens, **sampling},
      random.Random(f'{config.seed}/{task.spec}'),
      time.monotonic(),
      Outcome(messages=[]),
    )

  async def run(self, episode: _Episode) -> None:
    config, outcome = self._config, episode.outcome
    outcome.end_reason = 'max_turns'
    limit_s = getattr(episode.task, 'wall_s', None) or math.inf
    last_s = episode.started_s + _TIME_SHARE * limit_s - config.script_s
    try:
      for _ in range(min(config.steps, episode.task.max_tool_calls - 1)):
        if episode.nodes and time.monotonic() > last_s:
          break
        await self._step(episode)
    except ContextExceeded:
      outcome.end_reason = 'context'
    except InfrastructureFailure as error:
      outcome.end_reason, outcome.error = 'infrastructure', str(error)
      return
    if (found := best(episode.nodes)) is not None:
      await self._sh(episode, f'cp .programs/{found.number}.csv submission.csv')
      outcome.end_reason = 'answer'
      outcome.answer = f'program {found.number}, validation {found.score:.6g}'

  async def finish(self, episode: _Episode) -> Outcome:
    episode.outcome.wall_s = time.monotonic() - episode.started_s
    return episode.outcome

  async def close(self) -> None:
    await self._client.aclose()

  async def _step(self, episode: _Episode) -> None:
    config, nodes = self._config, episode.nodes
    action, parent = choose(nodes, config, episode.rng)
    said = episode.environment.instruction
    instruction = episode.task.instruction if said is None else said
    text = request(instruction, nodes, action, parent, config)
    messages = [{'role': 'user', 'content': text}]
    if config.system is not None:
      messages.insert(0, {'role': 'system', 'content': config.system})
    reply = await episode.post({**episode.body, 'messages': messages})
    choice = reply['choices'][0]
    episode.outcome.messages += [*messages, choice['message']]
    node = Node(len(nodes), action, parent)
    if parent is not None:
      parent.leaf = False
      node.debugged = parent.debugged + 1 if action == DEBUG else 0
    nodes.append(node)
    content = choice['message'].get('content') or ''
    found = _PROGRAM.findall(content)
    node.plan = ' '.join(content.partition('```')[0].split())[:_PLAN_CHARS]
    if not found:
      node.output = 'the answer has no program in a ```python block'
    elif len(found[-1].encode(errors='replace')) > _MAX_PROGRAM_BYTES:
      node.output = f'the program has more than {_MAX_PROGRAM_BYTES} bytes'
    else:
      node.program = found[-1]
      await self._try(episode, node)

  async def _try(self, episode: _Episode, node: Node) -> None:
    """Runs a node's program; its files are kept under its number."""
    config, mark = self._config, secrets.token_hex(8)
    program = base64.b64encode(node.program.encode(errors='replace')).decode()
    name = f'.programs/{node.number}'
    shown = await self._sh(
      episode,
      f'mkdir -p .programs; rm -rf submission.csv; '
      f'printf %s {program} | base64 -d > {name}.py\n'
      f'timeout -k 5 {config.script_s:g} python3 {name}.py > {name}.txt 2>&1; code=$?\n'
      f'[ -f submission.csv ] && mv submission.csv {name}.csv || code="none $code"\n'
      f'echo "{mark} $code"; tail -c {config.output_chars} {name}.txt',
    )
    head, _, node.output = shown.partition('\n')
    scores = [float(text) for text in _floats(_SCORE.findall(node.output))]
    if head == f'{mark} 0' and scores and math.isfinite(scores[-1]):
      node.score = scores[-1]
    elif not head.startswith(mark):
      node.output = shown
    else:
      code = head.removeprefix(mark).replace('none', 'no submission.csv; exit').strip()
      node.output += f'\n[exit {code}; {len(scores)} lines `validation: NUMBER`]'
    node.output = cut(node.output, config.output_chars + 200)

  async def _sh(self, episode: _Episode, command: str) -> str:
    episode.outcome.tool_calls += 1
    try:
      return await episode.environment.execute(shell.NAME, {shell.ARGUMENT: command})
    except BadCall as error:
      episode.outcome.tool_errors += 1
      return f'error: {error}'


def _floats(texts: Sequence[str]) -> list[float]:
  found = []
  for text in texts:
    try:
      found.append(float(text))
    except ValueError:  # such as 1.2.3
      continue
  return found


make = DraftImprove
