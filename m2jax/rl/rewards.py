"""Composite reward, reward-to-go and advantages of a rollout group.

Forge's reward (facts/m2-and-forge.md §4.8, §4.10; DESIGN §6); a step t is a completion:

  r_t = α · process_t + β · speed_t + perf_t        speed = h(T / T_baseline)
  G_t = Σ_{τ ≥ t} γ^{τ−t} r_τ                       Â_t = G_t − B

with h decreasing; perf_t is the turn reward of environment or agent
(`Trajectory.rewards`), at the last step plus the success. The report discloses the form
only. Undisclosed, and therefore our choice: α, β, γ, h, T_baseline and the size of the
process terms; that speed and success are paid at the last step; that speed is paid only
on success; that B is the mean return of the group. The report's process term also
mentions a penalty for mixing languages, which is not implemented here.

A trajectory that ended with an infrastructure failure is masked: it has no term in the
loss and no part in B, and is counted. It is never a reward of 0 (law 5).

Axes: T turns (completions) of one trajectory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from m2jax import records
from m2jax.checks import require
from m2jax.records import TrajectoryReward

# h: decreasing, h(0) = 1, h(1) = 1/2.
SPEEDS: dict[str, Callable[[float], float]] = {
  'linear': lambda x: max(0.0, 1.0 - x / 2),  # 0 from twice the baseline on
  'inverse': lambda x: 1.0 / (1.0 + x),
  'exponential': lambda x: 2.0**-x,
}
BASELINES = ('mean', 'leave_one_out', 'none')
BASELINE_OVERS = ('trajectory', 'turn')
NORMALISE = ('none', 'group', 'batch')
SPEED_UNITS = ('wall', 'work', 'turns', 'tool_calls')
UNTRAINED = ('auxiliary', 'compaction')  # fork reasons of requests outside the task

# Trajectories, each with its completions, as the data pool returns a rollout group.
Group = Sequence[tuple[records.Trajectory, Sequence[records.Completion]]]


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """The undisclosed parts of the reward. All defaults are our choice.

  Attributes:
    alpha: weight of the process reward.
    beta: weight of the speed reward.
    gamma: discount per turn, in [0, 1].
    format_penalty: process reward of a turn whose status is not in `well_formed`; ≤ 0.
    well_formed: parser statuses that are not format errors.
    thinking_bonus: process reward of a well-formed turn with thinking (its message has
      `reasoning_content`); ≥ 0. Given only if the chat has one assistant message per
      completion, as with an append-only agent.
    speed: h, a key of `SPEEDS`.
    speed_unit: unit of T: 'wall' seconds including tools, as in the report; 'work',
      those in which the model or a tool worked, for agents that report the durations of
      their tools (`work_s`); 'turns', or 'tool_calls'.
    speed_baseline: T_baseline in that unit; None is the mean over the group's judged
      trajectories.
    speed_on_success_only: pay speed only if success ≥ `success_threshold`.
    success_threshold: in (0, 1].
    baseline: B, 'mean' over the group, 'leave_one_out' (mean over the others), 'none'.
      A trajectory alone in its group has advantage 0, unless B is 'none'.
    baseline_over: returns that B averages. 'trajectory': G_0, for all turns, so that a
      turn is also credited for earlier ones: after a malformed turn, the turns that
      follow have a positive advantage. 'turn': the G_t of the trajectories that have a
      turn t, so that only the malformed turn is penalised, also between two successes;
      turns that only one trajectory has get advantage 0. None: 'turn' in a group in
      which turns are paid (`Trajectory.rewards`), else 'trajectory'.
    normalise: what advantages are divided by: 'none', M2's; 'group', the standard
      deviation of the group's returns (GRPO's, M1's); or 'batch', that of the batch's
      advantages, one per trained completion (`scaled`). The group's makes α and β
      meaningless where successes are equal, and may flip the sign of a mixed reward;
      the batch's is one factor for all. None: the estimator's, 'group' of GRPO,
      DAPO and GSPO, else 'none' (`EstimatorConfig.normalise`).
  """

  alpha: float = 0.1
  beta: float = 0.0
  gamma: float = 1.0
  format_penalty: float = -1.0
  well_formed: tuple[str, ...] = ('ok',)
  thinking_bonus: float = 0.0
  speed: str = 'linear'
  speed_unit: str = 'wall'
  speed_baseline: float | None = None
  speed_on_success_only: bool = True
  success_threshold: float = 1.0
  baseline: str = 'mean'
  baseline_over: str | None = None
  normalise: str | None = None

  def __post_init__(self):
    check = functools.partial(require, self)
    check(0 <= self.gamma <= 1, 'gamma', 'in [0, 1]')
    check(self.format_penalty <= 0, 'format_penalty', 'at most 0')
    check(self.thinking_bonus >= 0, 'thinking_bonus', 'at least 0')
    check(self.speed in SPEEDS, 'speed', f'one of {tuple(SPEEDS)}')
    check(self.speed_unit in SPEED_UNITS, 'speed_unit', f'one of {SPEED_UNITS}')
    positive = self.speed_baseline is None or self.speed_baseline > 0
    check(positive, 'speed_baseline', 'positive, or None')
    check(0 < self.success_threshold <= 1, 'success_threshold', 'in (0, 1]')
    check(self.baseline in BASELINES, 'baseline', f'one of {BASELINES}')
    over = self.baseline_over in (None, *BASELINE_OVERS)
    check(over, 'baseline_over', f'one of {BASELINE_OVERS}, or None')
    known = self.normalise in (None, *NORMALISE)
    check(known, 'normalise', f'one of {NORMALISE}, or None')


@dataclasses.dataclass(frozen=True)
class Credit:
  """The contribution of one trajectory of a group to the loss.

  Attributes:
    trajectory: the trajectory as recorded.
    completions: completions to train on, in order of turn; empty if masked.
    advantages: [len(completions)] float64, Â of every token of each completion.
    reward: the reward for reports; None if masked.
    unused: number of completions not trained because the agent did not act on them.
    returns: `advantages` are returns, from which a critic's values are subtracted.
  """

  trajectory: records.Trajectory
  completions: tuple[records.Completion, ...]
  advantages: np.ndarray
  reward: TrajectoryReward | None
  unused: int = 0
  returns: bool = False

  @property
  def masked(self) -> bool:
    """Infrastructure failure: not in the loss, the normaliser or the baseline."""
    return self.reward is None

  @property
  def trained(self) -> bool:
    """Whether a term has an advantage, if the group is trained."""
    return bool(np.any(self.advantages)) or (self.returns and bool(self.completions))


@dataclasses.dataclass(frozen=True)
class GroupCredit:
  """The credits of one rollout group.

  Attributes:
    credits: one per trajectory, including masked ones.
    dropped: why the group is not trained: 'masked' (all trajectories are masked) or
      'zero_advantage'; '' if it is trained.
  """

  credits: tuple[Credit, ...]
  dropped: str


def process_rewards(
  trajectory: records.Trajectory,
  completions: Sequence[records.Completion],
  config: RewardConfig,
) -> np.ndarray:
  """Process reward of each turn, before α: [T] float64, in order of `completions`."""
  well_formed = np.array([c.status in config.well_formed for c in completions], bool)
  out = np.where(well_formed, 0.0, config.format_penalty)
  if config.thinking_bonus:
    replies = [m for m in trajectory.messages if m.get('role') == 'assistant']
    if len(replies) == len(completions):
      thought = [bool((m.get('reasoning_content') or '').strip()) for m in replies]
      out += config.thinking_bonus * (well_formed & np.array(thought, bool))
  return out


def speed(time: float, baseline: float, kind: str = 'linear') -> float:
  """h(time / baseline): decreasing from 1 at time 0, 1/2 at the baseline; in [0, 1].

  With a baseline of 0, when all times are 0, the ratio is 1.
  """
  return SPEEDS[kind](time / baseline if baseline > 0 else 1.0)


def returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
  """Reward-to-go G_t = Σ_{τ ≥ t} γ^{τ−t} r_τ of [T] rewards."""
  out = np.array(rewards, np.float64)
  for t in range(len(out) - 2, -1, -1):
    out[t] += gamma * out[t + 1]
  return out


def advantages(group: Group, config: RewardConfig) -> GroupCredit:
  """Rewards and advantages of a group, as `DataPool.group` returns it.

  Completions that the agent did not act on (`acted`) get no credit and are not trained.
  A judged trajectory without completions has no term, but its return is part of the
  baseline.

  Args:
    group: trajectories, each with its completions.
    config: the reward.

  Raises:
    ValueError: a reward is for a completion that its trajectory does not have.
  """
  real = [i for i, (t, _) in enumerate(group) if t.end_reason != 'infrastructure']
  used = [acted(completions, trajectory.rewards) for trajectory, completions in group]
  times = [_time(group[i][0], used[i], config.speed_unit) for i in real]
  speed_baseline = config.speed_baseline or (float(np.mean(times)) if times else 0.0)

  parts, to_go = {}, []
  for i, time in zip(real, times, strict=True):
    trajectory, process = group[i][0], process_rewards(group[i][0], used[i], config)
    fast = 0.0
    if (
      trajectory.success >= config.success_threshold or not config.speed_on_success_only
    ):
      fast = speed(time, speed_baseline, config.speed)
    last = config.beta * fast + trajectory.success
    paid = _paid(*group[i], used[i])
    # A trajectory without turns still has a return.
    rewards = config.alpha * process + paid if len(process) else np.zeros(1)
    rewards[-1] += last
    to_go.append(returns(rewards, config.gamma))
    perf = trajectory.success + float(paid.sum())
    parts[i] = (float(process.sum()), fast, perf)

  totals = np.array([g[0] for g in to_go])
  over = config.baseline_over
  if over is None:
    over = 'turn' if any(group[i][0].rewards for i in real) else 'trajectory'
  differences = _subtract_baseline(to_go, config, over)
  credits_, largest = [], 0.0
  for i, (trajectory, _) in enumerate(group):
    if i not in parts:
      credits_.append(Credit(trajectory, (), np.zeros(0), None))
      continue
    k = real.index(i)
    a = differences[k][: len(used[i])]
    largest = max(largest, float(np.abs(a).max(initial=0.0)))
    reward = TrajectoryReward(*parts[i], total=float(totals[k]))
    unused = len(group[i][1]) - len(used[i])
    credits_.append(Credit(trajectory, used[i], a, reward, unused))
  dropped = ''
  if not real:
    dropped = 'masked'
  elif largest <= 1e-9 * max(1.0, float(np.abs(totals).max())):
    dropped = 'zero_advantage'
  return GroupCredit(tuple(credits_), dropped)


def _paid(
  trajectory: records.Trajectory,
  completions: Sequence[records.Completion],
  used: Sequence[records.Completion],
) -> np.ndarray:
  """Turn reward of each turn: [T] float64, in order of `used`."""
  if unknown := trajectory.rewards.keys() - {c.id for c in completions}:
    raise ValueError(
      f'task {trajectory.task}, session {trajectory.session}: rewards for '
      f'{sorted(unknown)}, which are not its completions: key by `Completion.id`'
    )
  return np.array([trajectory.rewards.get(c.id, 0.0) for c in used])


def scaled(groups: Sequence[GroupCredit], config: RewardConfig) -> list[GroupCredit]:
  """The credits of a batch, with its scale if `normalise` is 'batch'.

  Divides by the standard deviation of the advantages of all completions that are
  trained: ScaleRL's choice (arXiv:2510.13786). Signs and ratios are unchanged.
  """
  trained = [c.advantages for g in groups if not g.dropped for c in g.credits]
  scale = float(np.std(np.concatenate(trained))) if trained else 0.0
  if config.normalise != 'batch' or scale <= 1e-9:
    return list(groups)

  def divided(credit):
    return dataclasses.replace(credit, advantages=credit.advantages / scale)

  return [
    dataclasses.replace(g, credits=tuple(map(divided, g.credits))) for g in groups
  ]


def acted(
  completions: Sequence[records.Completion], paid: Collection[str] = ()
) -> tuple[records.Completion, ...]:
  """The completions of a session that its agent acted on, in order of turn.

  Excludes completions that were cancelled or are empty, those of requests that the
  agent declared auxiliary (a title) or a compaction, and those that it sampled again
  and did not use. Completions with a turn reward were used. Agents do not report the
  others; this rule infers them:

    Completions with the same prompt ids are samples of one request: the same tools and
    messages. Used are those whose answer another request continues
    (`Completion.parent`, `follows`) or, if there is none, the one requested last; and
    the completion requested last in the whole session, with which the agent ended.

  So after a lost connection the repeated request is trained and the undelivered answer
  is not; of n samples the one that the agent continued. Everything else is trained,
  whether or not a request continues it: completions before the context was reset or
  rewritten, and those of sub-agents under the same key, whose prompts differ. An agent
  that declares its edits may come back to a prompt: then only completions in direct
  succession are repetitions. Two cases
  look like a repetition, and only the last completion is trained: sub-agents with equal
  prompts that end after one completion; and several samples of which the agent sends
  one back modified, for example without its reasoning.

  Args:
    completions: a session's completions.
    paid: ids of those with a turn reward.
  """
  completions = [c for c in completions if c.fork_reason not in UNTRAINED]
  whole = (c for c in completions if c.finish_reason != 'cancelled')
  sampled = sorted((c for c in whole if len(c.response_ids)), key=lambda c: c.turn)
  extended = {id_ for c in completions for id_ in (c.parent, c.follows)}
  requests: dict[bytes, list[list[records.Completion]]]
  requests = collections.defaultdict(lambda: [[]])
  for c in sampled:
    found = requests[c.prompt_ids.tobytes()]
    before = found[-1][-1].turn if found[-1] else c.turn
    if c.fork_reason == 'context_edited' and before < c.turn - 1:
      found.append([])  # not a retry: an edit that gives the same prompt again
    found[-1].append(c)

  def last(of):
    return {max(of, key=lambda c: (c.request, c.turn)).id}

  used = last(completions) if completions else set()
  for same in itertools.chain.from_iterable(requests.values()):
    used |= {c.id for c in same if c.id in extended or c.id in paid} or last(same)
  return tuple(c for c in sampled if c.id in used)


def by_session(groups: Sequence[GroupCredit]) -> dict[str, TrajectoryReward]:
  """Rewards of the judged trajectories, for `DataPool.set_rewards`."""
  return {c.trajectory.session: c.reward for g in groups for c in g.credits if c.reward}


def by_completion(groups: Sequence[GroupCredit]) -> dict[str, float]:
  """Advantages of the judged completions, by id, for reports."""
  return {
    completion.id: float(advantage)
    for group in groups
    for credit in group.credits
    for completion, advantage in zip(credit.completions, credit.advantages, strict=True)
  }


def summary(groups: Sequence[GroupCredit]) -> dict[str, float]:
  """Metrics of a batch: means over judged trajectories, counts of the excluded ones.

  Means are NaN, not 0, if no trajectory was judged. `success` is the fraction with
  verdict 1, so it excludes partial credit; each family with a judged trajectory has a
  `success/FAMILY`, and each domain a `success/DOMAIN`. `dropped_fraction` is the
  fraction of trajectories that are not trained: masked, in a dropped group, or without
  a non-zero advantage.
  """
  judged = [c for g in groups for c in g.credits if not c.masked]
  paid = [c.reward for c in judged if c.reward]
  untrained = sum(bool(g.dropped) or not c.trained for g in groups for c in g.credits)
  families: dict[str, list[float]] = {}
  for c in judged:
    for name in {c.trajectory.family, c.trajectory.domain} - {''}:
      families.setdefault(name, []).append(c.trajectory.success >= 1)

  def mean(values):
    return float(np.mean(values)) if len(values) else float('nan')

  parallel = parallel_share([c.trajectory for c in judged])

  return {
    'success': mean([c.trajectory.success >= 1 for c in judged]),
    **{f'success/{family}': mean(values) for family, values in families.items()},
    **({} if parallel is None else {'parallel_calls': parallel}),
    'reward': mean([reward.total for reward in paid]),
    'reward_process': mean([reward.process for reward in paid]),
    'reward_speed': mean([reward.speed for reward in paid]),
    'wall_s': mean([c.trajectory.wall_s for c in judged]),
    'turns': mean([len(c.completions) for c in judged]),
    'groups': len(groups),
    'groups_zero_advantage': sum(g.dropped == 'zero_advantage' for g in groups),
    'groups_masked': sum(g.dropped == 'masked' for g in groups),
    'trajectories': sum(len(g.credits) for g in groups),
    'trajectories_masked': sum(c.masked for g in groups for c in g.credits),
    'dropped_fraction': untrained / max(1, sum(len(g.credits) for g in groups)),
    'completions_unused': sum(c.unused for g in groups for c in g.credits),
  }


def parallel_share(trajectories: Iterable[records.Trajectory]) -> float | None:
  """Share of their tool calls that share a turn with others; None without calls."""
  counts = np.array([t.parallel_calls for t in trajectories], float).reshape(-1, 2)
  parallel, total = counts.sum(0)
  return float(parallel / total) if total else None


def _time(trajectory: records.Trajectory, acted: Sequence, unit: str) -> float:
  if unit == 'wall':
    return trajectory.wall_s
  if unit == 'work':
    return work_s(acted)
  return float(len(acted) if unit == 'turns' else trajectory.tool_calls)


def work_s(completions: Sequence[records.Completion]) -> float:
  """Seconds in which the model or a tool worked, by what the client reports.

  Without what else an agent waits for, such as permissions. The tools of a turn took
  the sum of their times, but not longer than the pause before the next request: so
  parallel calls are faster.
  """
  by_id = {c.id: c for c in completions}
  total = 0.0
  for c in completions:
    total += c.ended_s - c.started_s
    before = by_id.get(c.parent or c.follows or '')
    pause_s = c.started_s - before.ended_s if before else c.tool_s
    total += min(c.tool_s, max(pause_s, 0.0))
  return total


def _subtract_baseline(
  to_go: Sequence[np.ndarray], config: RewardConfig, over: str
) -> list[np.ndarray]:
  """G_t − B of each trajectory's returns, scaled if `normalise` is 'group'."""
  if config.baseline == 'none':
    out = [g.copy() for g in to_go]
  elif over == 'turn':
    out = [np.zeros_like(g) for g in to_go]
    for t in range(max(map(len, to_go), default=0)):
      present = [k for k, g in enumerate(to_go) if len(g) > t]
      values = np.array([to_go[k][t] for k in present])
      for k, value, baseline in zip(
        present, values, _baseline(values, config), strict=True
      ):
        out[k][t] = value - baseline
  elif len(to_go) == 1:
    out = [np.zeros_like(to_go[0])]
  else:
    baselines = _baseline(np.array([g[0] for g in to_go]), config)
    out = [g - b for g, b in zip(to_go, baselines, strict=True)]
  if config.normalise == 'group' and to_go:
    scale = float(np.std([g[0] for g in to_go]))
    out = [a / (scale if scale > 1e-9 else 1.0) for a in out]
  return out


def _baseline(values: np.ndarray, config: RewardConfig) -> np.ndarray:
  """B for each of the values; that of a single value is the value itself."""
  n = len(values)
  if config.baseline == 'mean' or n < 2:
    return np.full(n, values.mean() if n else 0.0)
  return (values.sum() - values) / (n - 1)
