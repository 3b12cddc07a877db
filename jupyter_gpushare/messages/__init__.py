"""Sentences for users: one table for JupyterLab, the Hub's pages, the command line and the log.

* `templates`  the table
* `texts`      a key with its arguments, and their English
* `units`      sizes, memory, durations, times
* `queue`      why jobs wait, when they start, why work was preempted
* `news`       what webhooks and mails say of a job
* `progress`   remaining time of jobs
* `reasons`    reasons that other processes say in English
* `readers`    a sentence about a session, for a reader other than its owner
* `decisions`  lines of the decision log
"""

from jupyter_gpushare.gibibytes import gibibytes
from jupyter_gpushare.messages.decisions import DecisionFacts, decision, to_reader
from jupyter_gpushare.messages.news import job_news, news_line
from jupyter_gpushare.messages.progress import doubt, left_s, measured
from jupyter_gpushare.messages.queue import (
    STATE_LOST,
    because_of,
    is_preemption,
    requeued,
    usually,
    waiting,
)
from jupyter_gpushare.messages.readers import about
from jupyter_gpushare.messages.reasons import reason_text, reason_texts
from jupyter_gpushare.messages.templates import TEMPLATES
from jupyter_gpushare.messages.texts import Texts, english, in_english, local, text
from jupyter_gpushare.messages.units import (
    LEVELS,
    duration,
    duration_text,
    memory,
    needs_of,
    one_line,
    printable,
    range_text,
    size_text,
    time_text,
)
