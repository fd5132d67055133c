"""What a run tells people: metric records, the live terminal view, the report.

`metrics.jsonl` is the truth (DESIGN §6, Observability). The terminal view, TensorBoard
and the report read the same records, so the names of the scalars are fixed here. Every
one is optional: a reader shows what it finds.

Step records, phases 'sft' and 'rl':
  loss, grad_norm, entropy, learning_rate
  success, reward             means over the trajectories of this step, in task units
  tokens_per_s                training tokens; rollouts_per_s: finished episodes
  ratio_mean, ratio_max, clip_fraction     ratio π/π_old, its clipped mass
  policy/lag_mean, policy/lag_max          versions behind the learner, per token
  window/age_items_mean, _max              items taken between submission and taking
  window/order_distance_mean, _max         item index minus head index when taken
  window/occupancy                         completed share of the window, in [0, 1]
  pool/pending, pool/completed, pool/taken, pool/failed     work items
  engine/…, gateway/…, sandbox/…           counters and rates; gateway/forks,
                                           gateway/overrides and more, all are shown
  memory/rss_bytes                         resident memory of the process
  progress                                 done share of the phase, in [0, 1]
Evaluation records, phase 'eval', one per stage, temperature and family:
  stage          'before SFT', 'after SFT', 'after RL', or 'during RL' along the way
  temperature    0 is greedy
  family         task family, or 'all'
  successes, n   tasks solved, tasks tried
"""
