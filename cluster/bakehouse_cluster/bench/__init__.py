"""`bakehouse bench`: a load generator for servers that speak OpenAI's HTTP API."""
