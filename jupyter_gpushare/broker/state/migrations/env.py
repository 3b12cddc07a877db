"""Alembic's entry: runs migrations on the connection that `store` hands over, in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
