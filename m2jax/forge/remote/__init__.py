"""The roles of a run as processes of their own: docs/roles.md.

They share a directory and a database, and know each other's URLs:

  engine    serves GenerateRequests over HTTP, with the weights published last
  gateway   agents' requests → completions, by the engine; records them in the pool
  agents    claim work items of the pool, run their episodes, and report them
  learner   everything else: today's run, with the queue in the pool's database
"""
