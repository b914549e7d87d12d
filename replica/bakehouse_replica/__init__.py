"""The replica: token ids in, token ids out, by continuous batching over a paged KV cache."""
