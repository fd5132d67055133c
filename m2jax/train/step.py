"""The train step: forest batch → loss terms → gradients → optimizer and router bias.

What is learned is an `objective(logprob, batch) -> (loss, metrics)` over the terms of a
forest; pre-training and SFT use `nll`, RL brings its own. MTP is added with its weight,
over the same terms (facts/algorithms.md §4.1: L = main + λ/K · Σ_k L^k).

Axes: B rows, S tokens, M loss terms of a row, L layers, E experts, K MTP modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from m2jax import model
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.moe import router

# (logprob [B, M], batch) → scalar loss, dict of scalar metrics
Objective = Callable[[jax.Array, Forest], tuple[jax.Array, dict[str, jax.Array]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything a step reads and writes; one pytree.

  Attributes:
    step: int32 scalar, optimizer steps taken.
    variables: {'params', 'router'} of the model.
    opt_state: the optimizer's.
  """

  step: jax.Array
  variables: dict[str, Any]
  opt_state: Any


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """How a batch becomes an update.

  Attributes:
    mtp_weight: λ of the MTP loss.
    detach_mtp: keep the MTP loss's gradient out of trunk, embedding and head.
    bias_update_rate: u of the router bias's sign step; 0 freezes the bias.
  """

  mtp_weight: float = 0.3
  detach_mtp: bool = False
  bias_update_rate: float = 1e-3


def init_state(
  cfg: ModelConfig, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
  """Random variables and a fresh optimizer."""
  variables = model.M2(cfg).init(key, jnp.zeros((1, 2), jnp.int32))
  variables = {name: dict(variables[name]) for name in ('params', 'router')}
  return TrainState(
    jnp.zeros((), jnp.int32), variables, optimizer.init(variables['params'])
  )


def at_terms(values: jax.Array, batch: Forest) -> jax.Array:
  """values [B, S] at the token of each loss term: [B, M]."""
  return jnp.take_along_axis(values, jnp.asarray(batch.term_token), axis=1)


def nll(logprob: jax.Array, batch: Forest) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Weighted mean negative log-likelihood over the batch's terms."""
  weight = batch.weight.astype(logprob.dtype)
  return -jnp.sum(weight * logprob) / jnp.maximum(jnp.sum(weight), 1e-9), {}


def loss_and_loads(params, router_state, batch, cfg, objective, config: StepConfig):
  """Scalar loss and (metrics, expert loads) of one forest batch."""
  variables = {'params': params, 'router': router_state}
  out = model.forward(cfg, variables, batch, detach_mtp=config.detach_mtp)
  loss, metrics = objective(at_terms(out.logprob, batch), batch)
  weight = batch.weight.astype(out.logprob.dtype)

  def mean(values):  # [B, S] → weighted mean over the terms
    return jnp.sum(weight * at_terms(values, batch)) / jnp.maximum(jnp.sum(weight), 1e-9)

  metrics = dict(metrics, loss=loss, entropy=mean(out.entropy))
  if cfg.num_mtp_modules:
    metrics['mtp_loss'] = -sum(mean(lp) for lp in out.mtp_logprob) / cfg.num_mtp_modules
    loss = loss + config.mtp_weight * metrics['mtp_loss']
  return loss, (metrics, out.loads)


def make_step(
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  objective: Objective,
  config: StepConfig,
) -> Callable[[TrainState, Forest], tuple[TrainState, dict[str, jax.Array]]]:
  """A jitted `step(state, batch) -> (state, metrics)`; the state is donated.

  Metrics are scalars: the objective's, `loss`, `entropy`, `mtp_loss`, `grad_norm` and
  `max_violation` (router balance, mean over layers).
  """

  def step(state: TrainState, batch: Forest):
    params, router_state = state.variables['params'], state.variables['router']
    grads, (metrics, loads) = jax.grad(loss_and_loads, has_aux=True)(
      params, router_state, batch, cfg, objective, config
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
    biases = {
      name: router.update_bias(bias, loads[name], config.bias_update_rate)
      for name, bias in router_state.items()
    }
    metrics['grad_norm'] = optax.global_norm(grads)
    metrics['max_violation'] = jnp.mean(router.max_violation(loads['layers']))
    variables = {'params': optax.apply_updates(params, updates), 'router': biases}
    return TrainState(state.step + 1, variables, opt_state), metrics

  return jax.jit(step, donate_argnums=0)
