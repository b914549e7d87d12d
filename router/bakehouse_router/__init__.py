"""The router: text to ids, ids to a replica, ids back to text."""
