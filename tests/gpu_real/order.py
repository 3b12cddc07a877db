"""Which scenarios there are, in the order in which they are worth a GPU's time.

First what nothing else can show (is state kept?), then whether a limit holds, then
what it costs.  Each has a bound in seconds, far above what it should take: one that
hangs must not cost the others their turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.gpu_real import frameworks, scenarios


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing to show: a function of a `Site` and ``given``, ended after ``limit_s``."""

    function: Callable[..., None]
    limit_s: float
    given: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """What it is called on a command line."""
        return "-".join([self.function.__name__, *(str(each).partition(":")[0] for each in self.given)])

    @property
    def everywhere(self) -> bool:
        """Whether the simulated driver can run it too."""
        return self.function.__module__ == scenarios.__name__ or self.given == ("numba",)


SCENARIOS = (
    Scenario(scenarios.the_driver_is_found, 60),
    Scenario(scenarios.the_driver_moves_a_process_by_itself, 90, (1,)),
    Scenario(scenarios.the_self_test_gives_a_verdict, 30),
    Scenario(scenarios.memory_comes_back_as_it_was, 60, (1,)),
    Scenario(frameworks.its_memory_comes_back_as_it_was, 90, ("torch",)),
    Scenario(frameworks.training_that_is_stopped_has_the_same_loss_curve, 120),
    Scenario(scenarios.the_cpu_works_on_while_the_gpu_is_lent_and_a_call_wakes, 60),
    Scenario(scenarios.a_lender_gets_its_room_back_from_a_borrower, 90),
    Scenario(scenarios.a_limit_holds_for_all_processes_of_a_lease_together, 60),
    Scenario(frameworks.every_allocator_of_torch_sees_and_keeps_the_limit, 60, ("native",)),
    Scenario(frameworks.every_allocator_of_torch_sees_and_keeps_the_limit, 60, ("expandable_segments:True",)),
    Scenario(scenarios.memory_comes_back_as_it_was, 90, (8,)),
    Scenario(scenarios.memory_comes_back_as_it_was, 180, (32,)),
    Scenario(scenarios.the_driver_moves_a_process_by_itself, 90, (8,)),
    Scenario(scenarios.the_driver_moves_a_process_by_itself, 180, (32,)),
    Scenario(scenarios.a_lock_stops_and_loses_nothing, 60),
    Scenario(scenarios.what_the_library_adds_to_calls, 120),
    Scenario(frameworks.what_the_library_adds_to_a_training_loop, 120),
    Scenario(scenarios.a_context_has_its_price, 60),
    Scenario(scenarios.who_goes_round_the_library_is_noticed, 60),
    Scenario(scenarios.a_kernel_of_jupyter_sleeps_and_is_woken_by_its_cell, 120),
    Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 60, ("torch",)),
    Scenario(frameworks.every_allocator_of_torch_sees_and_keeps_the_limit, 60, ("backend:cudaMallocAsync",)),
    Scenario(frameworks.its_memory_comes_back_as_it_was, 90, ("cupy",)),
    Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 60, ("cupy",)),
    Scenario(frameworks.its_memory_comes_back_as_it_was, 120, ("jax",)),
    Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 90, ("jax",)),
    Scenario(frameworks.its_memory_comes_back_as_it_was, 90, ("numba",)),
    Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 60, ("numba",)),
)
