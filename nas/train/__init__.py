"""From a front or a trained model to a shipped one: scaling, training, adaptation, release, comparison."""
