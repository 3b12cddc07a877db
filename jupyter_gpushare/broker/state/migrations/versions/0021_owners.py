"""A table for the users of the Hub: what is kept under a name belongs to the user made at a moment."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "owners",
        sa.Column("user", sa.String(255), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("created", sa.String(40), nullable=False),
        sa.Column("uid", sa.BigInteger, nullable=False),
        sa.Column("held", sa.Boolean, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("owners")
