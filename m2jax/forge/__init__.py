"""The supervisor: wires agents, gateway, engine, pool and learner, here in one process.

One run: the scripted teacher makes demonstrations (real commands, real mistakes) → a
tokenizer is trained on their text → SFT from random weights → RL in the real
environment, with a held-out evaluation after each phase. Every phase writes its result
to the workdir and is skipped or resumed when the run is started again; RL resumes from
the ledger of law 5.

  workdir/ config.json tokenizer.json demonstrations.jsonl sft/ rl/ pool.db
           metrics.jsonl tensorboard/ report.html
"""
