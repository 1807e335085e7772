"""Pre-training of a member: data, recipe, objective, growth from a smaller model."""
