"""The supervisor: wires agents, gateway, engine, pool and learner, here in one process.

One run: the scripted teacher demonstrates (real commands, real mistakes) → a tokenizer
is trained on that text → SFT from random weights → RL in the real environment, with
held-out evaluations between. Every phase leaves its result in the workdir and is
skipped or resumed when the run is started again; RL resumes by the ledger of law 5.

  workdir/ config.json tokenizer.json demonstrations.jsonl sft/ rl/ pool.db
           metrics.jsonl tensorboard/ report.html
"""
