"""Alembic's entry: runs migrations on the connection that `schema` hands over, in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
