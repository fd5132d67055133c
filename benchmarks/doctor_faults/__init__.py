"""Faults for `benchmarks.doctor`: what is injected into small real runs, and its name.

A list of faults is a module of this package with a tuple `FAULTS` of `Fault`s, such as
`first`. To write another one, nothing is needed but this page: not the detectors
(m2jax/evolve), which should not be read for it. A fault is what goes wrong in practice,
as a user would describe it, not what would be easy or hard to detect.

  from benchmarks.doctor_faults import Fault, Moment

  def drop_updates(moment: Moment) -> None:
    from m2jax.rollout.serving.scheduler import Scheduler
    publish = Scheduler.update_weights
    def update_weights(self, variables, version):
      if not moment.began():
        publish(self, variables, version)
    Scheduler.update_weights = update_weights

  FAULTS = (
    Fault('rate_x30', 'optimizer', 'the learning rate is 30 times too high',
          config={'rl.optimizer.muon.learning_rate': lambda old: 30 * old}),
    Fault('not_published', 'weights', 'the engine does not get new weights',
          patch=drop_updates, begins=(0.3, 0.6)),
  )

Each fault runs once for each seed in a process of its own: one of the jobs of `jobs`
(its file is short and shows all settings), with the fault's settings, after the fault's
patch. It may do one or both of:

  config  changes settings of the job, from its first update: dotted name → the value,
          or a function of the usual value. Names are those of `--config.NAME` of
          experiments.forge (jobs 'rl' and 'sft') or experiments.pretrain.
  patch   is called in the job's process before the job starts, to replace functions or
          methods of m2jax by faulty ones (imports inside it, as above, so that
          importing the list is cheap). What it replaces should be as small as the error
          of a programmer or a machine would be: a wrong sign, a lost call, a sleep. It
          has to behave as usual until `moment.began()`, unless the fault is there from
          the first update.

`begins` is the range in which the first faulty update is, as shares of the job's
updates; each seed draws one. Faults of `config`, and patches of what is compiled (the
model, the loss, the optimizer), are there from the start: leave it (0, 0). (Settings
beside a patch that begins later are no fault themselves, such as a shorter deadline.)
Jobs have 80 updates (rl, each of 2 groups of 4 trajectories), 160 steps (sft) and 240
steps (pretrain); a fault that begins after 60 % leaves little to see. On a free machine
RL takes less than a minute; it ends after four, so that a fault may be slow but not
endless.

`category` is what a right diagnosis names, one of `CATEGORIES`. A fault must not write
into the records that a run leaves (metrics.jsonl, pool.db, logs) to give itself away or
to hide; that a record is damaged may be the fault.

Try one with `python -m benchmarks.doctor --workdir=DIR --list=LIST --seeds 100 --only
NAME`, seeds from 100 on; 0, 1 and 2 are for the measurement.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

CATEGORIES: Mapping[str, str] = {
  'optimizer': 'learning rate, schedule, clipping and precision of updates',
  'loss mask': 'tokens are trained that must not be, or the reverse',
  'weights': 'the engine samples with other weights than the learner has published',
  'router': "the experts' load or the router's bias",
  'worker': 'processes, sandboxes or episodes that die, hang or fail',
  'clipping': 'bounds of the importance ratio',
  'tokenizer': 'a tokenizer that is not that of the weights',
  'reward': 'rewards, advantages, verifiers',
  'data split': 'evaluation tasks in training',
  'storage': 'slow, full or failing disks; frequent checkpoints',
  'retokenisation': 'histories that do not come back as they were sampled',
  'queue': 'window, capacity, deadlines and age of work items',
  'engine': 'the engine computes other probabilities than the learner',
  'rollout': 'sampling, lengths and limits of responses',
  'data': 'tasks or texts: too easy, too hard, repeated, damaged, of another kind',
  'machine': 'slow, stopped or overloaded machines',
  'records': 'the files that a run writes are damaged, or two runs write them',
}


@dataclasses.dataclass
class Moment:
  """What a patch may know about the run.

  Attributes:
    first: the last healthy update; 0: the fault is there from the start.
    workdir: the run's directory.
    seed: its seed.
    update: the newest update whose record is written.
  """

  first: int
  workdir: pathlib.Path
  seed: int
  update: int = 0

  def began(self) -> bool:
    """Whether the present update has the fault."""
    return self.update >= self.first


@dataclasses.dataclass(frozen=True)
class Fault:
  """One fault; see the package.

  Attributes:
    name: short and unique in its list: letters, digits and underscores.
    category: what a right diagnosis names, a key of `CATEGORIES`.
    what: a sentence for the table, as a user would say it.
    job: 'rl', 'sft' or 'pretrain'.
    config: dotted names of settings → value, or function of the usual value.
    patch: called in the job's process before it starts.
    begins: range of the first faulty update, as shares of the job's updates.
  """

  name: str
  category: str
  what: str
  job: str = 'rl'
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  patch: Callable[[Moment], None] | None = None
  begins: tuple[float, float] = (0.0, 0.0)

  def __post_init__(self):
    if self.category not in CATEGORIES:
      raise ValueError(f'{self.name}: no category {self.category!r}')
    low, high = self.begins
    if not 0 <= low <= high < 1:
      raise ValueError(f'{self.name}: begins={self.begins}: a range within 0 to 1')
    if not self.name.isidentifier():
      raise ValueError(f'{self.name!r}: letters, digits and underscores only')

  def first(self, seed: int, updates: int) -> int:
    """The last healthy update of the run of a seed that has `updates` of them."""
    low, high = self.begins
    return round(random.Random(f'{self.name}/{seed}').uniform(low, high) * updates)


@dataclasses.dataclass(frozen=True)
class Healthy:
  """A run without a fault, to count false alarms.

  Attributes:
    name, job, config: as of a `Fault`; the job may also be 'whole', which is `base`
      and `rl` in one run, so that model and tasks may differ.
    resumed: it is stopped half way and started again.
    loaded: another process uses a core while it runs.
  """

  name: str
  job: str = 'rl'
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  resumed: bool = False
  loaded: bool = False
