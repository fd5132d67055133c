"""Several processes of one learner, or of one engine, on one mesh.

1. Process 0 decides what all do next and sends it to the others (`commands`).
2. `lead` trains: it writes the batch of an update as files (`step_files`), commands the
   update, and makes it, too. `follow` does what is commanded.
3. `lead_weights` has all processes of an engine read each published version.
4. `lead_engine` has all of them make the calls of the scheduler in process 0.
"""
