"""Sentences for translation: of decisions and of ended jobs; and the project that a GPU was taken for."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("decisions", sa.Column("texts", sa.Text, nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("reason_texts", sa.Text, nullable=False, server_default="[]"))
    op.add_column("leases", sa.Column("given_to", sa.String(255), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("leases", "given_to")
    op.drop_column("jobs", "reason_texts")
    op.drop_column("decisions", "texts")
