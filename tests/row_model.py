"""M2 in row form, written apart from the product: the independent side of law 3.

One sample at a time, dense causal attention over its own tokens, every expert, MTP
as facts/algorithms.md §4.1 writes it for a row:

  h'ᵏ_i = M_k[norm(hᵏ⁻¹_i); norm(Emb(t_{i+k}))], i = 0 … n-k-1, predicting t_{i+k+1}.

Shares no code with m2jax.layers, moe or kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _norm(x, scale, eps):
  return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def _rotate(x, positions, cfg):
  """x [n, heads, H]: rotates pairs (i, i + R/2) as complex numbers."""
  half = cfg.rotary_dim // 2
  frequency = cfg.rope_theta ** (-jnp.arange(half) * 2.0 / cfg.rotary_dim)
  turn = jnp.exp(1j * positions[:, None, None] * frequency)
  z = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
  return jnp.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)


def _attention(x, p, cfg, window):
  return _attend(*_project(x, p, cfg), cfg, window) @ p['o']


def _project(x, p, cfg):
  """q [n, heads, H], k and v [n, kv_heads, H] of the rows, rotated."""
  n = len(x)
  q = _norm(x @ p['q'], p['q_norm'], cfg.rms_norm_eps).reshape(n, cfg.num_heads, -1)
  k = _norm(x @ p['k'], p['k_norm'], cfg.rms_norm_eps).reshape(n, cfg.num_kv_heads, -1)
  v = (x @ p['v']).reshape(n, cfg.num_kv_heads, -1)
  positions = jnp.arange(n)
  return _rotate(q, positions, cfg), _rotate(k, positions, cfg), v


def _attend(q, k, v, cfg, window):
  """[n, heads·H]: each row attends to itself and those before."""
  n = len(q)
  positions = jnp.arange(n)
  group = cfg.num_heads // cfg.num_kv_heads
  k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
  scores = jnp.einsum('inh,jnh->nij', q, k) / jnp.sqrt(1.0 * cfg.head_dim)
  seen = jnp.tril(jnp.ones((n, n), bool))
  if window is not None:
    back = positions[:, None] - positions[None, :]
    seen &= (back < window) | (positions[None, :] < cfg.sinks)
  scores = jnp.where(seen, scores, -jnp.inf)
  out = jnp.einsum('nij,jnh->inh', jax.nn.softmax(scores), v)
  return out.reshape(n, -1)


def _moe(x, p, bias, cfg, ids):
  logits = x @ p['router']
  if cfg.router_scores == 'softmax':
    scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
  else:
    scores = 1 / (1 + jnp.exp(-logits))
  chosen = jnp.argsort(-(scores + bias), axis=-1)[:, : cfg.experts_per_token]
  ids = chosen if ids is None else jnp.where(ids < 0, chosen, ids)
  weights = jnp.take_along_axis(scores, ids, 1)
  weights = weights / weights.sum(-1, keepdims=True)
  share = jnp.sum(jnp.eye(cfg.num_experts)[ids] * weights[..., None], axis=1)
  a = jnp.einsum('nd,edf->nef', x, p['gate'])
  hidden = a / (1 + jnp.exp(-a)) * jnp.einsum('nd,edf->nef', x, p['up'])
  return jnp.einsum('ne,nef,efd->nd', share, hidden, p['down']), ids


def _block(x, p, bias, cfg, ids=None, window=None):
  x = x + _attention(_norm(x, p['attn_norm'], cfg.rms_norm_eps), p, cfg, window)
  y, ids = _moe(_norm(x, p['moe_norm'], cfg.rms_norm_eps), p, bias, cfg, ids)
  return x + y, ids


def _logprob(state, params, targets):
  logits = state @ params['head']
  return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]


def score(variables, tokens, cfg, experts=None):
  """One sample [n] → trunk logprobs [n-1] of tokens[1:], per-module MTP logprobs, ids.

  Module k's entry scores tokens[k+1:]. `experts` [n, L, top_k] fixes the trunk's ids
  where they are not -1.
  """
  params = variables['params']
  (trunk, *modules), used, mtp_ids = states(variables, tokens, cfg, experts)
  logprobs = [_logprob(h[:-1], params, tokens[k + 2 :]) for k, h in enumerate(modules)]
  return _logprob(trunk[:-1], params, tokens[1:]), logprobs, used, mtp_ids


def mixed_logits(weights, which, tokens, cfg):
  """One sample [n] → logits [n, V] of a trunk whose weights change while it decodes.

  Position i is computed with weights[which[i]]: its queries, keys, values, experts and
  logits. It attends to keys and values as the weights of their own positions made them.
  """
  both = [(v['params'], v['router']['layers']) for v in weights]
  rows = jnp.arange(len(tokens))
  one = lambda found: jnp.stack(found)[which, rows]
  each = lambda function: one([function(*w) for w in both])
  x = each(lambda params, _: params['embed'][tokens])
  for layer in range(cfg.num_layers):
    of = [({n: a[layer] for n, a in w['layers'].items()}, b[layer]) for w, b in both]
    normed = [_norm(x, p['attn_norm'], cfg.rms_norm_eps) for p, _ in of]
    made = [_project(y, p, cfg) for y, (p, _) in zip(normed, of, strict=True)]
    seen = _attend(*map(one, zip(*made, strict=True)), cfg, None)
    x = x + one([seen @ p['o'] for p, _ in of])
    normed = [_norm(x, p['moe_norm'], cfg.rms_norm_eps) for p, _ in of]
    x = x + one(
      [_moe(y, p, bias, cfg, None)[0] for y, (p, bias) in zip(normed, of, strict=True)]
    )
  return each(
    lambda params, _: _norm(x, params['final_norm'], cfg.rms_norm_eps) @ params['head']
  )


def states(variables, tokens, cfg, experts=None):
  """One sample [n] → states hᵏ [n-k, D] of trunk and modules, ids of both."""
  params, router = variables['params'], variables['router']
  x = params['embed'][tokens]
  used = []
  for layer in range(cfg.num_layers):
    p = {name: a[layer] for name, a in params['layers'].items()}
    fixed = None if experts is None else experts[:, layer]
    full = cfg.window is None or (layer + 1) % cfg.full_attention_every == 0
    window = None if full else cfg.window
    x, ids = _block(x, p, router['layers'][layer], cfg, fixed, window)
    used.append(ids)
  h = _norm(x, params['final_norm'], cfg.rms_norm_eps)
  found, mtp_ids = [h], []
  for k in range(1, cfg.num_mtp_modules + 1):
    m = params['mtp']
    hidden = _norm(h[: len(tokens) - k], m['hidden_norm'][k - 1], cfg.rms_norm_eps)
    ahead = params['embed'][tokens[k:]]
    ahead = _norm(ahead, m['embed_norm'][k - 1], cfg.rms_norm_eps)
    # h holds states of module k-1 for i = 0 … n-k: the row shortens by one per module
    x = jnp.concatenate([hidden, ahead], -1) @ m['proj'][k - 1]
    p = {name: a[k - 1] for name, a in m['layers'].items()}
    x, ids = _block(x, p, router['mtp'][k - 1], cfg)
    mtp_ids.append(ids)
    h = _norm(x, params['final_norm'], cfg.rms_norm_eps)
    found.append(h)
  return found, used, mtp_ids
