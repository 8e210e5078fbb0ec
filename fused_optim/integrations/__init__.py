"""Makes other libraries use FusedAdam where they would import another one."""
