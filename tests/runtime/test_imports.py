import gc
import subprocess
import sys

import pytest

from fluxray.runtime.imports import quick_imports

LEFT = """
from fluxray.runtime.imports import end_quickly
class Left:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("collected")
Left()
{0}
"""


def test_nothing_is_collected_while_libraries_are_imported_and_afterwards_again():
    with pytest.raises(ImportError), quick_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_collection_that_was_off_stays_off():
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("call", "printed"), [("", "collected\n"), ("end_quickly()", "")])
def test_the_end_of_a_process_leaves_out_the_last_collection(call, printed):
    code = LEFT.format(call)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == printed
