"""Agent sessions for `benchmarks.kv_routing`, drawn to published statistics.

- Turns of a session are lognormal with median 33 (rl-systems.md §4.5) and a 99th
  percentile 85/29 times the median, the ratio of another published set of traces there.
- The tokens of the tools' answers are scaled so that prompts have 131 times the tokens
  of responses, each turn's prompt being the whole conversation before it.
- Sessions come in groups of 16 with one first prompt: samples of one task.
- At some turns an agent edits its history: it drops an old answer of a tool, and all
  that follows is new to any cache. The share of such turns is what gives the traces
  their ideal hit rate of about 94 %.

Lengths of responses and latencies of tools are not published: lognormal, flags.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from m2jax.rollout.tiers import page_chain

_P99 = 2.326  # of the standard normal distribution


@dataclasses.dataclass(frozen=True)
class TraceConfig:
  """Statistics of the sessions.

  Attributes:
    groups: number of groups; each has `group_size` sessions that share a first prompt
      of `system_tokens`.
    turns: median, and turns_p99 the 99th percentile over the median.
    ratio: tokens of all prompts over those of all responses.
    response_tokens: mean.
    tool_s: median seconds between a response and the next prompt, and tool_p99 the 99th
      percentile over the median.
    edits: share of turns at which the history is edited.
    context_tokens: a session ends before its prompt and response pass it.
    page_tokens: tokens of a page, for the digests.
    vocabulary: number of token ids.
  """

  groups: int = 8
  group_size: int = 16
  system_tokens: int = 6000
  turns: float = 33
  turns_p99: float = 85 / 29
  ratio: float = 131
  response_tokens: float = 250
  tool_s: float = 3.0
  tool_p99: float = 20.0
  edits: float = 0.07
  context_tokens: int = 131072
  page_tokens: int = 128
  vocabulary: int = 200_064
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Turn:
  """A request of a session.

  Attributes:
    prompt: [n] int32. response: [m] int32.
    chain: digests of the full pages of the prompt and the response.
    tool_s: seconds until the next turn's request.
  """

  prompt: np.ndarray
  response: np.ndarray
  chain: list[bytes]
  tool_s: float


@dataclasses.dataclass(frozen=True)
class Session:
  """A conversation, whose first request comes start_s after its group begins."""

  group: int
  turns: list[Turn]
  start_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Shape:
  """Lengths of a session: of responses [turns], of tools' answers [turns], relative,
  latencies [turns], and which turns edit the history [turns]."""

  responses: np.ndarray
  tools: np.ndarray
  waits: np.ndarray
  edits: np.ndarray


def sessions(config: TraceConfig) -> list[Session]:
  """All sessions, those of a group next to each other."""
  rng = np.random.default_rng(config.seed)
  shapes = [_shape(config, rng) for _ in range(config.groups * config.group_size)]
  scale = _tool_tokens(config, shapes)
  out = []
  for group in range(config.groups):
    first = _ids(config, rng, config.system_tokens)
    for _ in range(config.group_size):
      out.append(Session(group, _play(config, rng, first, shapes[len(out)], scale)))
  return out


def statistics(config: TraceConfig, traces: list[Session]) -> dict[str, float]:
  """What was drawn; `ideal_hit` is that of a shared cache without bound, in order."""
  turns = [turn for session in traces for turn in session.turns]
  prompts = np.array([len(turn.prompt) for turn in turns])
  responses = np.array([len(turn.response) for turn in turns])
  counts = np.array([len(session.turns) for session in traces])
  seen: set[bytes] = set()
  hits = 0
  for turn in turns:
    full = (len(turn.prompt) - 1) // config.page_tokens
    found = next(
      (i for i in range(full) if turn.chain[i] not in seen),
      full,
    )
    hits += found * config.page_tokens
    seen.update(turn.chain)
  waits = np.array([turn.tool_s for turn in turns])
  return {
    'sessions': len(traces),
    'requests': len(turns),
    'turns_p50': float(np.median(counts)),
    'turns_p99': float(np.quantile(counts, 0.99)),
    'input_output': float(prompts.sum() / responses.sum()),
    'prompt_tokens_p50': float(np.median(prompts)),
    'prompt_tokens_p99': float(np.quantile(prompts, 0.99)),
    'response_tokens_mean': float(responses.mean()),
    'tool_s_p50': float(np.median(waits)),
    'tool_s_p99': float(np.quantile(waits, 0.99)),
    'ideal_hit': float(hits / prompts.sum()),
  }


def _lognormal(rng, median: float, p99: float, size) -> np.ndarray:
  return median * np.exp(np.log(p99) / _P99 * rng.standard_normal(size))


def _shape(config: TraceConfig, rng) -> _Shape:
  turns = max(1, round(float(_lognormal(rng, config.turns, config.turns_p99, None))))
  # A response's 99th percentile is 5 times its median; the mean is what is given.
  spread = np.exp((np.log(5) / _P99) ** 2 / 2)
  responses = _lognormal(rng, config.response_tokens / spread, 5, turns)
  edits = rng.random(turns) < config.edits
  edits[:2] = False  # nothing to drop yet
  return _Shape(
    np.maximum(1, responses.round()).astype(int),
    _lognormal(rng, 1.0, 10, turns),
    _lognormal(rng, config.tool_s, config.tool_p99, turns),
    edits,
  )


def _lengths(config: TraceConfig, shape: _Shape, scale: float) -> list[tuple]:
  """(prompt tokens, new tokens, dropped tool or None) of each turn, as played."""
  tools = np.maximum(1, (shape.tools * scale).round()).astype(int).tolist()
  kept = list(range(len(tools)))  # turns whose answer is still in the history
  prompt, out = config.system_tokens, []
  for turn, response in enumerate(shape.responses.tolist()):
    dropped = None
    if shape.edits[turn]:
      dropped = kept[len([k for k in kept if k < turn]) // 2]
      kept.remove(dropped)
      prompt -= tools[dropped]
    if prompt + response > config.context_tokens:
      break
    out.append((prompt, tools[turn], dropped))
    prompt += response + tools[turn]
  return out


def _tool_tokens(config: TraceConfig, shapes: list[_Shape]) -> float:
  """The median of a tool's answer that gives the ratio of prompts to responses."""
  low, high = 1.0, float(config.context_tokens)
  for _ in range(40):
    middle = (low * high) ** 0.5
    prompts = responses = 0
    for shape in shapes:
      lengths = _lengths(config, shape, middle)
      prompts += sum(prompt for prompt, _, _ in lengths)
      responses += int(shape.responses[: len(lengths)].sum())
    low, high = (middle, high) if prompts < config.ratio * responses else (low, middle)
  return low


def _play(config, rng, first, shape: _Shape, scale: float) -> list[Turn]:
  """The turns of a session with their tokens."""
  page = config.page_tokens
  parts: list[tuple[int, np.ndarray]] = [(-1, first)]  # (turn of a tool or -1, tokens)
  known: list[bytes] = []
  turns = []
  for turn, (_, tool_tokens, dropped) in enumerate(_lengths(config, shape, scale)):
    if dropped is not None:
      at = next(i for i, (owner, _) in enumerate(parts) if owner == dropped)
      before = sum(len(tokens) for _, tokens in parts[:at])
      known = known[: before // page]
      del parts[at]
    prompt = np.concatenate([tokens for _, tokens in parts])
    response = _ids(config, rng, int(shape.responses[turn]))
    parts += [(-1, response), (turn, _ids(config, rng, tool_tokens))]
    known = page_chain.chain(np.concatenate([prompt, response]), page, known)
    turns.append(Turn(prompt, response, known, float(shape.waits[turn])))
  return turns


def _ids(config: TraceConfig, rng, count: int) -> np.ndarray:
  return rng.integers(0, config.vocabulary, count, dtype=np.int32)
