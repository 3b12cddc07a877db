"""The schema of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "v1b"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "cells",
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("lease", sa.String(64), nullable=False),
        sa.Column("user", sa.String(255), nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("gpus", sa.Float, nullable=False),
        sa.Column("began_at", sa.String(40), nullable=False),
        sa.Column("duration_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_table(
        "decisions",
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("at", sa.String(40), nullable=False),
        sa.Column("lease", sa.String(64), nullable=False),
        sa.Column("user", sa.String(255), nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("why", sa.String(64), nullable=False),
        sa.Column("for_lease", sa.String(64)),
        sa.Column("texts", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("decisions_by_user", "decisions", ["user", "at"])
    op.create_index("ix_decisions_lease", "decisions", ["lease"])
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("user", sa.String(255), nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("command", sa.Text, nullable=False),
        sa.Column("cwd", sa.Text),
        sa.Column("env", sa.Text, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("grace_s", sa.Float, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("submitted_at", sa.String(40), nullable=False),
        sa.Column("started_at", sa.String(40)),
        sa.Column("ended_at", sa.String(40)),
        sa.Column("result", sa.String(16), nullable=False),
        sa.Column("exit_code", sa.Integer),
        sa.Column("stopped", sa.Boolean, nullable=False),
        sa.Column("reason_texts", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("preemptions", sa.Integer, nullable=False),
        sa.Column("ran_s", sa.Float, nullable=False),
        sa.Column("done", sa.Float),
        sa.Column("total", sa.Float),
        sa.Column("measure", sa.Text),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("request_digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("user", "idempotency_key", name="one_job_per_key"),
    )
    op.create_index("ix_jobs_user", "jobs", ["user"])
    op.create_table(
        "leases",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("user", sa.String(255), nullable=False),
        sa.Column("server", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("fraction_milli", sa.Integer, nullable=False),
        sa.Column("device_count", sa.Integer, nullable=False),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("profile", sa.String(32), nullable=False),
        sa.Column("devices", sa.Text, nullable=False),
        sa.Column("held_milli", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("survival", sa.String(16), nullable=False),
        sa.Column("borrow", sa.Boolean, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("queued_at", sa.Float, nullable=False),
        sa.Column("waits_since_at", sa.Float, nullable=False),
        sa.Column("granted_at", sa.Float, nullable=False),
        sa.Column("keep_until_at", sa.Float, nullable=False),
        sa.Column("borrowed", sa.Boolean, nullable=False),
        sa.Column("lend_now", sa.Boolean, nullable=False),
        sa.Column("suspendable", sa.Boolean, nullable=False),
        sa.Column("saved_bytes", sa.BigInteger, nullable=False),
        sa.Column("attained_gpu_s", sa.Float, nullable=False),
        sa.Column("attained_at", sa.Float),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("cancelled", sa.Boolean, nullable=False),
        sa.Column("uid", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("since_at", sa.String(40), nullable=False),
        sa.Column("entered_at", sa.Float, nullable=False),
        sa.Column("counted_at", sa.Float, nullable=False),
        sa.Column("why", sa.String(64), nullable=False),
        sa.Column("requeue", sa.Boolean, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("given_to", sa.String(255), nullable=False),
        sa.Column("suspend_reason", sa.Text, nullable=False),
        sa.Column("limits", sa.Text, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("lost", sa.Boolean, nullable=False),
        sa.Column("never_sleep", sa.Boolean, nullable=False),
        sa.Column("settled", sa.Integer, nullable=False),
        sa.Column("unprepared", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_leases_state", "leases", ["state"])
    op.create_index("leases_by_server", "leases", ["user", "server"])
    op.create_table(
        "machine",
        sa.Column("at", sa.String(40), nullable=False),
        sa.Column("gpus", sa.Float, nullable=False),
        sa.Column("held", sa.Float, nullable=False),
        sa.Column("busy", sa.Float, nullable=False),
        sa.Column("lent", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("at"),
    )
    op.create_table(
        "meta",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "owners",
        sa.Column("user", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("created", sa.String(40), nullable=False),
        sa.Column("uid", sa.BigInteger, nullable=False),
        sa.Column("held", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("user"),
    )
    op.create_table(
        "projects",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("quota_milli", sa.Integer),
        sa.Column("weight", sa.Integer),
        sa.Column("limit_milli", sa.Integer),
        sa.Column("priority_max", sa.Integer),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "usage",
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("user", sa.String(255), nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("gpu", sa.String(255), nullable=False),
        sa.Column("used_gpu_s", sa.Float, nullable=False),
        sa.Column("computing_gpu_s", sa.Float, nullable=False),
        sa.Column("borrowed_gpu_s", sa.Float, nullable=False),
        sa.Column("lent_gpu_s", sa.Float, nullable=False),
        sa.Column("saved_gib_s", sa.Float, nullable=False),
        sa.Column("kept_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("day", "user", "project", "gpu"),
    )
