"""The pure core: scheduler, block pool and their messages; the standard library alone."""
