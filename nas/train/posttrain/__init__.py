"""From a base model to one to chat with: conversations, fine-tuning, preferences, merging, evaluation."""
