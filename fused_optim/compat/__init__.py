"""FusedAdam with the signatures, attributes and errors of other libraries' FusedAdam; see ``docs/drop_in.md``."""
