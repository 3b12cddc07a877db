"""What the machine's GPUs did: a row for five minutes."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "machine",
        sa.Column("at", sa.String(40), primary_key=True),
        sa.Column("gpus", sa.Float, nullable=False),
        sa.Column("held", sa.Float, nullable=False),
        sa.Column("busy", sa.Float, nullable=False),
        sa.Column("lent", sa.Float, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("machine")
