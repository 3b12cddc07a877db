"""A column for the newest attempt of a job whose outcome is known."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("settled", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("leases", "settled")
