"""All scenarios, the most valuable first.

There are five parts, because a GPU may be lent for half an hour with ten minutes per command:
1. questions that nothing else can answer (is state kept, PyTorch's too, and does a call wake?);
2. the driver's behaviour and the limits; 3. costs; 4. the division of time; 5. other things that
survive a suspension, and scenarios that damage processes or may hang the machine.  Each scenario
has a limit in seconds, far above its normal duration, so that one that hangs does not cost the
others their turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.gpu_real import (
    callers,
    driver_facts,
    frameworks,
    other_gpu,
    scenarios,
    shares,
    survival,
    timing,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: a function of a `Site` and ``given``, ended after ``limit_s``."""

    function: Callable[..., None]
    limit_s: float
    given: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The scenario's name on a command line."""
        return "-".join([self.function.__name__, *(str(each).partition(":")[0] for each in self.given)])

    @property
    def everywhere(self) -> bool:
        """Whether the simulated driver can run the scenario too."""
        return self.function.__module__ != frameworks.__name__ or self.given == ("numba",)


#: Seconds for all scenarios of a part: with a hang at its end, a part takes at most 7 minutes.
PART_S = 340.0

PARTS = (
    (
        Scenario(scenarios.the_driver_is_found, 60),
        Scenario(scenarios.the_driver_moves_a_process_by_itself, 90, (1,)),
        Scenario(scenarios.the_self_test_gives_a_verdict, 30),
        Scenario(driver_facts.these_calls_wait_while_a_process_is_locked, 60),
        Scenario(scenarios.memory_comes_back_as_it_was, 60, (1,)),
        Scenario(frameworks.its_memory_comes_back_as_it_was, 90, ("torch",)),
        Scenario(frameworks.training_that_is_stopped_has_the_same_loss_curve, 120),
        Scenario(driver_facts.a_new_thread_and_a_new_module_wake, 60, ("thread",)),
        Scenario(driver_facts.a_new_thread_and_a_new_module_wake, 60, ("module",)),
        Scenario(driver_facts.a_new_thread_and_a_new_module_wake, 60, ("synchronize",)),
        Scenario(scenarios.the_cpu_works_on_while_the_gpu_is_lent_and_a_call_wakes, 60),
        Scenario(scenarios.a_lender_gets_its_memory_back_from_a_borrower, 90),
        Scenario(scenarios.a_limit_holds_for_all_processes_of_a_lease_together, 60),
        Scenario(frameworks.every_allocator_of_torch_sees_and_keeps_the_limit, 60, ("native",)),
        Scenario(
            frameworks.every_allocator_of_torch_sees_and_keeps_the_limit, 60, ("expandable_segments:True",)
        ),
    ),
    (
        Scenario(driver_facts.a_process_that_only_called_cu_init_is_listed, 60),
        Scenario(survival.a_graph_is_launched_again_after_a_suspension, 30),
        Scenario(frameworks.what_torch_made_before_works_after_a_suspension, 45, ("capture", "replay")),
        Scenario(survival.forked_children_live_through_a_suspension, 60),
        Scenario(frameworks.loaders_live_through_a_suspension, 60),
        Scenario(timing.a_lock_waits_for_a_kernel, 30),
        Scenario(driver_facts.a_pool_keeps_what_was_freed, 60),
        Scenario(driver_facts.a_process_grows_over_cycles, 180),
        Scenario(driver_facts.the_host_memory_of_a_checkpoint_has_an_overhead, 90),
        Scenario(driver_facts.a_helper_without_root_may_not_lock, 60),
        Scenario(driver_facts.entry_points_are_their_symbols, 60),
        Scenario(
            frameworks.every_allocator_of_torch_sees_and_keeps_the_limit, 60, ("backend:cudaMallocAsync",)
        ),
        Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 60, ("torch",)),
    ),
    (
        Scenario(scenarios.memory_comes_back_as_it_was, 90, (8,)),
        Scenario(scenarios.memory_comes_back_as_it_was, 180, (32,)),
        Scenario(scenarios.the_driver_moves_a_process_by_itself, 90, (8,)),
        Scenario(scenarios.the_driver_moves_a_process_by_itself, 180, (32,)),
        Scenario(scenarios.what_the_library_adds_to_calls, 120),
        Scenario(frameworks.what_the_library_adds_to_a_training_loop, 120),
        Scenario(scenarios.a_context_has_its_price, 60),
        Scenario(scenarios.a_process_around_the_library_is_noticed, 60),
        Scenario(scenarios.a_kernel_of_jupyter_sleeps_and_is_woken_by_its_cell, 120),
        Scenario(frameworks.its_memory_comes_back_as_it_was, 90, ("cupy",)),
        Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 60, ("cupy",)),
        Scenario(frameworks.its_memory_comes_back_as_it_was, 120, ("jax",)),
        Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 90, ("jax",)),
        Scenario(frameworks.its_memory_comes_back_as_it_was, 90, ("numba",)),
        Scenario(frameworks.its_memory_is_limited_with_a_clean_error, 60, ("numba",)),
    ),
    (
        Scenario(shares.two_tenants_divide_the_time, 90),
        Scenario(shares.turns_keep_the_throughput, 60),
        Scenario(shares.what_is_queued_drains, 60),
        Scenario(frameworks.a_training_step_drains, 120),
        Scenario(shares.a_record_disturbs_nothing, 60),
        Scenario(frameworks.a_record_slows_no_training_loop, 120),
        Scenario(shares.a_record_meets_a_capture, 30),
        Scenario(shares.turns_of_the_package_hold, 120),
        Scenario(shares.a_turn_adds_to_a_launch, 90),
        Scenario(shares.a_guest_has_what_its_host_leaves, 90),
        Scenario(shares.nvml_tells_who_computed, 45),
        Scenario(frameworks.two_jobs_with_input_pipelines_share_a_device, 120),
        Scenario(shares.the_slice_of_the_driver_can_be_set, 60),
    ),
    (
        Scenario(timing.lists_and_free_memory_lag_behind, 45),
        Scenario(other_gpu.a_process_moves_to_another_gpu, 45),
        Scenario(other_gpu.a_process_that_sees_one_gpu_moves_to_another, 45),
        Scenario(frameworks.its_memory_moves_to_another_gpu, 90, ("torch",)),
        Scenario(frameworks.what_torch_made_before_works_after_a_suspension, 75, ("compile", "compiled")),
        Scenario(driver_facts.these_calls_end_a_process_while_it_is_checkpointed, 120),
        Scenario(driver_facts.a_restore_without_memory_leaves_the_process_in_a_state, 120),
        Scenario(survival.what_the_driver_may_refuse, 45, ("managed_pool",)),
        Scenario(survival.what_the_driver_may_refuse, 45, ("managed_variable",)),
        Scenario(survival.what_the_driver_may_refuse, 45, ("exported",)),
        Scenario(callers.a_caller_is_killed_in_a_move, 60),
        Scenario(callers.a_helper_is_killed_in_a_move, 120),
        Scenario(driver_facts.killing_a_resumed_process_does_no_harm, 120),
    ),
)
SCENARIOS = tuple(scenario for part in PARTS for scenario in part)
