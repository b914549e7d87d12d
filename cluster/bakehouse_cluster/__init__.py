"""The composition root: configuration, application, command line."""
