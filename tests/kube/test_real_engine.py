"""The tests of KAI's model, of `KaiEngine`, of the broker and of the story, on a real KAI-Scheduler.

``GPUSHARE_KUBE_BIN=DIR make test-engine``; `tests/kube/real_engine.py` says what DIR holds.  Real: API
server, KAI's scheduler, binder, admission and controllers.  By their models: kubelets, driver.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kube import test_kai_engine, test_kai_faults, test_kai_model
from tests.kube.real_engine import RealEngine, real_engine, why_not
from tests.kube.test_broker import site
from tests.kube.test_broker import test_the_check_of_the_cluster_finds_its_helper as _finds_helper
from tests.kube.test_broker import test_two_halves_get_seats_on_the_node_and_a_third_leaves_nothing as _halves
from tests.kube.test_story import story
from tests.kube.test_story import (
    test_an_idle_half_gpu_is_lent_to_a_job_and_comes_back_with_its_variable as _story,
)

__all__ = ["site", "story"]  # fixtures

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[RealEngine]:
    with real_engine() as found:
        yield found


@pytest.fixture(autouse=True)
def _goes_on(engine: RealEngine) -> Iterator[None]:
    yield
    engine.check()


class TestModel:
    """What each rule of ours rests on."""


for _name, _found in list(vars(test_kai_model).items()):
    if _name.startswith("test_"):
        setattr(TestModel, _name, staticmethod(_found))


class TestModelLend(test_kai_model.TestLend):
    """KAI lends."""


class TestModelPreempt(test_kai_model.TestPreempt):
    """KAI preempts."""


class TestStart(test_kai_engine.TestStart):
    """Sessions start or are refused."""


class TestLend(test_kai_engine.TestLend):
    """Idle GPUs are lent and come back."""


class TestReturns(test_kai_engine.TestReturns):
    """Returns on nodes with several GPUs."""


class TestJobs(test_kai_engine.TestJobs):
    """Jobs wait and run."""


class TestQueues(test_kai_engine.TestQueues):
    """The cluster's queues."""


class TestFaults(test_kai_faults.TestFaults):
    """Brokers that end."""


test_the_check_of_the_cluster_finds_its_helper = _finds_helper
test_two_halves_get_seats_on_the_node_and_a_third_leaves_nothing = _halves
test_an_idle_half_gpu_is_lent_to_a_job_and_comes_back_with_its_variable = _story
