"""Text to tokens to a language model to rows."""
