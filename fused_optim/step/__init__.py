"""What one step needs: the plan of its shards, its scalars, and what other libraries ask of it."""
