"""From rollout groups to a policy update: rewards, CISPO, samples, the learner."""
