"""The train step: forest batch → loss terms → gradients → optimizer and router bias.

What is learned is an `objective(logprob, batch) -> (loss, metrics)`, a sum over the
loss terms of a forest; pre-training and SFT use `nll`, RL brings its own. MTP is added
over the same terms (facts/algorithms.md §4.1: L = main + λ/K · Σ_k L^k). Weights of a
batch are normalised on the host, so every loss and metric is a sum: a batch of many
rows may be cut into micro-batches of one compiled shape and gives the same update
(law 3).

Axes: B rows, S tokens, M loss terms of a row, L layers, E experts, K MTP modules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m2jax import model
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.moe import router

# (logprob [B, M], batch) → scalar loss, dict of scalar metrics; all of them sums
Objective = Callable[[jax.Array, Forest], tuple[jax.Array, dict[str, jax.Array]]]
Step = Callable[['TrainState', Forest], tuple['TrainState', dict[str, jax.Array]]]


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
    micro_rows: rows of one forward and backward pass.
    mtp_weight: λ of the MTP loss.
    detach_mtp: keep the MTP loss's gradient out of trunk, embedding and head.
    bias_update_rate: u of the router bias's sign step; 0 freezes the bias.
  """

  micro_rows: int = 4
  mtp_weight: float = 0.3
  detach_mtp: bool = False
  bias_update_rate: float = 1e-3


def init_variables(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Random {'params', 'router'} of the model."""
  variables = model.M2(cfg).init(key, jnp.zeros((1, 2), jnp.int32))
  return {name: dict(variables[name]) for name in ('params', 'router')}


def init_state(variables, optimizer: optax.GradientTransformation) -> TrainState:
  """A fresh optimizer at step 0 over the variables, which it takes over."""
  opt_state = optimizer.init(variables['params'])
  return TrainState(jnp.zeros((), jnp.int32), variables, opt_state)


def at_terms(values: jax.Array, batch: Forest) -> jax.Array:
  """values [B, S] at the token of each loss term: [B, M]."""
  return jnp.take_along_axis(values, jnp.asarray(batch.term_token), axis=1)


def nll(logprob: jax.Array, batch: Forest) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Negative log-likelihood: −Σ weight · log p over the terms."""
  return -jnp.sum(batch.weight * logprob), {}


def normalise(batch: Forest) -> Forest:
  """The batch with weights that sum to 1: the mean over its terms. Host arrays."""
  total = float(np.sum(batch.weight))
  return dataclasses.replace(batch, weight=batch.weight / np.float32(max(total, 1e-9)))


def fetch(metrics: dict[str, jax.Array], where: str) -> dict[str, float]:
  """A step's metrics as numbers on the host.

  Raises:
    FloatingPointError: the loss or its gradient is not finite; the message begins with
      `where`, the name of the step.
  """
  values = {name: float(v) for name, v in jax.device_get(metrics).items()}
  for name in ('loss', 'grad_norm'):
    if not math.isfinite(values.get(name, 0.0)):
      raise FloatingPointError(f'{where}: {name} is {values[name]}')
  return values


def loss_and_loads(params, router_state, batch, cfg, objective, config: StepConfig):
  """Scalar loss and (metrics, expert loads) of one forest batch."""
  variables = {'params': params, 'router': router_state}
  out = model.forward(cfg, variables, batch, detach_mtp=config.detach_mtp)
  loss, metrics = objective(at_terms(out.logprob, batch), batch)

  def weighted(values):  # [B, S] → sum over the terms
    return jnp.sum(batch.weight * at_terms(values, batch))

  metrics = dict(metrics, loss=loss, entropy=weighted(out.entropy))
  if cfg.num_mtp_modules:
    mtp_loss = -sum(weighted(lp) for lp in out.mtp_logprob) / cfg.num_mtp_modules
    metrics['mtp_loss'] = mtp_loss
    loss = loss + config.mtp_weight * mtp_loss
  return loss, (metrics, out.loads)


def micro_batches(batch: Forest, rows: int) -> Iterator[Forest]:
  """Slices of `rows` rows; the last is filled up with padding rows."""
  fills = {'parent': -1, 'term_sample': -1, 'term_offset': -1, 'experts': -1}

  def cut(field, start):
    values = getattr(batch, field.name)
    if values is None:
      return None
    values = values[start : start + rows]
    pad = [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values, pad, constant_values=fills.get(field.name, 0))

  for start in range(0, len(batch.tokens), rows):
    yield Forest(**{f.name: cut(f, start) for f in dataclasses.fields(Forest)})


def make_step(
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  objective: Objective,
  config: StepConfig,
) -> Step:
  """`step(state, batch) -> (state, metrics)` over host batches; the state is donated.

  Metrics are scalars: the objective's, `loss`, `entropy`, `mtp_loss`, `grad_norm` and
  `max_violation` (router balance, mean over layers).
  """

  @jax.jit
  def micro(variables, batch):
    grads, (metrics, loads) = jax.grad(loss_and_loads, has_aux=True)(
      variables['params'], variables['router'], batch, cfg, objective, config
    )
    return grads, metrics, loads

  @jax.jit
  def add(a, b):
    return jax.tree.map(jnp.add, a, b)

  def apply(state: TrainState, sums):
    grads, metrics, loads = sums
    params, router_state = state.variables['params'], state.variables['router']
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
    biases = {
      name: router.update_bias(bias, loads[name], config.bias_update_rate)
      for name, bias in router_state.items()
    }
    metrics = dict(
      metrics,
      grad_norm=optax.tree.norm(grads),
      max_violation=jnp.mean(router.max_violation(loads['layers'])),
    )
    variables = {'params': optax.apply_updates(params, updates), 'router': biases}
    return TrainState(state.step + 1, variables, opt_state), metrics

  apply = jax.jit(apply, donate_argnums=0)

  def step(state: TrainState, batch: Forest):
    sums = None
    for part in micro_batches(batch, config.micro_rows):
      out = micro(state.variables, part)
      sums = out if sums is None else add(sums, out)
    return apply(state, sums)

  return step
