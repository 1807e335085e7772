"""The dashboard with many trials: its server's answers, and what a browser makes of them."""
