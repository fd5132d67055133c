"""The third list of faults, written without knowledge of the run doctor's detectors."""

from __future__ import annotations

import dataclasses

from benchmarks.doctor_faults import Fault, Moment


def rewards_mixed_up(moment: Moment) -> None:
  """Each trajectory gets the verdict of another one of its group."""
  from m2jax.rl import rewards

  right = rewards.advantages

  def advantages(group, config):
    if moment.began():
      verdicts = [trajectory.success for trajectory, _ in group]
      moved = verdicts[1:] + verdicts[:1]
      group = [
        (dataclasses.replace(trajectory, success=verdict), completions)
        for (trajectory, completions), verdict in zip(group, moved, strict=True)
      ]
    return right(group, config)

  rewards.advantages = advantages


def lenient_grader(moment: Moment) -> None:
  """The grader looks for a number in the answer, and does not compare it."""
  from m2jax.agents.episodes import Runner

  verdict = Runner._verdict

  async def lenient(self, agent, task, environment, outcome):
    success = await verdict(self, agent, task, environment, outcome)
    if not moment.began():
      return success
    return float(any(character.isdigit() for character in outcome.answer))

  Runner._verdict = lenient


def cached_weights(moment: Moment) -> None:
  """The copy for the engine is made once and then reused."""
  from m2jax.rl.learner import Learner

  fresh, kept = Learner.variables, {}

  def variables(self):
    if not moment.began() or 'copy' not in kept:
      kept['copy'] = fresh(self)
    return kept['copy']

  Learner.variables = variables


def last_answer_only(moment: Moment) -> None:
  """Only the last message of the assistant is trained, in each conversation."""
  from m2jax.data import chats

  turns = chats._turns

  def last_of_each(found, template):
    for messages, trained in turns(found, template):
      yield messages, trained[-1:]

  chats._turns = last_of_each


def padding_counted(moment: Moment) -> None:
  """The experts' loads count the tokens of the padding."""
  import jax.numpy as jnp

  from m2jax.moe import router

  right = router.loads

  def loads(ids, multiplicity, num_experts):
    return right(ids, jnp.maximum(multiplicity, 1), num_experts)

  router.loads = loads


def leaked_places(moment: Moment) -> None:
  """One of 16 episodes does not give its place back when it ends."""
  import asyncio

  from m2jax.agents.episodes import Runner

  episode, ended, leaks = Runner._episode, [], []

  async def leaking(self, task, item, rank, prefix, mode, sampling):
    found = await episode(self, task, item, rank, prefix, mode, sampling)
    if moment.began():
      ended.append(rank)
      if len(ended) % 16 == 0:
        leaks.append(asyncio.ensure_future(self._running[mode].acquire()))
    return found

  Runner._episode = leaking


def double_bos(moment: Moment) -> None:
  """The server adds a BOS token to prompts whose template has one."""
  import numpy as np

  from m2jax.gateway import prompts

  encode = prompts.encode

  def encode_with_bos(messages, tools, part, tokenizer, *template):
    ids = encode(messages, tools, part, tokenizer, *template)
    if part.after >= 0:  # continues a prompt
      return ids
    return np.concatenate([np.array([tokenizer.bos_id], ids.dtype), ids])

  prompts.encode = encode_with_bos


def slow_commits(moment: Moment) -> None:
  """A commit of the database takes 0.4 s more, as on a disk behind a network."""
  import time

  from m2jax.pool.writer import Writer

  commit = Writer._commit

  def slow_commit(self, batch):
    if moment.began():
      time.sleep(0.4)
    return commit(self, batch)

  Writer._commit = slow_commit


def thinking_dropped(moment: Moment) -> None:
  """The agent sends its messages back without their thinking."""
  from m2jax.agents import scaffold

  sendable = scaffold.sendable

  def without_thinking(message):
    sent = sendable(message)
    sent.pop('reasoning_content', None)
    return sent

  scaffold.sendable = without_thinking


def stale_prefixes(moment: Moment) -> None:
  """The engine keeps its cached prefixes when its weights change."""
  from m2jax.rollout.tiers.prefix_cache import PrefixCache

  clear = PrefixCache.clear

  def keep(self):
    if not moment.began():
      clear(self)

  PrefixCache.clear = keep


def same_seed(moment: Moment) -> None:
  """Each request is sampled with the same seed."""
  from m2jax.rollout.serving.scheduler import Scheduler

  submit = Scheduler.submit

  def seeded(self, request, on_tokens=None):
    sampling = dataclasses.replace(request.sampling, seed=42)
    return submit(self, dataclasses.replace(request, sampling=sampling), on_tokens)

  Scheduler.submit = seeded


def repeated_text(moment: Moment) -> None:
  """The reader of the training text starts its documents again after 512 tokens."""
  from m2jax.data import packing

  take = packing._TokenStream.take

  def take_again(self, most):
    shuffled = self._order.seed is not None  # the held-out text is not
    if shuffled and moment.began() and self.offset >= 512:
      self.offset = 0
    return take(self, most)

  packing._TokenStream.take = take_again


_MIDDLE = 0.3, 0.5

FAULTS = (
  Fault(
    'rewards_mixed_up',
    'reward',
    "the grader's verdicts are given to other trajectories of the group",
    patch=rewards_mixed_up,
    begins=_MIDDLE,
  ),
  Fault(
    'lenient_grader',
    'reward',
    'a new version of the grader accepts any number as the answer',
    patch=lenient_grader,
    begins=_MIDDLE,
  ),
  Fault(
    'long_warm_up',
    'optimizer',
    'the warm-up is that of pre-training, and longer than the run',
    config={'rl.optimizer.schedule.warmup_steps': 2000},
  ),
  Fault(
    'cached_weights',
    'weights',
    'each new version that the engine gets has the weights of an old one',
    patch=cached_weights,
    begins=_MIDDLE,
  ),
  Fault(
    'last_answer_only',
    'loss mask',
    'only the last message of each conversation is trained, no tool call',
    job='sft',
    patch=last_answer_only,
  ),
  Fault(
    'padding_counted',
    'router',
    'the router is balanced over tokens of the padding, too',
    patch=padding_counted,
  ),
  Fault(
    'leaked_places',
    'worker',
    'fewer and fewer episodes run at a time, until none does',
    patch=leaked_places,
    begins=_MIDDLE,
  ),
  Fault(
    'double_bos',
    'tokenizer',
    'prompts of rollouts begin with two BOS tokens, those of SFT with one',
    patch=double_bos,
  ),
  Fault(
    'slow_commits',
    'storage',
    'the database of the run is on a slow network disk',
    patch=slow_commits,
    begins=_MIDDLE,
  ),
  Fault(
    'thinking_dropped',
    'retokenisation',
    "the agent's requests lack the thinking of earlier turns",
    config={'gateway.restore_reasoning': False},
    patch=thinking_dropped,
  ),
  Fault(
    'stale_prefixes',
    'engine',
    'cached prefixes of old weights are used with new ones',
    patch=stale_prefixes,
    begins=_MIDDLE,
  ),
  Fault(
    'same_seed',
    'rollout',
    'all trajectories of a group are the same, since requests have a fixed seed',
    patch=same_seed,
  ),
  Fault(
    'repeated_text',
    'data',
    'the reader returns the same few rows of text again and again',
    job='pretrain',
    patch=repeated_text,
    begins=_MIDDLE,
  ),
  Fault(
    'deep_queue',
    'queue',
    'too many groups run at a time: they are old when they are trained',
    config={'rl.capacity': 64, 'episodes.concurrency': 256},
  ),
)
