"""Alembic's folder: `env.py` and one file per revision."""
