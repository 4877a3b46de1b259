"""DeepSeek V2 and V3 as Flax nnx modules, named as their Hugging Face checkpoints name them."""
