"""The only place where text exists: tokenizer, chat template, stream of text."""
