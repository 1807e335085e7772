"""Late-interaction models: training, folders, GGUF files, indexes and search."""
