"""Places of shards in global tensors, and collectives of the ranks."""
