"""Several hosts, one operation: the same command on each agrees step by step with the others through a store that all can reach."""
