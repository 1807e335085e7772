"""What persists and what serves: the database, the folder of artifacts, and the base of every HTTP server."""
