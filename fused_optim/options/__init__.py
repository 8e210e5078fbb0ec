"""What users ask for: read, kept, checked."""
