"""The phases before RL: demonstrations, the tokenizer trained on them, and SFT.

And what RL starts from. Where several processes train, all call `sft` and `learner`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from absl import logging

from m2jax import forest, kinds, sandbox, tasks
from m2jax import sharding as sharding_lib
from m2jax.checkpoint import CheckpointMismatch, initial, policy
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.data import chats as chats_lib
from m2jax.forge import authored
from m2jax.forge.config import ForgeConfig
from m2jax.observe.metrics import MetricsWriter
from m2jax.optim import optimizer as optimizer_lib
from m2jax.rl import critic, distillation
from m2jax.rl.learner import Learner
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.tasks import demonstrations
from m2jax.text import tokenizer
from m2jax.train import sft as sft_lib
from m2jax.train import step as train_step
from m2jax.train import workdir as workdir_lib
from m2jax.train.loop import Run

DEMONSTRATIONS = 'demonstrations.jsonl'
KEEP = 2  # newest checkpoints of RL; those of `keep_every_steps` are for evaluations

_Made = TypeVar('_Made')


def make_demonstrations(
  config: ForgeConfig, path: Path, on_progress: Callable[[float], None] = lambda f: None
):
  """Returns the demonstrations; makes and stores them at `path` once.

  Raises:
    ValueError: none of them solved its task, so that there is nothing to learn from.
  """
  if not path.exists() and config.sft.recorded:
    demonstrations.write(path, recorded(config))
  if not path.exists():
    total = config.sft.demonstrations
    drawn_from = config.tasks
    if config.sft.families:
      drawn_from = dataclasses.replace(drawn_from, weights=config.sft.families)
    seed = config.seed + 1_000_003
    specs = [tasks.spec(drawn_from, 'train', i, seed=seed) for i in range(total)]
    on_done = lambda done: on_progress(done / total)

    async def collect():
      try:
        if config.episodes.agent.author is not None:
          return await authored.collect(
            specs, config.teacher, config.episodes, on_done=on_done
          )
        return await demonstrations.collect(
          specs,
          config.teacher,
          backend=config.episodes.backend,
          limits=config.episodes.limits,
          on_done=on_done,
        )
      finally:
        await sandbox.shutdown()

    made = _finish(collect())
    if made and not any(demo.success == 1 for demo in made):
      why = ''
      if config.episodes.agent.author is not None:
        why = (
          "; config.episodes.agent.author.rename must map the names of the task's "
          "tool and its arguments to those of the agent's"
        )
      raise ValueError(f'none of {total} demonstrations solved its task{why}')
    demonstrations.write(path, made)
  return demonstrations.read(path)


def _finish(coroutine: Coroutine[Any, Any, _Made]) -> _Made:
  """The result of a coroutine, also in a notebook, whose thread runs a loop already."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(coroutine)
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(asyncio.run, coroutine).result()


def recorded(config: ForgeConfig) -> list[tasks.Demonstration]:
  """The chats of `config.sft.recorded`.

  Raises:
    ValueError: a line is not a chat, or is of a task that is not for training.
  """
  found = []
  for chat in chats_lib.read(config.sft.recorded)[: config.sft.demonstrations]:
    if chat.task and (split := tasks.make(chat.task).split) != 'train':
      raise ValueError(f'{chat.name}: {chat.task} is of the split {split!r}, not train')
    found.append(
      tasks.Demonstration(chat.task or chat.name, chat.messages, chat.tools, 1.0)
    )
  return found


def chats(
  config: ForgeConfig, demos: Sequence[tasks.Demonstration]
) -> list[chats_lib.Chat]:
  """Demonstrations as the agent's requests, with its prompts and tools.

  An agent that writes its own prompts has none to add, nor have recorded chats.
  """
  if config.sft.recorded:
    return [chats_lib.Chat(d.task, d.messages, d.tools) for d in demos]
  agent = config.episodes.agent
  return [
    chats_lib.Chat(demo.task, *shown)
    for demo in demos
    for shown in agent.of_task(demo.task).shown(demo.messages, demo.tools)
  ]


def make_tokenizer(config: ForgeConfig, demos, path: Path) -> tokenizer.Tokenizer:
  """The run's tokenizer, stored at `path`: that of the weights that it starts from, or
  a byte-level BPE trained on the run's own text."""

  def make():
    if config.init_from:
      return initial.tokenizer(config.init_from)
    texts = [chat.text() for chat in chats(config, demos)]
    return tokenizer.train(texts, config.model.vocab_size)

  return workdir_lib.keep_tokenizer(path, make, config.model.vocab_size)


def encode(
  config: ForgeConfig, tok: tokenizer.Tokenizer, demos
) -> list[list[forest.Sample]]:
  """Demonstrations as groups of samples, with loss on the teacher's tokens only."""
  room, templates = config.engine.context_tokens, config.sft.templates
  return chats_lib.encode(chats(config, demos), tok, room, templates)


class Material(NamedTuple):
  """What SFT learns from, and the files of every checkpoint."""

  groups: list[list[forest.Sample]]
  tokenizer: tokenizer.Tokenizer
  files: dict[str, bytes]


def material(config: ForgeConfig, workdir: Path, demos=None) -> Material:
  """Groups of samples, and tokenizer, of the demonstrations in `workdir`."""
  if demos is None:
    demos = make_demonstrations(config, workdir / DEMONSTRATIONS)
  verified = [demo for demo in demos if demo.success == 1]
  path = workdir / policy.TOKENIZER_FILE
  tok = make_tokenizer(config, verified, path)
  groups = encode(config, tok, verified)
  return Material(groups, tok, {policy.TOKENIZER_FILE: path.read_bytes()})


def start(config: ForgeConfig, workdir: Path, sharding: Sharding) -> Any:
  """Random weights, or those of `config.init_from`; every process calls it.

  Where SFT resumes, its checkpoint replaces them, and none are read.

  Raises:
    CheckpointMismatch: they are of another model; names the fields.
  """
  with CheckpointManager(workdir / 'sft', read_only=True) as manager:
    resumes = manager.latest_step() is not None
  if resumes or not config.init_from:
    random = train_step.init_variables(config.model, jax.random.key(config.seed))
    initialize = optimizer_lib.initializer(config.sft.optimizer, config.model)
    random['params'] = initialize(random['params'])
    return random
  found = initial.load(config.init_from, config.model, sharding)
  initial.check(found.model, config.model, config.init_from)
  return found.variables


def on_mesh(variables: Any, config: ForgeConfig, sharding: Sharding) -> Any:
  """Weights as the learner has them on the mesh, where they are not already."""
  specs = sharding_lib.param_specs(config.model, sharding.rules)
  return sharding.place(variables, specs)


class Tuned(NamedTuple):
  """Weights after SFT.

  Attributes:
    variables: the weights, on the mesh.
    step: step of the last checkpoint.
  """

  variables: Any
  step: int


def sft(
  config: ForgeConfig,
  groups: list[list[forest.Sample]],
  variables,
  workdir: Path,
  metrics: MetricsWriter,
  files: dict[str, bytes],
  *,
  phase: str = 'sft',
  sharding: Sharding = ONE_DEVICE,
) -> Tuned:
  """Fine-tunes a copy of `variables` on groups of samples; every process calls it.

  Args:
    phase: 'sft' or 'more_sft', which continues with settings of its own; also the
      directory of the checkpoints.
    sharding: the mesh.
  """
  settings, seed = config.sft, config.seed
  if phase == 'more_sft':
    more = config.more_sft
    settings = dataclasses.replace(settings, loop=more.loop, optimizer=more.optimizer)
    seed += 1  # another order
  every = settings.loop.keep_every_steps
  tok = tokenizer.loads(files[policy.TOKENIZER_FILE])
  roles = chats_lib.trained_by_role(groups, tok)
  with CheckpointManager(workdir / phase, keep=1, keep_every_steps=every) as manager:
    state = sft_lib.fit(
      settings,
      config.model,
      jax.tree.map(jnp.copy, variables),
      groups,
      Run(phase, manager, metrics, files=files, scalars=roles),
      seed=seed,
      sharding=sharding,
    )
  return Tuned(state.variables, int(state.step))


def learner(
  config: ForgeConfig,
  variables,
  sharding: Sharding,
  served: Callable[[Any], Any] = sharding_lib.local_copy,
  make: Callable[..., Learner] = Learner,
) -> Learner:
  """RL's learner, which takes the variables over; every process makes one.

  Args:
    served: see Learner.
    make: `processes.lead.LeadLearner`, of process 0.
  """
  # first: what is wrong with a teacher shows before the optimizer takes memory
  taught = teachers(config, sharding)
  optimizer = optimizer_lib.make(config.rl.optimizer, config.model, sharding)
  partition = optimizer_lib.describe(config.rl.optimizer, variables['params'])
  logging.info('rl: %s', partition)
  return make(
    config.model,
    config.rl.learner,
    optimizer,
    critic.begin(
      *(config.rl.learner.critic, variables, config.model, optimizer, sharding)
    ),
    sharding,
    served,
    taught,
  )


def check_teachers(config: ForgeConfig, tok: tokenizer.Tokenizer) -> None:
  """Reads the tokenizers of RL's teachers, before the phases that come first.

  Raises:
    MissingCheckpoint: a teacher is not there.
    CheckpointMismatch: it has other tokens.
  """
  if config.rl is None:
    return
  for directory in set(config.rl.learner.distillation.directories.values()):
    if initial.tokenizer(directory).tokens() != tok.tokens():
      raise CheckpointMismatch(
        f'the teacher {directory} has other tokens than this run: distillation needs '
        'the same tokenizer, which runs share by config.start or config.init_from'
      )


def teachers(
  config: ForgeConfig, sharding: Sharding
) -> dict[str, distillation.Teacher]:
  """RL's teachers by domain, each read once, onto the mesh; every process calls it."""
  found, loaded = {}, {}
  for domain, directory in config.rl.learner.distillation.directories.items():
    if directory not in loaded:
      one = initial.load(directory, config.model, sharding)
      logging.info('teacher of %r: %s, step %d', domain, one.directory, one.step)
      loaded[directory] = distillation.Teacher(one.model, one.variables)
    found[domain] = loaded[directory]
  return found


def checkpoints(
  config: ForgeConfig,
  workdir: Path,
  make: Callable[..., CheckpointManager] = CheckpointManager,
) -> CheckpointManager:
  """The manager of RL's checkpoints, for the loop or for a process that follows it.

  `make`: `processes.lead.LeadManager`, of process 0.
  """
  every = config.rl.keep_every_steps
  return make(workdir / 'rl', keep=KEEP, keep_every_steps=every)


# Settings that determine the SFT weights; a control shares them with its run.
_SHARED = ('seed', 'model', 'tasks', 'teacher', 'sft')


def take_over(config: ForgeConfig, workdir: Path) -> None:
  """Copies demonstrations, tokenizer and SFT weights of the run `config.start`.

  Files that exist in `workdir` already are left alone.

  Raises:
    FileNotFoundError: that run has not started its SFT.
    ValueError: its SFT used other settings.
  """
  start = Path(config.start)
  settings = start / 'config.json'
  if settings.exists():
    theirs = json.loads(settings.read_text())
    ours = json.loads(json.dumps(dataclasses.asdict(config)))
    kind = kinds.module(tasks.__package__, config.tasks.kind)
    for name in getattr(kind, 'RL_ONLY', ()):
      theirs.get('tasks', {}).pop(name, None)
      ours['tasks'].pop(name)
    for one in (theirs, ours):  # the weights are the same but for rounding
      one.get('model', {}).pop('numerics', None)
    differing = [name for name in _SHARED if theirs.get(name) != ours[name]]
    if differing:
      raise ValueError(
        f'ForgeConfig.start={start}: that run has another {", ".join(differing)}; set '
        'the same values in this run'
      )
  for name in (DEMONSTRATIONS, policy.TOKENIZER_FILE, 'sft'):
    source, target = start / name, workdir / name
    if target.exists():
      continue
    if not source.exists():
      raise FileNotFoundError(
        f'ForgeConfig.start={start}: has no {name}; give the workdir of a run that has '
        'finished SFT'
      )
    partial = target.with_name(name + '.new')
    if source.is_dir():
      shutil.rmtree(partial, ignore_errors=True)
      shutil.copytree(source, partial)
    else:
      shutil.copyfile(source, partial)
    partial.rename(target)
