"""Several engine replicas as one.

1. `router`: digests the pages of the prompt (`tiers.page_chain`).
2. `fleet`: knows each replica's pages (`prefix_index`), speed (`rates`) and running
   requests.
3. `policies`: chooses the replica, by default the one with the first token soonest.
4. `router`: submits the request there, and `fleet` counts it.
5. `router`: if the replica fails before a token was streamed, submits it to another;
   `restarts` replaces a stopped replica, if it has a function to make one.
6. `fleet`: when it has ended, its pages are expected at the replica.
7. `router`: a thread reads the replicas' statistics and journals (`replica_stats`),
   from which `fleet` learns.

`config` has the settings.
"""
