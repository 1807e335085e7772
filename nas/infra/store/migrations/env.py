"""Run by Alembic for every command; the connection comes from `nas.infra.store.migrate`, in its transaction."""

from alembic import context

from nas.infra.store.models import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite cannot alter columns in place, and its DDL is transactional with our own BEGIN.
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
