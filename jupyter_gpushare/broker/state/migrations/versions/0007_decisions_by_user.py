"""An index of decisions by user and time."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("decisions_by_user", "decisions", ["user", "at"])


def downgrade() -> None:
    op.drop_index("decisions_by_user", "decisions")
