"""Options: how they are read, kept and checked."""
