"""A step: the plan of its shards, its scalars, clipping, skipping, gradient release, the agreement of ranks."""
