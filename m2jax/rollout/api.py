"""What serves the policy, and the records of a request: plain, serialisable.

`Serving` is the interface between consumers of completions (gateway, Forge) and
engines, in this process or in another (DESIGN §3). A completion is `(prompt tokens,
response tokens)`; every response token carries the log-probability it was sampled with
and the policy version that sampled it (law 4).
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from m2jax.records import ByValue


class PromptTooLong(ValueError):
  """The prompt leaves no room for a response in the engine's context."""


class EngineError(RuntimeError):
  """The engine could not serve a request, although the request was valid."""


class EngineLost(EngineError):
  """No call of the engine will succeed again; says why."""


class GrammarError(EngineError):
  """A request's grammar needs more time or memory than its limits allow."""


class Matcher(Protocol):
  """The position of one response in its grammar."""

  def allow(self, mask: np.ndarray) -> None:
    """Sets which tokens may come next: token i, bit i % 32 of mask[i // 32] (int32).

    Raises:
      GrammarError: a limit is exceeded.
    """

  def advance(self, tokens: Sequence[int]) -> None:
    """Takes the next tokens of the response, all of them allowed ones.

    Raises:
      GrammarError: a limit is exceeded.
    """


class Grammar(Protocol):
  """A compiled grammar of the engine's vocabulary, as `serving.grammars` makes it."""

  def start(self) -> Matcher:
    """A position before the first token of a response."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How one completion is sampled.

  Attributes:
    max_tokens: maximum response tokens; the engine also stops at its context length.
    temperature: 0 is greedy. Training rollouts use 1.0, untruncated (DESIGN §6).
    min_p: least probability of a token that may be drawn, as a share of the most
      likely one's; 0 is off.
    top_p: nucleus mass in (0, 1]; 1 is off.
    top_k: number of most likely tokens to draw from; 0 is off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the
      response, once or for each time; 0 is off.
    repetition_penalty: divides the positive logits of tokens of prompt or response, and
      multiplies the negative ones; 1 is off.
    logit_bias: (token id, what is added to its logit), ….
    top_logprobs: number of most likely tokens to report for each of the response.
    stop_ids: token ids that end the response; the stop token is part of it.
    seed: makes this request's draws reproducible; None uses the engine's stream.
  """

  max_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  top_logprobs: int = 0
  stop_ids: tuple[int, ...] = ()
  seed: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class GenerateRequest(ByValue):
  """A request for one completion.

  Attributes:
    prompt_ids: any sequence of integers.
    grammar: the response's grammar: at each step tokens that it does not allow have
      probability 0, and the others are renormalised, before min-p, top-k and top-p.
      Needs `EngineConfig.grammars`.
  """

  prompt_ids: Sequence[int] | np.ndarray
  sampling: SamplingParams
  grammar: Grammar | None = None


class NewTokens(tuple):
  """Response ids as they are drawn, the argument of `on_tokens`: a tuple of ids.

  Attributes:
    logprobs: float32, one per id, as in GenerateResult.
    top_ids, top_logprobs: the most likely tokens at each id, as in GenerateResult.
  """

  logprobs: np.ndarray
  top_ids: np.ndarray | None
  top_logprobs: np.ndarray | None

  def __new__(
    cls,
    ids: Sequence[int],
    logprobs: np.ndarray,
    top_ids: np.ndarray | None = None,
    top_logprobs: np.ndarray | None = None,
  ) -> NewTokens:
    self = super().__new__(cls, ids)
    self.logprobs, self.top_ids, self.top_logprobs = logprobs, top_ids, top_logprobs
    return self


@dataclasses.dataclass(frozen=True, eq=False)
class GenerateResult(ByValue):
  """One completion as sampled.

  Attributes:
    tokens: response ids, int32, including the stop token if there is one.
    logprobs: float32, of each token under the distribution it was drawn from (after
      penalties, temperature and truncation; greedy reports the temperature-1 value).
    versions: int32, policy version of each token; weights may change in flight.
    finish_reason: 'stop', 'length' or 'cancelled'.
    experts: [prompt + response tokens, L, top_k] int16, the experts that the trunk
      routed each token to when its K/V were computed; None unless
      `EngineConfig.record_experts`. A prompt token found in the prefix cache has the
      ids recorded with the cached K/V, whichever version computed them. -1 where there
      are no K/V: the last response token, which was never fed back, and the unprocessed
      tokens of a cancelled request; training computes the routing of these.
    top_ids, top_logprobs: [response tokens, SamplingParams.top_logprobs] int32 and
      float32, the most likely tokens of the same distribution, likeliest first; None
      unless asked for.
    cached_tokens: number of the prompt's tokens whose K/V were cached before; None if
      the engine does not say.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: str
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  top_ids: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  top_logprobs: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  cached_tokens: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Handle:
  """A request in progress.

  Attributes:
    future: gives a GenerateResult or raises EngineError. Its own `cancel` has no
      effect.
    cancel: finishes the request with the tokens so far and finish_reason 'cancelled';
      no effect on a finished request.
  """

  future: concurrent.futures.Future[GenerateResult]
  cancel: Callable[[], None]


class PageEvent(NamedTuple):
  """A change in the cached pages of an engine.

  Attributes:
    kind: 'stored', 'evicted', or 'cleared' if all pages were forgotten.
    digest: the page's digest (`tiers.page_chain`); empty for 'cleared'.
    version: version of the policy that computed the page.
  """

  kind: str
  digest: bytes = b''
  version: int = 0


class Serving(Protocol):
  """Serves requests with the policy's weights; all methods from any thread.

  One engine (`serving.scheduler.Scheduler`), one for prompts and one for responses
  (`disaggregation.decode_engine.Disaggregated`), several replicas
  (`routing.router.Router`), or one in another process
  (`forge.remote.engine_client.RemoteScheduler`).
  """

  @property
  @abc.abstractmethod
  def context_tokens(self) -> int:
    """Maximum tokens of a prompt and its response together."""

  @property
  @abc.abstractmethod
  def alive(self) -> bool:
    """Whether requests are being served."""

  @property
  @abc.abstractmethod
  def stopped_reason(self) -> str | None:
    """Why requests are not being served; None while they are."""

  @abc.abstractmethod
  def start(self) -> Serving:
    """Starts to serve; returns itself."""

  @abc.abstractmethod
  def stop(self) -> None:
    """Stops for good; unfinished requests fail."""

  @abc.abstractmethod
  def submit(
    self,
    request: GenerateRequest,
    on_tokens: Callable[[NewTokens], None] | None = None,
  ) -> Handle:
    """Queues a request.

    Args:
      on_tokens: called with new tokens as they are drawn, a few at a time, from the
        engine's thread; must return quickly. The future resolves after its last call.

    Raises:
      PromptTooLong: the prompt leaves no room for a response.
      ValueError: a field is out of range; the message names it.
      EngineError: it has stopped.
    """

  @abc.abstractmethod
  def update_weights(self, variables: Any, version: int) -> None:
    """Replaces the weights between two device calls; requests in flight continue.

    Raises:
      ValueError: version does not increase, or shapes or dtypes differ from before.
      EngineError: it takes weights from elsewhere.
    """

  @abc.abstractmethod
  def stats(self) -> dict[str, Any]:
    """A cheap snapshot of the state, and totals since the start: `Scheduler.stats`."""

  @abc.abstractmethod
  def page_events(self) -> Sequence[PageEvent]:
    """What has changed in the cached pages since the last call; for one reader."""
