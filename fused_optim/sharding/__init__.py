"""Where shards lie, and what ranks do together."""
