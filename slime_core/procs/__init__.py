"""Child processes: what is started here leaves nothing behind, however either side ends."""
