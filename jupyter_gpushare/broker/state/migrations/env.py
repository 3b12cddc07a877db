"""Alembic's entry point: run migrations on the connection from `store`, in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
