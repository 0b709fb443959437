"""`oomb demo`: fine-tune a small model over a long context, and prove the gradients exact."""
