"""Settings of one run of the main job, and of its roles as processes of their own."""

from __future__ import annotations

import dataclasses
import functools
import urllib.parse
from collections.abc import Mapping
from typing import Any

from m2jax.agents.episodes import EpisodeConfig
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.forge.curriculum import CurriculumConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.optim import gnmr
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.pool import windows
from m2jax.rl.learner import LearnerConfig
from m2jax.rollout.disaggregation.connection import Address
from m2jax.rollout.disaggregation.handover import HandoverConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.routing.config import RouterConfig
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.sharding import MeshConfig
from m2jax.tasks import TasksConfig, TeacherConfig
from m2jax.train import sft
from m2jax.train.loop import LoopConfig


@dataclasses.dataclass(frozen=True)
class SftConfig(sft.SftConfig):
  """Supervised fine-tuning on the teacher's verified successes, or on recorded chats.

  Attributes:
    demonstrations: number of tasks the teacher attempts; failures are left out. Of
      `recorded`, the maximum number of chats.
    families: families to demonstrate -> relative frequency. Empty: those of `tasks`.
    recorded: JSON lines of chats that take the teacher's place, as they are: those of
      experiments.sample, or any with `messages` and `tools`. '': the teacher's.
  """

  demonstrations: int
  families: Mapping[str, float] = dataclasses.field(default_factory=dict)
  recorded: str = ''


@dataclasses.dataclass(frozen=True)
class MoreSftConfig:
  """The control that continues SFT from its weights instead of starting RL.

  Attributes:
    loop: the budget.
    optimizer: optimizer of this phase; its state is initialised anew, as in RL.
  """

  loop: LoopConfig
  optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RlConfig:
  """Reinforcement learning in the real environment.

  Attributes:
    steps: total number of updates.
    seconds: also stop after this much RL time, restarts included; 0 is no limit.
    groups_per_step: work items per update.
    group_size: G, trajectories per item; 1 needs a critic (`rl.critic`), or another
      learner that does not compare them.
    capacity: N, the groups that are submitted and neither taken nor failed.
    window: which of them may be taken: W of windowed FIFO in items ('default' is
      ⌊0.3 N⌋), None for all, or another rule (`pool.windows`).
    checkpoint_every: updates between checkpoints.
    keep_every_steps, max_skipped: see `train.loop.LoopConfig`.
    learner: how groups become an update.
    optimizer: optimizer of this phase.
    max_items: total number of work items: RL also stops once all are trained or failed;
      0 is no limit.
    curriculum: how task families are sampled.
    dev_every: updates between evaluations on the development split; 0 is never.
    dev_tasks: tasks per such evaluation.
    patience: stop after this many consecutive evaluations without a new best; 0 is
      never.
    refill_factor: DAPO's dynamic sampling: an update takes items until
      `groups_per_step` of them have a non-zero advantage, but at most this many times
      `groups_per_step`. 1 trains on the first `groups_per_step`.
    updates_per_batch: optimizer steps on the groups of one update, each over all of
      them, against the same recorded log-probabilities; they are one policy version,
      one ledger entry and one metrics record.
    partial_credit: maximum verdict on a partly correct end state
      (`TasksConfig.partial_credit`); evaluations give none.
    keep_items: finished work items that the data pool keeps from before the oldest
      checkpoint, with their trajectories, for reports; None: all. Their token ids are
      deleted in either case.
    item_deadline_s: seconds from an item's submission, or reissue, to the end of its
      last episode, including the wait for a free agent; after that the item fails.
    max_failed_groups: consecutive failed items that stop the run with the last reason;
      None is the capacity, which an outage fails at once, plus 32. After a failure
      items are submitted one at a time, at intervals that grow from 0.1 s to 5 s, until
      one completes.
    fail_on_mismatch: learner and engine that disagree about the same weights, in
      float32 or with invariant numerics (`rl.agreement`), end the run; else that is an
      error in its log.
  """

  steps: int
  seconds: float
  groups_per_step: int
  group_size: int
  capacity: int
  window: int | str | Mapping[str, Any] | None
  checkpoint_every: int
  learner: LearnerConfig
  optimizer: OptimizerConfig
  max_items: int = 0
  curriculum: CurriculumConfig = CurriculumConfig()
  dev_every: int = 0
  dev_tasks: int = 96
  patience: int = 0
  refill_factor: float = 3.0
  updates_per_batch: int = 1
  partial_credit: float = 0.0
  keep_items: int | None = None
  item_deadline_s: float = 600.0
  max_failed_groups: int | None = None
  keep_every_steps: int = 0
  max_skipped: int = 10
  fail_on_mismatch: bool = False

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.refill_factor >= 1, 'refill_factor', 'at least 1')
    check(self.group_size >= 1, 'group_size', 'at least 1')
    alone = self.group_size == 1
    fits = not alone or self.learner.learns_from_one
    check(fits, 'group_size', 'at least 2 without learner.critic: a baseline compares')
    reward = self.learner.reward
    timed = not (alone and reward.beta) or reward.speed_baseline is not None
    check(timed, 'group_size', 'at least 2 with reward.beta and no speed_baseline')
    check(self.updates_per_batch >= 1, 'updates_per_batch', 'at least 1')
    check(self.item_deadline_s > 0, 'item_deadline_s', 'positive')
    limit = self.max_failed_groups
    check(limit is None or limit >= 1, 'max_failed_groups', 'at least 1, or None')
    keep = self.keep_items
    check(keep is None or keep >= 0, 'keep_items', 'at least 0, or None')
    windows.make(self.window)  # raises ValueError
    fits = 1 <= self.groups_per_step <= self.capacity
    check(fits, 'groups_per_step', f'between 1 and capacity={self.capacity}')


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How a policy acts on tasks and is evaluated.

  Attributes:
    model: the policy; `vocab_size` is the tokenizer's.
    tasks: distribution of the tasks.
    engine, scheduler: the rollout engine.
    gateway: the HTTP server between agents and engine.
    episodes: agents and sandboxes.
    eval_tasks: held-out tasks per evaluation, one episode each; 0 does not touch the
      held-out split, for model selection.
  """

  model: ModelConfig
  tasks: TasksConfig
  engine: EngineConfig
  scheduler: SchedulerConfig
  gateway: GatewayConfig
  episodes: EpisodeConfig
  eval_tasks: int

  def __post_init__(self):
    if self.tasks.partial_credit:
      raise ValueError(
        f'tasks.partial_credit={self.tasks.partial_credit}: must be 0, since '
        'evaluations give no partial credit; set rl.partial_credit for RL'
      )


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
  """How an engine in another process is used.

  Attributes:
    connect_timeout_s: time to establish a connection.
    silence_timeout_s: time without a byte from the engine after which a request fails;
      the engine gives a sign of life every `EngineServerConfig.alive_s`.
    poll_s: time between requests for its statistics, and for changes of its cached
      pages.
  """

  connect_timeout_s: float = 5.0
  silence_timeout_s: float = 30.0
  poll_s: float = 1.0

  def __post_init__(self):
    check = functools.partial(require, self)
    for field in dataclasses.fields(self):
      check(getattr(self, field.name) > 0, field.name, 'positive')


@dataclasses.dataclass(frozen=True)
class EngineServerConfig:
  """Settings of the engine's HTTP server.

  Attributes:
    host, port: where to listen; beyond loopback only with a key. Port 0 chooses one.
    max_requests: requests in progress; more get a 503.
    max_unfinished_bytes: total of the bodies that are arriving; 429.
    alive_s: seconds between signs of life in a response without new tokens.
    max_connections, max_header_bytes, header_timeout_s, body_timeout_s,
      write_timeout_s, keep_alive_s, stop_timeout_s: see `GatewayConfig`.
  """

  host: str = '127.0.0.1'
  port: int = 0
  max_requests: int = 4096
  max_unfinished_bytes: int = 64 << 20
  alive_s: float = 5.0
  max_connections: int = 4224
  max_header_bytes: int = 16 << 10
  header_timeout_s: float = 10.0
  body_timeout_s: float = 60.0
  write_timeout_s: float = 60.0
  keep_alive_s: int = 600
  stop_timeout_s: int = 2

  def __post_init__(self):
    check = functools.partial(require, self)
    for field in dataclasses.fields(self):
      if field.name not in ('host', 'port'):
        check(getattr(self, field.name) > 0, field.name, 'positive')
    check(0 <= self.port < 65_536, 'port', 'between 0 and 65535')


@dataclasses.dataclass(frozen=True)
class RecordedConfig:
  """Bounds of what a gateway without a learner records.

  Attributes:
    max_open: episodes at once; more get a 503.
    idle_s: time without a request after which an episode ends as an infrastructure
      failure, and the session of a client's own key is forgotten: its next request
      begins one.
    keep_s, keep_sessions, keep_bytes: what is older, or above this number of sessions
      or of bytes of token ids, is deleted from the database, the oldest sessions first.
    every_s: time between two such deletions.
  """

  max_open: int = 1024
  idle_s: float = 6 * 3600.0
  keep_s: float = 30 * 86_400.0
  keep_sessions: int = 100_000
  keep_bytes: int = 4 << 30
  every_s: float = 60.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      require(self, getattr(self, field.name) > 0, field.name, 'positive')


@dataclasses.dataclass(frozen=True)
class RolesConfig:
  """How the roles find each other; without effect on a run in one process.

  Attributes:
    engine_urls, gateway_url: URLs at which the other roles reach them. A port of 0 in
      `engine_server` or the gateway's config is the port of the URL.
    engine: index in `engine_urls` of the engine of this process.
    pool_url: SQLAlchemy URL of the pool's database; '' is WORKDIR/pool.db. SQLite is
      for processes of one machine. A password may be in libpq's password file instead.
    pool_outage_s: how long a role waits for a PostgreSQL server that is away.
    keys_dir: directory of the files `view`, `session`, `reward` and `engine`, the keys
      by which roles and people ask the servers (docs/roles.md); '' is WORKDIR/keys,
      which the learner makes.
    engine_server: the engine's HTTP server.
    engine_client: how the gateway uses an engine.
    router: how the gateway uses several (`rollout.routing`).
    prefill_address: address of a prefill engine that the engines use, `tcp:HOST:PORT`
      or `unix:PATH`; '': they compute their prompts themselves.
    handover: how they use it.
    engine_mesh, prefill_mesh: devices of an engine's process, and of the prefill
      engine's.
    lease_s: a group whose agents' process gives no sign of life for this long goes to
      another one.
    poll_s: time between two looks into the database, of agents and learner.
    full_every: every n-th published version is also written as a whole.
  """

  engine_urls: tuple[str, ...] = ('http://127.0.0.1:8101',)
  engine: int = 0
  gateway_url: str = 'http://127.0.0.1:8102'
  pool_url: str = ''
  pool_outage_s: float = 60.0
  keys_dir: str = ''
  engine_server: EngineServerConfig = EngineServerConfig()
  engine_client: RemoteConfig = RemoteConfig()
  router: RouterConfig = RouterConfig()
  prefill_address: str = ''
  handover: HandoverConfig = HandoverConfig()
  engine_mesh: MeshConfig = MeshConfig()
  prefill_mesh: MeshConfig = MeshConfig()
  lease_s: float = 60.0
  poll_s: float = 0.2
  full_every: int = 16

  def __post_init__(self):
    check = functools.partial(require, self)
    url = 'a URL such as http://HOST:PORT'
    check(_has_port(self.gateway_url), 'gateway_url', url)
    urls = self.engine_urls
    different = 0 < len(urls) == len(set(urls))
    check(different and all(map(_has_port, urls)), 'engine_urls', f'each {url}')
    check(0 <= self.engine < len(urls), 'engine', 'the number of one of engine_urls')
    if self.prefill_address:
      try:
        Address.parse(self.prefill_address)
      except ValueError as error:
        raise ValueError(f'RolesConfig.prefill_{error}') from error
    check(self.poll_s > 0, 'poll_s', 'positive')
    check(self.pool_outage_s >= 0, 'pool_outage_s', 'at least 0')
    least = 4 * self.poll_s  # a holder gives four signs of life in a lease
    check(self.lease_s >= least, 'lease_s', f'at least 4 × poll_s = {least:g}')
    check(self.full_every >= 1, 'full_every', 'at least 1')


def port(url: str) -> int:
  """The port of a URL of `RolesConfig`."""
  return urllib.parse.urlsplit(url).port


def _has_port(url: str) -> bool:
  try:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ('http', 'https') and bool(parts.hostname and parts.port)
  except ValueError:
    return False


@dataclasses.dataclass(frozen=True)
class ForgeConfig(RolloutConfig):
  """One run of the main job.

  Attributes:
    seed: seed of weights, tasks, teacher and sampling.
    teacher: who demonstrates; None with `sft.recorded` or `start`.
    sft: the first phase.
    rl: the second phase; None stops after SFT.
    more_sft: replaces `rl`, as a control.
    dev_tasks: tasks of the development split evaluated after each phase.
    mesh: devices that SFT and RL train on; a run may resume on another mesh. The engine
      uses one device.
    start: workdir of a run whose demonstrations, tokenizer and SFT weights are reused,
      so that a control starts from the weights where that run's RL did; '' makes new
      ones.
    init_from: weights that SFT starts from, with their tokenizer: a run's workdir or a
      directory in the released format, of the config's model; '' is random weights.
    roles: how the roles find each other, if they are processes of their own.
  """

  seed: int
  teacher: TeacherConfig | None
  sft: SftConfig
  rl: RlConfig | None
  more_sft: MoreSftConfig | None = None
  dev_tasks: int = 0
  mesh: MeshConfig = MeshConfig()
  start: str = ''
  init_from: str = ''
  roles: RolesConfig = RolesConfig()

  def __post_init__(self):
    super().__post_init__()
    if self.start and self.init_from:
      raise ValueError('ForgeConfig: start and init_from are both set; set one')
    if self.rl is not None and self.more_sft is not None:
      raise ValueError('ForgeConfig: rl and more_sft are both set; set one to None')
    if not (self.teacher or self.sft.recorded or self.start):
      raise ValueError(
        f'no teacher for tasks of the kind {self.tasks.kind!r}: set teacher, or '
        'sft.recorded to a file of chats (docs/pipelines_reasoning.md)'
      )
    for phase in (self.sft, self.rl, self.more_sft):
      if phase is not None:
        gnmr.check(phase.optimizer.gnmr, self.model)

  def anywhere(self) -> ForgeConfig:
    """The settings that belong to the run: not its devices and processes."""
    return dataclasses.replace(self, mesh=MeshConfig(), roles=RolesConfig())
