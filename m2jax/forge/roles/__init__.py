"""The roles of a run, which are one process or one each: docs/roles.md.

1. `learner`, or `run` in one process, submits a work item to the pool.
2. `agents` claims it under a lease and runs its episodes; `outside` gives them to
   agents that ask for them over HTTP.
3. `gateway` makes completions of their requests, by the engines, and records them.
4. `engine` computes them, with the weights published last; `prefill` computes long
   prompts for it.
5. `agents` reports the group; the learner completes the item, trains on it and
   publishes new weights.

`in_process` runs engine, gateway and agents in the learner's process. `watch` shows a
run on its gateway.
"""
