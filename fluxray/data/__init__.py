"""Text to rows of tokens to global batches."""
