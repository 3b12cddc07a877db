from tests.gpu.machine import GIB, MIB, Machine


def test_memory_comes_back_as_it_was(machine: Machine) -> None:
    machine.lease("ada")
    worker = machine.worker("ada", mib=256, preload=False)
    moved = machine.ask("suspend", lease="ada")
    assert moved["done"], moved
    assert moved["bytes"] >= 256 * MIB
    assert machine.of("ada")["phase"] == "suspended"
    assert machine.ask("sample")["devices"][0]["used_bytes"] == 0
    worker.tell("check")
    assert worker.answer(0.3) == ""
    assert machine.ask("resume", lease="ada")["done"]
    assert worker.answer() == "check ok"
    assert machine.of("ada")["phase"] == "running"
