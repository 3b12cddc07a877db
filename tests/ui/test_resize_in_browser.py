"""The sidebar's dialogs for the size of a session and for a first GPU, in a real JupyterLab and browser."""

from __future__ import annotations

import pytest
from playwright.async_api import Locator, Page, expect

from tests.ui.pages import in_themes, needs_browser, run_command

pytestmark = needs_browser
PATH = "PUT leases/b7q2mzk4x9/size"
GAIN = "PUT leases/b0123456789/size"


@pytest.fixture
def gaining(start_lab, tmp_path, golden):
    """A JupyterLab whose server has no GPU, and can get one."""
    named = {
        "GPUSHARE_LEASE": "b0123456789-1",
        "GPUSHARE_LEASE_DIR": "/nonexistent",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with start_lab(tmp_path, **named) as lab:
        for name, path in [("offers", "offers"), ("job_list", "jobs"), ("history", "history")]:
            lab.broker.answer(f"GET {path}", golden(name))
        yield lab


async def opened(page: Page) -> Locator:
    await run_command(page, "gpushare:open")
    panel = page.get_by_role("region", name="Shared GPU")
    await panel.get_by_role("button", name="Change size").click()
    return page.get_by_role("dialog")


async def test_a_size_is_changed_by_keyboard_and_the_receipt_says_what_sees_it(page, lab, broker, golden):
    status = golden("status_active")
    grown = status["leases"][0] | {"size": "3/4 GPU", "memory_limit_bytes": 60 << 30}
    grown["size_texts"] = [{"key": "size.fraction", "args": ["3/4"]}]
    broker.answer(PATH, grown)
    dialog = await opened(page)
    await expect(dialog).to_contain_text("This server has 1/2 GPU (40 GiB) and uses 6.8 GiB.")
    field = dialog.get_by_role("textbox", name="New size")
    await expect(field).to_be_focused()
    await page.keyboard.type("3/4")
    await page.keyboard.press("Enter")
    await expect(dialog).to_have_count(0)
    toasts = page.locator(".Toastify")
    await expect(toasts).to_contain_text("You have 3/4 GPU now (60 GiB).")
    await expect(toasts).to_contain_text("restart kernels that use JAX or TensorFlow")
    (asked,) = broker.asked(PATH)
    assert asked.json == {"gpus": "3/4", "memory": None, "borrow": False, "project": "vision"}


@pytest.mark.long
async def test_a_refusal_stays_in_the_dialog_until_another_size_is_sent(page, broker, golden):
    text = "the rest of its GPU is in use: choose at most %1, or start the server on another GPU"
    said = {
        "status": 409,
        "reason": "no_capacity",
        "message": text.replace("%1", "3/4 GPU"),
        "message_texts": [{"key": text, "args": ["3/4 GPU"]}],
    }
    broker.answer(PATH, said, 409)
    dialog = await opened(page)
    change = dialog.get_by_role("button", name="Change", exact=True)
    field = dialog.get_by_role("textbox", name="New size")
    await field.fill("much")
    await change.click()
    await expect(dialog.get_by_role("alert")).to_contain_text("A part of the GPU like 0.5 or 1/4")
    assert not broker.asked(PATH)
    await field.fill("64 GiB")
    await dialog.get_by_role("checkbox", name="Also beyond what project vision is guaranteed").check()
    await change.click()
    await expect(dialog.get_by_role("alert")).to_contain_text("choose at most 3/4 GPU")
    assert broker.asked(PATH)[0].json == {
        "gpus": None,
        "memory": "64GiB",
        "borrow": True,
        "project": "vision",
    }
    await in_themes(page, "resize", ".jp-Dialog-content")
    broker.answer(PATH, golden("status_active")["leases"][0])
    await field.fill("0.75")
    await change.click()
    await expect(dialog).to_have_count(0)


@pytest.mark.long
async def test_where_the_size_is_fixed_the_dialog_says_that_the_server_starts_anew(page, lab, golden):
    status = golden("status_active")
    status["leases"][0] |= {"resizable": False, "memory_used_bytes": 5 << 29}
    lab.say(status)
    await expect(page.locator(".gpushare-status button")).to_contain_text("2.5/40 GiB")
    dialog = await opened(page)
    await expect(dialog).to_contain_text("This server has to start anew for another size")
    await expect(dialog.get_by_role("textbox")).to_have_count(0)
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)


@pytest.mark.long
async def test_a_server_without_a_gpu_gets_one_and_names_the_kernels_that_need_a_restart(
    gaining, open_page, golden
):
    without = golden("status_active") | {"leases": []}
    gaining.say(without)
    grown = golden("status_active")["leases"][0] | {"size": "1/4 GPU", "memory_limit_bytes": 20 << 30}
    grown["size_texts"] = [{"key": "size.fraction", "args": ["1/4"]}]
    gaining.broker.answer(GAIN, {"status": 409, "reason": "no_capacity", "message": "no GPU is free"}, 409)
    async with open_page(gaining) as page:
        await run_command(page, "gpushare:open")
        panel = page.get_by_role("region", name="Shared GPU")
        await expect(panel).to_contain_text("This server has no GPU. It can get one while it runs.")
        await panel.get_by_role("button", name="Get a GPU").click()
        dialog = page.get_by_role("dialog")
        field = dialog.get_by_role("textbox", name="Size")
        await expect(field).to_be_focused()
        await page.keyboard.type("1/4")
        projects = [each["name"] for each in without["projects"]]
        if len(projects) > 1:
            await dialog.get_by_role("combobox", name="Project").select_option(projects[-1])
        await page.keyboard.press("Enter")
        await expect(dialog.get_by_role("alert")).to_contain_text("No GPU is free")
        await in_themes(page, "gain", ".jp-Dialog-content")
        assert gaining.broker.asked(GAIN)[0].json["gpus"] == "1/4"
        gaining.broker.answer(GAIN, grown)
        await dialog.get_by_role("button", name="Get it").click()
        await expect(dialog).to_have_count(0)
        await expect(page.locator(".Toastify")).to_contain_text("You have 1/4 GPU now (20 GiB).")
        gaining.say(golden("status_active"))
        await expect(panel.get_by_role("button", name="Get a GPU")).to_have_count(0)
        await expect(panel.get_by_role("button", name="Change size")).to_be_visible()
