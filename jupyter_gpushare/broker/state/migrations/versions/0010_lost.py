"""A column for the loss of device memory, instead of a word in the note."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("lost", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute(sa.text("UPDATE leases SET lost = true, note = '' WHERE note = 'state_lost'"))


def downgrade() -> None:
    op.execute(sa.text("UPDATE leases SET note = 'state_lost' WHERE lost"))
    op.drop_column("leases", "lost")
