"""`oomb bench step`: a whole training step beside transformers with checkpointing and Liger."""
