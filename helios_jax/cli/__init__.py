"""The `helios` command: one file per verb."""
