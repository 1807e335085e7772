"""The files of a member or an adapted model: transformers, GGUF, `.pte`, tokenizer, model card."""
