"""Where a request goes: pure functions over frozen views of the replicas."""
