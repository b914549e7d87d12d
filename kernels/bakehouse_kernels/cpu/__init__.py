"""The CPU operations that are served."""
