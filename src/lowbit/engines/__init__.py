"""What drives a model: text decoding. Knows nothing of quantization."""
