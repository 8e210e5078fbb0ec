"""The states of parameters: how they are kept, and the forms of their state dicts."""
