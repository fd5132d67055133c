"""Workloads of benchmarks/prefix_tree.py.

A workload is a list of trajectories, and a trajectory is the list of its completions in
order, each a `forest.Sample` whose prompt is its whole context. Token ids are a run's
(`recorded`), or random (`make`), where only lengths matter. Published set-ups:
facts/rl-systems.md §3.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable

import numpy as np

from m2jax import forest
from m2jax.records import Completion
from m2jax.viewer.run import Run

Trajectories = list[list[forest.Sample]]


class _Writer:
  """Draws tokens and makes completions."""

  def __init__(self, vocab: int, seed: int = 0):
    self._rng = np.random.default_rng(seed)
    self._vocab = vocab

  def tokens(self, n: int) -> np.ndarray:
    return self._rng.integers(1, self._vocab, n).astype(np.int32)

  def sample(self, prompt: np.ndarray, response: np.ndarray) -> forest.Sample:
    n = len(response)
    return forest.Sample(
      np.concatenate([prompt, response]),
      len(prompt),
      old_logprobs=self._rng.normal(-6, 0.3, n).astype(np.float32),
      advantages=np.full(n, self._rng.normal(), np.float32),
    )

  def turns(self, prompt, count: int, sampled: int, observed: int):
    """An append-only trajectory of `count` completions."""
    out = []
    for _ in range(count):
      response = self.tokens(sampled)
      out.append(self.sample(prompt, response))
      prompt = np.concatenate([prompt, response, self.tokens(observed)])
    return out


def star(write: _Writer, scale: float) -> Trajectories:
  """One prompt of 4,096 tokens, 64 answers of 128."""
  prompt = write.tokens(round(4096 * scale))
  answer = round(128 * scale)
  return [[write.sample(prompt, write.tokens(answer))] for _ in range(64)]


def verl_a(write: _Writer, scale: float) -> Trajectories:
  """Depth 2, branching 2, 12,800 tokens in four rows, half of them shared."""
  root, inner, leaf = (round(n * scale) for n in (1600, 800, 800))
  prompt, out = write.tokens(root), []
  for _ in range(2):
    stem = np.concatenate([prompt, write.tokens(inner)])
    out += [[write.sample(stem, write.tokens(leaf))] for _ in range(2)]
  return out


def verl_b(write: _Writer, scale: float) -> Trajectories:
  """Depth 16, 512 leaves, 69 % of the tokens shared.

  Its levels have 1, 1, 1, 1, 2, 4, …, 256, 512, 512, 512, 512 segments of 16 tokens.
  """
  segment = max(1, round(16 * scale))
  paths = [write.tokens(segment)]
  for level in range(1, 16):
    split = 2 if 4 <= level <= 12 else 1
    paths = [
      np.concatenate([path, write.tokens(segment)])
      for path in paths
      for _ in range(split)
    ]
  return [[write.sample(p[:-segment], p[-segment:])] for p in paths]


def tau2(write: _Writer, scale: float) -> Trajectories:
  """A system prompt of 4,800 tokens, four rollouts of four turns, each of 120 sampled
  and 200 observed tokens."""
  prompt = write.tokens(round(4800 * scale))
  sampled, observed = round(120 * scale), round(200 * scale)
  return [write.turns(prompt, 4, sampled, observed) for _ in range(4)]


def swe(write: _Writer, scale: float) -> Trajectories:
  """A caterpillar: a prompt of 2,000 tokens, six user turns of six completions, each 80
  tokens of thinking, 40 of action and 100 observed. Each user message of 60 tokens
  removes earlier thinking from the history."""
  think, act, observe, ask = (round(n * scale) for n in (80, 40, 100, 60))
  history, out = write.tokens(round(2000 * scale)), []
  for _ in range(6):
    history = np.concatenate([history, write.tokens(ask)])
    prompt = history
    for _ in range(6):
      thought, action, seen = (write.tokens(n) for n in (think, act, observe))
      out.append(write.sample(prompt, np.concatenate([thought, action])))
      prompt = np.concatenate([prompt, thought, action, seen])
      history = np.concatenate([history, action, seen])
  return [out]


def terminal(write: _Writer, scale: float) -> Trajectories:
  """A terminal trace: a prompt of 5,000 tokens, then 91 turns of 40 sampled and 40
  observed tokens, append-only."""
  sampled = max(1, round(40 * scale))
  return [write.turns(write.tokens(round(5000 * scale)), 91, sampled, sampled)]


WORKLOADS: dict[str, Callable[[_Writer, float], Trajectories]] = {
  'star': star,
  'verl A': verl_a,
  'verl B': verl_b,
  'tau2': tau2,
  'swe': swe,
  'terminal': terminal,
}


def make(name: str, vocab: int, scale: float = 1.0) -> Trajectories:
  """The workload's trajectories; `scale` multiplies every length."""
  return WORKLOADS[name](_Writer(vocab), scale)


def _ids(completion: Completion) -> tuple[np.ndarray, np.ndarray]:
  ids = completion.prompt_ids, completion.response_ids
  return tuple(np.asarray(x, np.int32) for x in ids)


def recorded(workdir: pathlib.Path, groups: int) -> Trajectories:
  """What the first groups of a run that still have their token ids trained on.

  Raises:
    ValueError: the run has no pool, or too few of these groups.
  """
  write, found, left = _Writer(2), [], groups
  with contextlib.closing(Run(workdir)) as run:
    for item in run.reader.items('taken'):
      members = [turns for _, turns in run.reader.group(item.index) if turns]
      if members and left:
        found += [[write.sample(*_ids(c)) for c in turns] for turns in members]
        left -= 1
  if left:
    raise ValueError(
      f'{workdir}: {groups - left} groups that were trained on have token ids, fewer '
      f'than --groups={groups}; run RL with --config.rl.keep_items=1000'
    )
  return found
