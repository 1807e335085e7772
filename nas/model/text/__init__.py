"""Text: files -> documents -> held-out split -> corpora and byte-pair tokens. No torch."""
