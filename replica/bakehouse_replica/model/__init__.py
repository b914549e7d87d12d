"""The model: from a step plan to logits to sampled ids."""
