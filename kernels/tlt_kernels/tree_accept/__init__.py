"""Which nodes of a draft tree the policy's draws accept."""
