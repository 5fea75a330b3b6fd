"""The queue of launched graphs is popped only when it has an entry."""

from __future__ import annotations

from onediff_ext.backends.oneflow import launch_order

# Calls OneFlow's own function, as its threads do, on a handmade queue.
_POPS = """
import ctypes, threading
from onediff_ext.backends.oneflow import availability, launch_order
assert availability.process_reason() is None
library = launch_order._loaded_library()
slot = launch_order._import_slot(library._handle, launch_order._POP)
called = ctypes.c_uint64.from_address(slot).value
pop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called)

notes = (ctypes.c_uint64 * 64)()  # an entry is two words, of which the second is released
first = ctypes.addressof(notes)
policy = (ctypes.c_uint64 * 64)()  # zeros are an unlocked mutex and condition
policy[3], policy[4], policy[5] = first, first, first + 512
policy[7] = first  # the end: nothing is in the queue
popping = threading.Thread(target=pop, args=(ctypes.addressof(policy),), daemon=True)
popping.start()
popping.join(0.3)
assert popping.is_alive() and policy[3] == first, "an empty queue was popped"
policy[7] = first + 16
popping.join(20)
assert not popping.is_alive() and policy[3] == first + 16
assert launch_order.order_launches() is None  # a second time changes nothing
assert ctypes.c_uint64.from_address(slot).value == called
print("waited")
"""


def test_who_pops_waits_for_an_entry(flow, run_apart):
    assert run_apart(_POPS).splitlines()[-1] == "waited"


def test_another_build_is_refused_in_one_line(flow, monkeypatch):
    monkeypatch.setattr(launch_order, "_kept", [])
    monkeypatch.setattr(launch_order, "_READS_QUEUE", b"something else")
    assert launch_order.order_launches() == (
        "OneFlow 0.9.0 has a fault that cannot be mended in this build: it is not PyPI's"
    )


def test_another_processor_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(launch_order, "_kept", [])
    monkeypatch.setattr(launch_order.platform, "machine", lambda: "aarch64")
    assert launch_order.order_launches() == (
        "OneFlow 0.9.0 has a fault that can be mended on x86-64 only"
    )
