"""Whole models of transformers (imported when used): load, quantize, save, explain."""
