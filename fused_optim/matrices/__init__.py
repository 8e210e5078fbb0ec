"""Updates of whole matrices, which no element of has an update of its own: Newton-Schulz, and who does it for whom."""
