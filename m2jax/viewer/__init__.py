"""The trajectory page: people look at what a run sampled and trained.

A read-only JSON API over a run's data pool (`api`), the page that shows it (`static`,
`page`), annotations of the run (`annotations`), and the same page as one file of a
finished run (`export`). The gateway serves it while a job runs (`serving.attach`),
`experiments.view` afterwards.

It comes after `pool`, `rl` and `gateway` and before `forge` (DESIGN §3): it reads the
pool, takes the weights of loss terms from `rl.terms`, and adds routes to the gateway's
application. The gateway does not know it.
"""
