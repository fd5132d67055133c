"""Several engine replicas as one.

1. `router`: digests the pages of the prompt (`tiers.page_chain`).
2. `fleet`: what is known of each replica: its pages (`prefix_index`), its speed
   (`rates`), and the requests that it has not ended.
3. `policies`: chooses the replica, by default the one with the first token soonest.
4. `router`: submits the request there, and `fleet` counts it.
5. `router`: if the replica fails before a token was streamed, submits it to another;
   `restarts` makes a replica in place of one that has stopped, if it has been told how.
6. `fleet`: when it has ended, its pages are expected at the replica.
7. `router`: a thread reads the replicas' statistics and journals (`replica_stats`),
   from which `fleet` learns.

`config` has the settings.
"""
