"""The classes for transformers of members whose layout no stock class holds; `nas.train.release.bundle` copies them."""
