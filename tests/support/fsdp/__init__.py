"""Programs that train with FSDP2."""
