"""Generated from `router/proto/bakehouse/v1/inference.proto`; see `router/README.md`."""
