"""What quantization cost: perplexity, error per layer, and what is in a checkpoint."""
