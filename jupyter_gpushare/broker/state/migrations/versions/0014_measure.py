"""A column for what the progress reports of a job have shown."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("measure", sa.Text))


def downgrade() -> None:
    op.drop_column("jobs", "measure")
