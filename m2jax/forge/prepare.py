"""Before RL: demonstrations of the teacher, the tokenizer they train, and SFT."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import jax
from absl import logging

from m2jax import forest, sandbox
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.data import demos as demos_lib
from m2jax.data import packing
from m2jax.forge.config import ForgeConfig
from m2jax.observe.metrics import MetricsWriter
from m2jax.optim import optimizer as optimizer_lib
from m2jax.tasks import terminal
from m2jax.tasks.terminal import demonstrations, shell
from m2jax.text import chat, tokenizer
from m2jax.train import loop
from m2jax.train import step as train_step



def make_demonstrations(config: ForgeConfig, path: Path, on_progress: Callable[[float], None] = lambda f: None
):
  """The teacher's demonstrations, made once and kept at `path`."""
  if not path.exists():
    total = config.sft.demonstrations
    specs = [
      terminal.spec('train', i, seed=config.seed + 1_000_003, config=config.terminal)
      for i in range(total)
    ]

    async def collect():
      try:
        return await demonstrations.collect(
          specs,
          config.teacher,
          backend=config.episodes.backend,
          limits=config.episodes.limits,
          on_demo=lambda done: on_progress(done / total),
        )
      finally:
        await sandbox.shutdown()

    demonstrations.write(path, asyncio.run(collect()))
  return demonstrations.read(path)


def conversation(config: ForgeConfig, messages) -> list[dict]:
  """Demonstrated messages as the agent would send them, system prompt included."""
  system = config.episodes.agent.system
  head = [] if system is None else [{'role': 'system', 'content': system}]
  return [*head, *messages]


def make_tokenizer(config: ForgeConfig, demos, path: Path) -> tokenizer.Tokenizer:
  """A byte-level BPE trained on the run's own text, made once and kept at `path`."""
  if not path.exists():
    texts = [
      chat.render(conversation(config, demo.messages), [shell.TOOL])
      for _, demo in demos
    ]
    tokenizer.train(texts, config.model.vocab_size).save(path)
  return tokenizer.load(path)


def encode(config: ForgeConfig, tok: tokenizer.Tokenizer, demos) -> list[forest.Sample]:
  """Demonstrations as samples: what the teacher wrote is trained, the rest is read."""
  samples = []
  for spec, demo in demos:
    pieces = chat.segments(conversation(config, demo.messages), [shell.TOOL])
    ids, owned = tokenizer.encode_chat(tok, pieces)
    last = max(i for i, mine in enumerate(owned) if mine)
    if last >= config.engine.context_tokens:
      logging.warning('demonstration of %s exceeds the context: left out', spec)
      continue
    samples.append(demos_lib.sample(ids[: last + 1], owned[: last + 1]))
  return samples


def sft(
  config: ForgeConfig,
  samples: list[forest.Sample],
  manager: CheckpointManager,
  metrics: MetricsWriter,
  files: dict[str, bytes],
):
  """Trains on the demonstrations; returns the model's variables."""
  c = config.sft
  optimizer = optimizer_lib.make(c.optimizer)
  variables = train_step.init_variables(config.model, jax.random.key(config.seed))
  state = train_step.init_state(variables, optimizer)
  step = train_step.make_step(config.model, optimizer, train_step.nll, c.step)

  def make_batches(position):
    return packing.SampleBatches(
      samples, tokens_per_batch=c.tokens_per_step, seed=config.seed, state=position
    )

  def to_forest(batch):
    rows = forest.merge(batch, row_tokens=c.row_tokens, row_terms=c.row_tokens)
    return train_step.normalise(rows)

  state = loop.fit(
    state,
    step,
    make_batches,
    to_forest,
    c.loop,
    phase='sft',
    manager=manager,
    metrics=metrics,
    files=files,
  )
  return state.variables
