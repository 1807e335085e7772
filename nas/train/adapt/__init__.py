"""Search inside a trained model: import, the library of alternatives, selection, healing; types of tensors."""
