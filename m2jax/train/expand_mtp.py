"""From one MTP module to several: weight copy, frozen main model, then joint training.

M2 pre-trains with one module and expands to three in the decay phase of continued
pre-training: new modules are copied, trained with the main model frozen until their
loss is stable, then all is trained together (facts/m2-and-forge.md §3). The source of
the copy is ambiguous: the report's text names the main model, its Figure 2 draws module
1. Both are sources here, along with random weights for comparison:

  'mtp'     module 1, with its router bias.
  'main'    the block is the last main block; the projection passes the hidden state
            (identity) and adds a little of the embedding (noise of a tenth of a random
            projection's size); norms are 1 (facts/algorithms.md §4.2, our choice).
  'random'  a module as at the start of pre-training.

"Stable" is our definition too: the held-out loss of the modules fell by less than the
fraction `tolerance` over the last `check_every` steps.

Axes: mtp modules.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import forest
from m2jax import model as model_lib
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.observe import metrics as metrics_lib
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.train import pretrain
from m2jax.train import step as train_step
from m2jax.train.loop import Run
from m2jax.train.stages import PretrainConfig

SOURCES = ('mtp', 'main', 'random')
FROZEN, JOINT = 'frozen', 'pretrain'  # directories and phases of the two parts
_HELD_OUT = 'frozen_held_out'
_EMBED_NOISE = 0.1  # of the standard deviation of a random projection


@dataclasses.dataclass(frozen=True)
class ExpandConfig:
  """More MTP modules.

  Attributes:
    frozen: training with the main model frozen, for at most its `loop.steps`.
    joint: training of everything together.
    modules: MTP modules afterwards.
    source: initial weights of new modules; see above.
    check_every: steps of the frozen part between two held-out measurements.
    tolerance: relative fall of the loss between two of them that counts as stable.
  """

  frozen: PretrainConfig
  joint: PretrainConfig
  modules: int = 3
  source: str = 'mtp'
  check_every: int = 500
  tolerance: float = 0.01

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.source in SOURCES, 'source', f'one of {SOURCES}')
    check(self.modules >= 1, 'modules', 'at least 1')
    check(self.check_every >= 1, 'check_every', 'at least 1')


def expand(
  model: ModelConfig,
  variables: Mapping[str, Any],
  modules: int,
  source: str,
  key: jax.Array,
) -> tuple[ModelConfig, dict[str, Any]]:
  """The model with `modules` MTP modules; the weights that it had are unchanged.

  Args:
    variables: {'params', 'router'}; the result shares its arrays.
    source: see above. 'main' and 'random' also make the first module of a model that
      has none, such as the released ones.
    key: key for the random weights.

  Raises:
    ValueError: the model has as many modules already, or none to copy.
  """
  have = model.num_mtp_modules
  if modules <= have:
    raise ValueError(f'the model has {have} MTP modules already, asked for {modules}')
  if source == 'mtp' and not have:
    raise ValueError("the model has no MTP module to copy: use source='main'")
  bigger, new = dataclasses.replace(model, num_mtp_modules=modules), modules - have
  params, router = dict(variables['params']), dict(variables['router'])

  def repeated(tree, index: int):
    return jax.tree.map(lambda a: jnp.repeat(a[index][None], new, axis=0), tree)

  @jax.jit  # compiled, the rest of the model is never made
  def random(key):
    fresh = train_step.init_variables(bigger, key)['params']['mtp']
    return jax.tree.map(lambda a: a[have:], fresh)

  bias = jnp.zeros((new, *router['layers'].shape[1:]), router['layers'].dtype)
  if source == 'mtp':
    made, bias = repeated(params['mtp'], 0), repeated(router['mtp'], 0)
  else:
    made = random(key)
  if source == 'main':
    made['layers'], bias = (
      repeated(params['layers'], -1),
      repeated(router['layers'], -1),
    )
    hidden = jnp.eye(model.embed_dim, dtype=made['proj'].dtype)
    noise = _EMBED_NOISE * made['proj'][:, model.embed_dim :]
    hidden = jnp.broadcast_to(hidden, noise.shape)
    made['proj'] = jnp.concatenate([hidden, noise], axis=1)

  def joined(old, added):
    return jnp.concatenate([old, added.astype(old.dtype)])

  params['mtp'] = jax.tree.map(joined, params['mtp'], made) if have else made
  router['mtp'] = joined(router['mtp'], bias) if have else bias
  return bigger, {'params': params, 'router': router}


def module_losses(
  model: ModelConfig, variables, batches: Iterable[forest.Forest]
) -> np.ndarray:
  """[mtp] float64: nats per token that the module scores.

  Module k scores none of the first k + 1 tokens of a document. (The training loss
  divides all modules by the same number of terms.)
  """
  total, terms = np.zeros((2, model.num_mtp_modules))
  for batch in batches:
    loss, number = jax.device_get(_module_sums(model, variables, batch))
    total, terms = total + loss, terms + number
  return total / np.maximum(terms, 1.0)


@functools.partial(jax.jit, static_argnums=0)
def _module_sums(model: ModelConfig, variables, batch: forest.Forest):
  """−Σ weight · log p of each module [mtp], and Σ weight of the tokens it scores."""
  scores = model_lib.forward(model, variables, batch).mtp_logprob
  at_terms = jax.vmap(lambda values: train_step.at_terms(values, batch))
  first = jnp.arange(2, 2 + model.num_mtp_modules)  # positions
  scored = batch.position >= first[:, None, None]
  loss = -jnp.sum(batch.weight * at_terms(scores), (1, 2))
  return loss, jnp.sum(batch.weight * at_terms(scored), (1, 2))


class Data(NamedTuple):
  """What an expansion reads.

  Attributes:
    frozen, joint: for each stage of that part, a source of token arrays.
    held_out: documents that decide when the loss of the modules is stable.
  """

  frozen: Sequence[Sequence[np.ndarray]]
  joint: Sequence[Sequence[np.ndarray]]
  held_out: Sequence[np.ndarray]


def fit(
  config: ExpandConfig,
  model: ModelConfig,
  variables: dict[str, Any],
  data: Data,
  workdir: pathlib.Path,
  make_run: Callable[[str, CheckpointManager], Run],
  *,
  seed: int,
  sharding: Sharding = ONE_DEVICE,
) -> tuple[ModelConfig, train_step.TrainState]:
  """Expands, trains the new modules alone and then everything, or resumes.

  The frozen part saves its checkpoints in `workdir/frozen`, the joint one in
  `workdir/pretrain`, where `checkpoint.policy` looks for a policy.

  Args:
    config: the settings.
    model: the model before the expansion.
    variables: weights of `model`; taken over.
    data: the documents.
    workdir: directory of the run and its metrics.
    make_run: phase and checkpoint manager → where the part's output goes.
    seed: seed of random weights and of the order of the documents.
    sharding: the mesh to train on.
  """
  fit_part = functools.partial(pretrain.fit, seed=seed, sharding=sharding)
  model, variables = expand(
    model, variables, config.modules, config.source, jax.random.key(seed)
  )

  def manager_of(part: str, settings: PretrainConfig) -> CheckpointManager:
    every = settings.loop.keep_every_steps
    return CheckpointManager(workdir / part, keep_every_steps=every)

  with manager_of(FROZEN, config.frozen) as manager:
    run = make_run(FROZEN, manager)

    def train(steps: int, variables) -> train_step.TrainState:
      loop = dataclasses.replace(config.frozen.loop, steps=steps)
      part = dataclasses.replace(config.frozen, loop=loop)
      return fit_part(part, model, data.frozen, run, variables=variables, only_mtp=True)

    def measure(state: train_step.TrainState) -> float:
      loss = pretrain.held_out(
        config.frozen, model, state.variables, data.held_out, sharding
      )
      run.metrics.write(_HELD_OUT, int(state.step), loss)
      return loss['mtp_loss']

    known = {r['step']: r['mtp_loss'] for r in metrics_lib.read(workdir, _HELD_OUT)}
    state = _until_stable(config, variables, train, measure, known)
  with manager_of(JOINT, config.joint) as manager:
    run, variables = make_run(JOINT, manager), state.variables
    state = fit_part(config.joint, model, data.joint, run, variables=variables)
  return model, state


def _until_stable(
  config: ExpandConfig,
  variables,
  train: Callable[[int, Any], train_step.TrainState],
  measure: Callable[[train_step.TrainState], float],
  known: Mapping[int, float],
) -> train_step.TrainState:
  """Trains round by round until the held-out loss of the modules is stable.

  Args:
    config: the rule.
    variables: weights to start from.
    train: trains up to a step, from variables or resumed.
    measure: measures the loss and records it.
    known: step → loss that an earlier process recorded, so that a restart decides as
      that process did. A round's checkpoint is on disk before its loss is recorded.
  """
  losses, state = [], None
  for number in itertools.count(1):
    steps = min(number * config.check_every, config.frozen.loop.steps)
    if steps in known:
      losses.append(known[steps])
    else:
      state = train(steps, variables)
      variables = state.variables
      if int(state.step) < steps:  # the data or the seconds ended
        return state
      losses.append(measure(state))
    stable = len(losses) > 1 and losses[-2] - losses[-1] < config.tolerance * losses[-2]
    if stable or steps == config.frozen.loop.steps:
      return train(steps, variables) if state is None else state
