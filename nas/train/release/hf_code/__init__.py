"""Code that travels with a member whose layout no stock class of transformers holds; nothing here imports it."""
