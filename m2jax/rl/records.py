"""Records of gateway, agents, pool and learner (DESIGN §3): plain, serialisable."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Completion:
  """One (state, action) pair as the gateway saw it: the unit of training.

  Attributes:
    id: unique id, also the `id` of the HTTP response.
    session: the API key that asked; one trajectory.
    turn: 0-based order of the completion within its session.
    parent: id of the completion whose recorded ids this prompt extends, else None.
    follows: id of the session's completion whose answer is the last that the request's
      messages show; the parent, if there is one. A fork follows too where the client's
      text shows the answer but the prompt could not extend its ids. The completions
      that the session used last are its last completion, what that follows, and so on;
      one that was sampled again and never shown to the model is on no such path.
    fork_reason: why a session with earlier completions did not extend one of them.
    prompt_ids, response_ids: token ids as fed and as sampled.
    logprobs, versions: per response token: sampling log-probability, policy version.
    finish_reason: 'stop', 'length' or 'cancelled'.
    status: the parser's verdict on the response (`text.chat.Message.status`).
    overrides: names of sampling fields the training session overrode.
    started_s, ended_s: wall-clock seconds since the epoch.
    experts: [prompt + response tokens, L, top_k] int16, the expert ids that the engine
      used, -1 where it has none (`rollout.api.GenerateResult`); None: not recorded. Two
      completions are compared without it.
  """

  id: str
  session: str
  turn: int
  parent: str | None
  fork_reason: str | None
  prompt_ids: tuple[int, ...]
  response_ids: tuple[int, ...]
  logprobs: tuple[float, ...]
  versions: tuple[int, ...]
  finish_reason: str
  status: str
  overrides: tuple[str, ...] = ()
  started_s: float = 0.0
  ended_s: float = 0.0
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  follows: str | None = None


@dataclasses.dataclass(frozen=True)
class WorkItem:
  """One rollout group in submission order; everything needed to reissue it.

  Attributes:
    index: position in the stream: windowed FIFO's index and the data position.
    task: the task's spec string (`tasks` rebuilds the task from it).
    group_size: trajectories sampled for it.
    attempt: 0, then +1 for every reissue after a restart.
  """

  index: int
  task: str
  group_size: int
  attempt: int = 0


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """How one episode ended. Its completions lie in the pool under `session`.

  Attributes:
    session: the gateway session (API key) of the episode.
    item: index of its work item, or -1 outside training (evaluation).
    rank: 0 … group_size − 1 within the item.
    task, family: the task's spec string and family name.
    ended: 'answer', 'max_turns', 'length' or 'context': real ends, which are judged;
      or 'infrastructure', which is masked from loss and baseline (law 5).
    reason: for 'infrastructure', what broke.
    success: the verifier's verdict in [0, 1].
    wall_s: wall-clock seconds of the episode, tools included.
    tool_calls: commands run; tool_errors: calls that did not parse or named no tool.
    answer: the final assistant text.
    messages: the whole chat as OpenAI dicts, for people to read.
  """

  session: str
  item: int
  rank: int
  task: str
  family: str
  ended: str
  success: float
  wall_s: float
  tool_calls: int
  tool_errors: int = 0
  reason: str = ''
  answer: str = ''
  messages: tuple[dict, ...] = ()
