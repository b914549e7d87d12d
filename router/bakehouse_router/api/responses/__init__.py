"""`/v1/responses`: OpenAI's newer face, text in and text out; nothing is stored."""
