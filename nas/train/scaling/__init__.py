"""From a front to a family: the pattern of its winners, candidates of a size, and the choice."""
