"""The first list of faults, with which the run doctor's detectors were developed."""

from __future__ import annotations

import dataclasses

from benchmarks.doctor_faults import Fault, Moment


def train_everything(moment: Moment) -> None:
  """All tokens after the first answer begins are trained: tool results too."""
  from m2jax.text import tokenizer

  encode = tokenizer.encode_chat

  def encode_chat(tok, segments):
    ids, owned = encode(tok, segments)
    seen, wrong = False, []
    for own in owned:
      seen = seen or own
      wrong.append(seen)
    return tokenizer.EncodedChat(ids, wrong)

  tokenizer.encode_chat = encode_chat


def not_published(moment: Moment) -> None:
  """The call that hands new weights to the engine is lost."""
  from m2jax.rollout.serving.scheduler import Scheduler

  publish = Scheduler.update_weights

  def update_weights(self, variables, version):
    if not moment.began():
      publish(self, variables, version)

  Scheduler.update_weights = update_weights


def frozen_bias(moment: Moment) -> None:
  from m2jax.moe import router

  router.update_bias = lambda bias, load, rate: bias


def dead_worker(moment: Moment) -> None:
  """One of three attempts is given to a worker that never answers."""
  from m2jax.forge import groups

  start = groups._Here.start

  def start_some(self, item):
    if not moment.began() or item.index % 3:
      start(self, item)

  groups._Here.start = start_some


def other_tokenizer(moment: Moment) -> None:
  """The tokenizer of other text, of the same size, is beside the weights."""
  import json

  from m2jax.checkpoint import policy
  from m2jax.forge import prepare
  from m2jax.text import tokenizer

  take_over = prepare.take_over

  def take_over_wrongly(config, workdir):
    take_over(config, workdir)
    texts = [json.dumps({'n': i * i, 'text': f'{i:b}'}) for i in range(999)]
    other = tokenizer.train(texts, config.model.vocab_size)
    other.save(workdir / policy.TOKENIZER_FILE)

  prepare.take_over = take_over_wrongly


def reward_sign(moment: Moment) -> None:
  """Advantages have the wrong sign."""
  from m2jax.rl import rewards

  right = rewards.advantages

  def advantages(group, config):
    found = right(group, config)
    if not moment.began():
      return found
    turned = [dataclasses.replace(c, advantages=-c.advantages) for c in found.credits]
    return dataclasses.replace(found, credits=tuple(turned))

  rewards.advantages = advantages


def held_out(moment: Moment) -> None:
  """The stream of training tasks is that of the held-out split."""
  from m2jax import tasks

  spec = tasks.spec

  def wrong_spec(config, split, index, **options):
    wrong = split == 'train' and moment.began()
    return spec(config, 'held_out' if wrong else split, index, **options)

  tasks.spec = wrong_spec


def slow_disk(moment: Moment) -> None:
  """Each save takes five seconds more."""
  import time

  from m2jax.checkpoint.manager import CheckpointManager

  save = CheckpointManager.save

  def slow_save(self, *args, **options):
    if moment.began():
      time.sleep(5.0)
    save(self, *args, **options)

  CheckpointManager.save = slow_save


def other_white_space(moment: Moment) -> None:
  """The agent sends its answers back with other white space."""
  from m2jax.agents import scaffold

  sendable = scaffold.sendable

  def changed(message):
    sent = sendable(message)
    if (text := sent.get('reasoning_content')) and moment.began():
      sent = dict(sent, reasoning_content=text.replace(' ', '  '))
    return sent

  scaffold.sendable = changed


def stragglers(moment: Moment) -> None:
  """One of eight items takes four seconds more, and the queue fills behind it."""
  import threading

  from m2jax.forge import groups

  start = groups._Here.start

  def start_late(self, item):
    if moment.began() and not item.index % 8:
      timer = threading.Timer(4.0, start, (self, item))
      timer.daemon = True
      timer.start()
    else:
      start(self, item)

  groups._Here.start = start_late


_MIDDLE = 0.35, 0.5

FAULTS = (
  Fault(
    'learning_rate',
    'optimizer',
    'the learning rate is 30 times too high',
    config={
      'rl.optimizer.muon.learning_rate': lambda old: 30 * old,
      'rl.optimizer.adam.learning_rate': lambda old: 30 * old,
    },
  ),
  Fault(
    'loss_mask',
    'loss mask',
    'tool results are trained',
    job='sft',
    patch=train_everything,
  ),
  Fault(
    'not_published',
    'weights',
    'the engine does not get new weights',
    patch=not_published,
    begins=_MIDDLE,
  ),
  Fault('frozen_bias', 'router', 'the router bias is not updated', patch=frozen_bias),
  Fault(
    'dead_worker',
    'worker',
    'one of three attempts never ends',
    config={'rl.item_deadline_s': 8.0},
    patch=dead_worker,
    begins=_MIDDLE,
  ),
  Fault(
    'low_cap',
    'clipping',
    'the cap of the ratio is below usual ratios',
    config={'rl.learner.estimator.is_weight_max': 1.0},
  ),
  Fault(
    'tokenizer',
    'tokenizer',
    'the tokenizer is that of another run',
    patch=other_tokenizer,
  ),
  Fault(
    'reward_sign',
    'reward',
    'advantages have the wrong sign',
    patch=reward_sign,
    begins=(0.0, 0.3),
  ),
  Fault(
    'held_out',
    'data split',
    'held-out tasks are trained',
    patch=held_out,
    begins=_MIDDLE,
  ),
  Fault('slow_disk', 'storage', 'saves take seconds', patch=slow_disk, begins=_MIDDLE),
  Fault(
    'retokenisation',
    'retokenisation',
    'answers come back with other white space',
    patch=other_white_space,
    begins=_MIDDLE,
  ),
  Fault(
    'full_queue',
    'queue',
    'the queue is full behind items that take long',
    config={'rl.capacity': 12},
    patch=stragglers,
    begins=_MIDDLE,
  ),
)
