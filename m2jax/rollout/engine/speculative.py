"""Speculative decoding: MTP modules draft tokens, the main model verifies them at once.

The random numbers of a request depend on its seed and on the index of the token only
(`sampling`). One call of the main model consumes a row's last token and its K drafts;
at each of the K + 1 positions the token is sampled from the main model's logits with
the random numbers of that position, exactly as without drafts. Drafts are accepted as
long as each matches the sampled token, and the first token that differs replaces its
draft. So the tokens equal those of plain decoding, for all sampling settings and
whatever the drafts are, and log-probabilities are the main model's. Drafts are also
drawn with the random numbers of their positions: the closer the modules' distribution
is to the main model's, the more drafts are equal, at any temperature.

Keys and values of rejected drafts stay beyond the length of the sequence, where the
next tokens overwrite them.

Axes: P rows, K drafts, C = K + 1 tokens to verify, N rounds of a call, n pages of a
table, V vocabulary, D model.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.rollout.engine import calls as calls_lib
from m2jax.rollout.engine import contexts, forward, modules, sampling
from m2jax.rollout.engine.calls import Calls
from m2jax.rollout.engine.decode_state import (
  NO_DRAFT,
  DecodeState,
  Drafted,
  Sampled,
  Slots,
)


class _Verified(NamedTuple):
  """The result of one round's verification.

  Attributes:
    slots: Slots after the sampled tokens.
    sampled: Sampled with these tokens.
    drawn: [P, C] the main model's tokens; valid up to the first that differs.
    tested, accepted: [P, K] int32, see `Drafted`.
  """

  slots: Slots
  sampled: Sampled
  drawn: jax.Array
  tested: jax.Array
  accepted: jax.Array


def positions(steps: int, drafts: int) -> int:
  """Positions that a call of `steps` rounds can store after a sequence's length."""
  return steps * (drafts + 1) + drafts


def generate_many(
  calls: Calls, K: int, params, state: DecodeState, rows, num_rows, tables, steps
) -> tuple[DecodeState, Sampled, Drafted]:
  """`Calls.generate_many` with K drafts of each token: up to `steps` · (K + 1) tokens.

  Args:
    tables: [P, n] int32, pages of at least length + `positions` positions each.
  """
  N, P = calls.config.max_steps, rows.shape[0]
  slots, sampled = calls.begin(state, rows, num_rows, N * (K + 1))
  none = jnp.zeros((P, K), jnp.int32)
  drafted = Drafted(jnp.zeros(P, jnp.int32), none, none, jnp.ones(P, bool))
  starts, pages = slots.length, state.pages
  if calls.contexts:
    pages = contexts.take(pages, tables, calls.cfg.num_layers + K)

  def unfinished(carry):
    step, left, *_ = carry
    return (step < steps) & left

  def one(carry):
    step, _, *rest = carry
    pages, slots, sampled, drafted = _round(calls, K, params, tables, *rest)
    return step + 1, calls.any_left(slots), pages, slots, sampled, drafted

  begin = jnp.int32(0), calls.any_left(slots), pages, slots, sampled, drafted
  _, _, pages, slots, sampled, drafted = lax.while_loop(unfinished, one, begin)
  if calls.contexts:
    # The modules have consumed one token more.
    new, most = slots.length - starts + 1, N * (K + 1) + 1
    pages = contexts.put_back(state.pages, pages, tables, starts, new, most)
  slots = calls_lib.scatter(state.slots, slots, rows, num_rows[0])
  return DecodeState(pages, slots), sampled, drafted


def _round(
  calls: Calls, K: int, params, tables, pages, slots, sampled, drafted: Drafted
):
  """One verification and new drafts: pages, slots, sampled, drafted."""
  before, running = slots, slots.remaining > 0
  ahead = (slots.drafts[:, 0] >= 0).astype(jnp.int32)  # see Slots.drafts
  first = slots.length + ahead  # that the modules have not consumed
  begin = modules.start(pages, tables, first, trunk=slots.length - 1)
  tokens = jnp.maximum(slots.drafts[:, :K], 0)
  tokens = jnp.concatenate([slots.token[:, None], tokens], axis=1)
  rows = forward.Rows(tokens, slots.length, running * (K + 1), tables)
  hidden, pages = calls.extend(params, pages, rows)
  done = _verify(calls, K, params, pages, slots, sampled, hidden, tables)
  slots, new = done.slots, done.slots.length - before.length
  pages = modules.store_states(pages, 0, rows._replace(counts=new), hidden)
  # From the first token that the modules have not consumed to the last one.
  tokens = jnp.concatenate([before.token[:, None], done.drawn], axis=1)
  states = jnp.concatenate([begin.states[0][:, None], hidden], axis=1)
  chunk = ahead[:, None] + jnp.arange(K + 1)
  rows = forward.Rows(
    tokens=jnp.take_along_axis(tokens, chunk, axis=1),
    starts=first,
    counts=jnp.where(running, new + 1 - ahead, 0),
    tables=tables,
  )
  states = jnp.take_along_axis(states, chunk[..., None], axis=1)
  finite = []

  def draw(number: int, state, pages):
    logits = calls.logits(params, state)
    logits = calls_lib.adjusted(logits, slots, pages, tables, ahead=number)
    how = calls_lib.draws(slots)
    how = how._replace(counters=how.counters + number)
    token, logprob, _ = sampling.sample(logits, how, calls.cfg.invariant)
    finite.append(jnp.isfinite(logprob))
    return token

  pages, drafts = modules.draft(
    calls.cfg, params, pages, rows, states, begin, K, draw, calls.sharding
  )
  unused = slots.drafts.shape[1] - K
  drafts = jnp.pad(drafts, ((0, 0), (0, unused)), constant_values=NO_DRAFT)
  drafts = jnp.where(running[:, None], drafts, slots.drafts)
  drafted = Drafted(
    verified=drafted.verified + running,
    tested=drafted.tested + done.tested,
    accepted=drafted.accepted + done.accepted,
    finite=drafted.finite & (jnp.stack(finite).all(axis=0) | ~running),
  )
  return pages, dataclasses.replace(slots, drafts=drafts), done.sampled, drafted


def _verify(calls: Calls, K: int, params, pages, slots: Slots, sampled, hidden, tables):
  """Draws tokens from hidden [P, C, D] and appends those up to the first new one."""
  (P, C, D), N = hidden.shape, sampled.tokens.shape[1]
  logits = calls.logits(params, hidden.reshape(-1, D)).reshape(P, C, -1)
  column = lambda i: calls_lib.adjusted(logits[:, i], slots, pages, tables, ahead=i)
  logits = jnp.stack([column(i) for i in range(C)], axis=1)
  how = jax.tree.map(lambda x: jnp.repeat(x, C, axis=0), calls_lib.draws(slots))
  how = how._replace(counters=how.counters + jnp.tile(jnp.arange(C), P))
  logits = logits.reshape(P * C, -1)
  token, logprob, logprobs = sampling.sample(logits, how, calls.cfg.invariant)
  ids, best = calls.top(logprobs, slots)
  shaped = lambda x: x.reshape(P, C, *x.shape[1:])
  token, logprob, ids, best = map(shaped, (token, logprob, ids, best))
  active, tested, accepted, row = slots.remaining > 0, [], [], jnp.arange(P)
  for i in range(C):
    if i:
      draft = slots.drafts[:, i - 1]
      compared = active & (slots.remaining > 0) & (draft >= 0)
      active = compared & (token[:, i - 1] == draft)
      tested.append(compared.astype(jnp.int32))
      accepted.append(active.astype(jnp.int32))
    slots, code = calls.take(slots, token[:, i], logprob[:, i], active)
    at = jnp.where(active, sampled.counts, N)
    put = lambda into, new, at=at: into.at[row, at].set(
      new.astype(into.dtype), mode='drop'
    )
    sampled = Sampled(
      tokens=put(sampled.tokens, token[:, i]),
      logprobs=put(sampled.logprobs, logprob[:, i]),
      counts=sampled.counts + active,
      finish_code=jnp.where(active, code, sampled.finish_code),
      top_ids=put(sampled.top_ids, ids[:, i]),
      top_logprobs=put(sampled.top_logprobs, best[:, i]),
    )
  tested, accepted = jnp.stack(tested, axis=1), jnp.stack(accepted, axis=1)
  return _Verified(slots, sampled, token, tested, accepted)
