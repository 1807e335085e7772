"""What every HTTP server here needs: errors, event streams, TLS, metrics, and running the server."""
