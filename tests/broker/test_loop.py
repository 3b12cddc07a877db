"""The loop on a site in memory: the story, refusals, failures, restarts."""

from __future__ import annotations

from tests.broker.fake_backend import Program, Site, in_virtual_time, until


@in_virtual_time
async def test_the_story_ada_lends_bo_works_ada_comes_back_bo_goes_on(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        used = dict(ada.used)
        job = await site.submit("bo", "2", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 120)
        assert broker.state(ada.handle) == "suspended"
        assert ada.used == {}
        assert ada.saved == used
        assert broker.lease(ada.handle).lease.saved_bytes == sum(used.values())
        await site.gpu_cell(ada)
        assert ada.used == used
        assert broker.state(job) == "suspended"
        assert "owner of the GPU came back" in broker.seen(job).reason
        await until(lambda: broker.job(job).result, 400)
        assert broker.job(job).result == "succeeded"
        assert broker.job(job).exit_code == 0
        assert broker.job(job).preemptions >= 1
        assert site.worked_s[job.id] == 100
        assert site.started[job.id] == 1
        assert site.held.keys() == {ada.handle}
