"""Scheduling: requests, batches, policy, admission, the scheduler loop and its control plane."""
