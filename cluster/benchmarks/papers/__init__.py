"""Figures of the papers Bakehouse comes from, played again on its own scheduler and block pool."""
