"""The policy update from rollout groups: rewards, CISPO, samples, the learner."""
