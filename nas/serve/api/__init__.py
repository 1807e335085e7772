"""The users' HTTP API, submitted studies, and `nas serve`."""
