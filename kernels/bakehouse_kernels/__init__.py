"""Tensors in, tensors out: the operations of a decoder over a paged KV cache."""
