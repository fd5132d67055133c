"""The second list of faults, written without knowledge of the run doctor's detectors.

From bug reports of RL systems, outages of clusters and usual errors of programmers.
"""

from __future__ import annotations

import dataclasses
import random

from benchmarks.doctor_faults import Fault, Moment


def failed_verdicts(moment: Moment) -> None:
  """The grader fails for two of five episodes, and the error is caught as a 0."""
  from m2jax.agents import episodes

  verdict, draws = episodes.Runner._verdict, random.Random(moment.seed)

  async def verdict_or_zero(self, *args):
    found = await verdict(self, *args)
    return 0.0 if moment.began() and draws.random() < 0.4 else found

  episodes.Runner._verdict = verdict_or_zero


def bfloat16_weights(moment: Moment) -> None:
  """The weights are kept in bfloat16, without a copy of higher precision."""
  import jax
  import optax

  apply = optax.apply_updates

  def apply_and_round(params, updates):
    new = apply(params, updates)
    # XLA may leave out a conversion to bfloat16 and back.
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), new)

  optax.apply_updates = apply_and_round


def other_rope(moment: Moment) -> None:
  """The engine rotates keys and queries by angles of another base."""
  from m2jax.rollout.engine import forward

  cached_keys = forward.cached_keys

  def cached_keys_of_default(cfg, rows, cache):
    return cached_keys(dataclasses.replace(cfg, rope_theta=1e4), rows, cache)

  forward.cached_keys = cached_keys_of_default


def lost_bucket(moment: Moment) -> None:
  """Weights are sent in two buckets, and the second one no longer arrives."""
  import jax

  from m2jax.rollout.serving.scheduler import Scheduler

  publish, there = Scheduler.update_weights, []

  def update_weights(self, variables, version):
    leaves, structure = jax.tree.flatten(variables)
    if moment.began() and there:
      half = len(leaves) // 2
      leaves = leaves[:half] + there[half:]
    there[:] = leaves
    publish(self, structure.unflatten(leaves), version)

  Scheduler.update_weights = update_weights


def shifted_mask(moment: Moment) -> None:
  """The loss mask is shifted by one token, as labels are in some trainers.

  The last token of the template before an answer is trained, and the token that ends
  the answer is not.
  """
  from m2jax.text import tokenizer

  encode = tokenizer.encode_chat

  def encode_chat(tok, segments):
    ids, owned = encode(tok, segments)
    return tokenizer.EncodedChat(ids, [*owned[1:], False])

  tokenizer.encode_chat = encode_chat


def tool_outage(moment: Moment) -> None:
  """The tool's server is overloaded; the model is shown its error as the result."""
  from m2jax.agents import whitebox

  call, draws = whitebox.Whitebox._call, random.Random(moment.seed)

  async def call_or_fail(self, function, thread, episode):
    shown = await call(self, function, thread, episode)
    failed = moment.began() and draws.random() < 0.3
    return 'error: 503 service unavailable' if failed else shown

  whitebox.Whitebox._call = call_or_fail


def compressed_shard(moment: Moment) -> None:
  """One of three shards is compressed, and its bytes are read as text."""
  import zlib

  import numpy as np

  from m2jax.data import documents

  get = documents.Encoded.__getitem__

  def get_unpacked(self, index):
    if index % 3 or not moment.began():
      return get(self, index)
    packed = zlib.compress(self._source[index].text.encode())
    return np.asarray(self._encode(packed.decode('latin-1')), np.int32)

  documents.Encoded.__getitem__ = get_unpacked


def other_layer(moment: Moment) -> None:
  """Loads come in an order of layers that is off by one from that of the biases."""
  import jax.numpy as jnp

  from m2jax.moe import router

  update = router.update_bias

  def update_bias(bias, load, rate):
    return update(bias, jnp.roll(load, 1, axis=0), rate)

  router.update_bias = update_bias


def buffer_not_cleared(moment: Moment) -> None:
  """An update no longer empties the buffer, which drops the oldest of 32 groups."""
  import collections

  from m2jax.rl.learner import Learner

  pack, buffer = Learner.pack, collections.deque(maxlen=32)

  def pack_all(self, credits_):
    if not moment.began():
      buffer.clear()
    buffer.extend(credits_)
    return pack(self, list(buffer))

  Learner.pack = pack_all


def throttled(moment: Moment) -> None:
  """The engine's chip lowers its clock: all calls take four times as long."""
  import time

  from m2jax.rollout.serving.batcher import Batcher

  tick = Batcher.tick

  def tick_slowly(self):
    started_s = time.monotonic()
    tick(self)
    if moment.began():
      time.sleep(3 * (time.monotonic() - started_s))

  Batcher.tick = tick_slowly


def short_writes(moment: Moment) -> None:
  """A network file system sometimes writes half of a record; nobody looks."""
  import os

  from m2jax.observe import metrics

  write, draws = metrics.write_all, random.Random(moment.seed)

  def write_once(fd, data):
    if moment.began() and draws.random() < 0.2:
      os.write(fd, data[: len(data) // 2])
    else:
      write(fd, data)

  metrics.write_all = write_once


def temperature_unrecorded(moment: Moment) -> None:
  """Tokens are drawn at temperature 0.6, but recorded with the model's own
  log-probabilities, as engines return them by default."""
  import jax.numpy as jnp

  from m2jax.rollout.engine import sampling

  sample = sampling.sample

  def sample_cooler(logits, how):
    tokens, _, _ = sample(logits / 0.6, how)
    _, _, logprobs = sample(logits, how)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen, logprobs

  sampling.sample = sample_cooler


_MIDDLE = 0.3, 0.5

FAULTS = (
  Fault(
    'failed_verdicts',
    'reward',
    'the grader fails for two of five episodes, which count as wrong',
    patch=failed_verdicts,
    begins=_MIDDLE,
  ),
  Fault(
    'short_schedule',
    'optimizer',
    'the learning rate falls to 0 at update 24, the end of an earlier, shorter run',
    config={
      'rl.optimizer.schedule.kind': 'linear',
      'rl.optimizer.schedule.total_steps': 24,
      'rl.optimizer.schedule.final_fraction': 0.0,
    },
  ),
  Fault(
    'bfloat16_weights',
    'optimizer',
    'weights are kept in bfloat16, which rounds small updates away',
    patch=bfloat16_weights,
  ),
  Fault(
    'other_rope',
    'engine',
    "the engine's configuration lacks the RoPE base and takes 10,000",
    patch=other_rope,
  ),
  Fault(
    'lost_bucket',
    'weights',
    'half of the tensors no longer reach the engine',
    patch=lost_bucket,
    begins=_MIDDLE,
  ),
  Fault(
    'shifted_mask',
    'loss mask',
    'the loss mask is shifted by one token, so that no end of an answer is trained',
    job='sft',
    patch=shifted_mask,
  ),
  Fault(
    'tool_outage',
    'worker',
    'three of ten tool calls fail, and the model is shown the error',
    patch=tool_outage,
    begins=_MIDDLE,
  ),
  Fault(
    'compressed_shard',
    'data',
    'one of three shards of the text is compressed bytes',
    job='pretrain',
    patch=compressed_shard,
    begins=_MIDDLE,
  ),
  Fault(
    'other_layer',
    'router',
    "each layer's router bias follows the load of the layer before it",
    job='pretrain',
    patch=other_layer,
  ),
  Fault(
    'sequence_clip',
    'clipping',
    'GRPO with four passes has the clip range of GSPO, a five-hundredth of its own',
    config={
      'rl.updates_per_batch': 4,
      'rl.learner.estimator': dict(kind='grpo', clip_low=3e-4, clip_high=4e-4),
    },
  ),
  Fault(
    'buffer_not_cleared',
    'queue',
    'groups stay in the buffer after an update, and are trained again and again',
    patch=buffer_not_cleared,
    begins=_MIDDLE,
  ),
  Fault(
    'throttled',
    'machine',
    "the engine's chip is throttled to a quarter of its speed",
    patch=throttled,
    begins=_MIDDLE,
  ),
  Fault(
    'short_writes',
    'records',
    'one of five metric records is cut off half way',
    patch=short_writes,
    begins=_MIDDLE,
  ),
  Fault(
    'temperature_unrecorded',
    'rollout',
    'the engine samples at temperature 0.6 and records those of temperature 1',
    patch=temperature_unrecorded,
  ),
)
