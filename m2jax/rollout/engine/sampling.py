"""On-device sampling of one token per row, with its log-probability.

Each row has its own parameters. Penalties and biases change the logits; then the
temperature applies, min-p, top-k and top-p. The log-probability is that of the
distribution actually drawn from, in fp32 or wider (DESIGN laws 4 and 8). Rows with
temperature 0 take the most likely token and report its temperature-1 log-probability.

A draw inverts the cumulative distribution in two levels: first a block of the
vocabulary, then a token in it. That takes two uniforms per row, where Gumbel noise
takes V hashes (on CPU more work than the softmax), and sums of sqrt(V) terms, for which
fp32 is precise enough. A row's draw depends on its own key and logits only.

Axes: B rows, V vocabulary, W words of a mask (32 tokens each), S positions, b biased
tokens, N blocks of M tokens, N·M >= V.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Bool, Float, Int, Int32, UInt32
from m2jax.kernels import invariant
from m2jax.kernels.token_logprobs import normaliser


class Draws(NamedTuple):
  """How the token of each row is drawn.

  Attributes:
    seeds: a row's random stream.
    counters: the draw's index in that stream.
    temperature: 0 is greedy.
    min_p: least probability, as a share of the most likely token's; 0 is off.
    top_k: 0 is off.
    top_p: in (0, 1]; 1 is off.
  """

  seeds: UInt32[Array, 'B 2']
  counters: Int[Array, 'B']
  temperature: Float[Array, 'B']
  min_p: Float[Array, 'B']
  top_k: Int[Array, 'B']
  top_p: Float[Array, 'B']


class Penalties(NamedTuple):
  """What changes the logits of each row; the first token of a response is counted.

  Attributes:
    presence: subtracted from tokens that are in the response; 0 is off.
    frequency: subtracted for each time that they are.
    repetition: divides the positive logits of tokens of prompt or response, and
      multiplies the negative ones (arXiv:1909.05858 §4.1); 1 is off.
    biased, bias: tokens, or V for none, and what is added to their logits.
  """

  presence: Float[Array, 'B']
  frequency: Float[Array, 'B']
  repetition: Float[Array, 'B']
  biased: Int[Array, 'B b']
  bias: Float[Array, 'B b']


def sample(
  logits: Float[Array, 'B V'], how: Draws, tiled: bool = False
) -> tuple[Int32[Array, 'B'], Float[Array, 'B'], Float[Array, 'B V']]:
  """Draws one token per row of logits, which are float32 or wider.

  For `tiled` see `invariant.rows`.

  Returns:
    tokens, their log-probabilities, and those of the whole distribution.
  """
  greedy = how.temperature <= 0
  # Subtract the peak first: a small temperature must not overflow.
  scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
  temperature = jnp.where(greedy, 1.0, how.temperature)
  scaled = scaled / temperature[:, None].astype(logits.dtype)
  truncated = ~greedy & ((how.min_p > 0) | (how.top_k > 0) | (how.top_p < 1))
  # Truncation is the most expensive step: skip it unless some row asks for it.
  scaled = lax.cond(
    jnp.any(truncated),
    lambda x: jnp.where(truncated[:, None], truncate(x, how), x),
    lambda x: x,
    scaled,
  )
  mass, log_sum = normaliser(scaled, tiled)
  uniforms = jax.vmap(_uniform_pair)(how.seeds, how.counters)
  drawn = invariant.rows(lambda tokens, _: draw(*tokens), (mass, uniforms), None, tiled)
  tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
  logprobs = scaled - log_sum[:, None]
  return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], logprobs


def penalize(
  logits: Float[Array, 'B V'],
  how: Penalties,
  tokens: Int[Array, 'B S'],
  prompt: Bool[Array, 'B S'],
  response: Bool[Array, 'B S'],
) -> Float[Array, 'B V']:
  """The logits with penalties for tokens that are there already, and biases.

  Args:
    tokens: tokens of prompt and response, at any position.
    prompt, response: which positions belong to each.
  """
  row = jnp.arange(len(logits))[:, None]
  count = lambda where: (
    jnp.zeros(logits.shape, jnp.int32).at[row, tokens].add(where, mode='drop')
  )
  column = lambda x: x[:, None].astype(logits.dtype)
  drawn = count(response.astype(jnp.int32))
  seen = (drawn > 0) | (count(prompt.astype(jnp.int32)) > 0)
  factor = column(how.repetition)
  repeated = jnp.where(logits > 0, logits / factor, logits * factor)
  logits = jnp.where(seen, repeated, logits)
  logits -= column(how.frequency) * drawn + column(how.presence) * (drawn > 0)
  return logits.at[row, how.biased].add(how.bias.astype(logits.dtype), mode='drop')


def constrain(
  logits: Float[Array, 'B V'], mask: Int32[Array, 'B W']
) -> Float[Array, 'B V']:
  """The logits, -inf where the token's bit of the mask (`api.Matcher.allow`) is 0."""
  bits = mask[:, :, None] >> jnp.arange(32) & 1
  allowed = bits.reshape(len(mask), -1)[:, : logits.shape[1]] > 0
  return jnp.where(allowed, logits, -jnp.inf)


def truncate(scaled: Float[Array, 'B V'], how: Draws) -> Float[Array, 'B V']:
  """Sets tokens below min-p or outside top-k, then outside the nucleus, to -inf.

  The nucleus is the smallest set of most likely tokens, of those left renormalised,
  whose mass reaches top_p. Tokens tied with its least likely one are included.

  Bisection over the bits of the logits finds the thresholds: exact, and on CPU a
  seventh of the cost of a sort.

  Args:
    scaled: temperature applied, at most 0 with 0 the peak of each row.
  """
  integer = jnp.int64 if scaled.dtype == jnp.float64 else jnp.int32
  # Floats of one sign are ordered like their bits; 0 is the most likely token.
  depth = lax.bitcast_convert_type(jnp.abs(scaled), integer)
  one = jnp.ones_like(scaled)
  top_k = how.top_k
  kept = (top_k <= 0)[:, None] | (depth <= _depth(depth, one, top_k.astype(one.dtype)))
  kept &= scaled >= jnp.log(how.min_p.astype(scaled.dtype))[:, None]
  mass = jnp.where(kept, jnp.exp(scaled), 0)
  goal = how.top_p.astype(mass.dtype) * jnp.sum(mass, axis=-1)
  kept &= (how.top_p >= 1)[:, None] | (depth <= _depth(depth, mass, goal))
  return jnp.where(kept, scaled, -jnp.inf)


def _depth(
  depth: Int[Array, 'B V'], weight: Float[Array, 'B V'], goal: Float[Array, 'B']
) -> Int[Array, 'B 1']:
  """The least d for which the weight of tokens with depth <= d reaches the goal."""
  bits = jnp.iinfo(depth.dtype).bits - 1

  def halve(i, low):
    # `low` converges to the largest d for which tokens with depth < d fall short.
    step = low + (jnp.ones_like(low) << (bits - 1 - i))
    reached = jnp.sum(jnp.where(depth < step, weight, 0), axis=-1, keepdims=True)
    return jnp.where(reached < goal[:, None], step, low)

  return lax.fori_loop(0, bits, halve, jnp.zeros_like(depth[:, :1]))


def draw(mass: Float[Array, 'B V'], uniforms: Float[Array, 'B 2']) -> Int32[Array, 'B']:
  """Draws an index in proportion to its mass; never one whose mass is 0.

  Args:
    mass: non-negative, not normalised, some positive.
    uniforms: in [0, 1).
  """
  size = mass.shape[-1]
  width = math.isqrt(size - 1) + 1
  blocks = -(-size // width)
  mass = jnp.pad(mass, ((0, 0), (0, blocks * width - size)))
  mass = mass.reshape(-1, blocks, width)
  block = _invert(jnp.sum(mass, axis=-1), uniforms[:, 0])
  within = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
  return block * width + _invert(within, uniforms[:, 1])


def _invert(mass: Float[Array, 'B N'], uniform: Float[Array, 'B']) -> Int32[Array, 'B']:
  """First index with positive mass whose cumulative mass exceeds uniform · total."""
  positive = mass > 0
  # Parallel prefix sums need not be monotone to the last bit: total and index both come
  # from entries with mass, so that rounding cannot pick an entry without mass.
  upto = jnp.where(positive, jnp.cumsum(mass, axis=-1), 0)
  threshold = uniform.astype(mass.dtype) * jnp.max(upto, axis=-1)
  return jnp.argmax(upto > threshold[:, None], axis=-1).astype(jnp.int32)


def _uniform_pair(seed: jax.Array, counter: jax.Array) -> jax.Array:
  key = jax.random.wrap_key_data(seed, impl='threefry2x32')
  return jax.random.uniform(jax.random.fold_in(key, counter), (2,))
