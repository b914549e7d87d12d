"""The OpenAI face: schemas, routes, errors and server-sent events."""
