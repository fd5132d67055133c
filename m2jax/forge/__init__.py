"""The main job: demonstrations, SFT, RL in the real environment, evaluations.

1. `run`: the phases in order; each writes its result to the workdir and is skipped or
   resumed when the run is started again.
2. `prepare`: a scripted teacher makes demonstrations (`authored`: in an agent's own
   prompts), a tokenizer is trained on their text, and SFT starts from random weights.
3. `roles`: engine, gateway and agents, here or in processes of their own. `remote` is
   HTTP between them, `processes` several processes of one, `shared` what they find in
   the workdir.
4. `groups`: keeps the work queue full with groups of tasks (`curriculum`).
5. `rl_loop`: takes groups, trains on them, publishes the weights, and writes the
   checkpoints from whose ledger a restart continues (law 5); `sample_counts` counts
   what was generated and trained.
6. `evaluation`: held-out tasks, after each phase.
7. `reporting`: the report.

  workdir/ config.json tokenizer.json demonstrations.jsonl sft/ rl/ pool.db
           metrics.jsonl tensorboard/ report.html
"""
