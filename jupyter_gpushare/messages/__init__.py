"""Sentences for users: one table for JupyterLab, the Hub's pages, the command line and the log.

* `templates`  the table
* `texts`      keys with arguments, and their English; sizes, memory, durations, times; reasons
* `jobs`       why jobs wait, why work was preempted; remaining time; webhooks and mails
* `decisions`  lines of the decision log, and sentences for readers other than the owner
"""

from jupyter_gpushare.gibibytes import gibibytes
from jupyter_gpushare.messages.decisions import about, decision, to_reader
from jupyter_gpushare.messages.jobs import (
    STATE_LOST,
    because_of,
    ends_in,
    is_preemption,
    job_news,
    left_s,
    measured,
    news_line,
    requeued,
    usually,
    waiting,
)
from jupyter_gpushare.messages.templates import TEMPLATES
from jupyter_gpushare.messages.texts import (
    LEVELS,
    Texts,
    duration,
    duration_text,
    english,
    in_english,
    local,
    memory,
    needs_of,
    one_line,
    printable,
    range_text,
    reason_text,
    reason_texts,
    size_text,
    text,
    time_text,
)
