import subprocess
import sys

import numpy as np

from fluxray.protocols import BatchKey, SampleId
from fluxray.seeding import derive_seed, generator


def test_a_name_always_gives_the_same_numbers():
    assert derive_seed(0, "order", 1) == derive_seed(0, "order", 1)
    assert np.array_equal(generator(0, "order", 1).integers(1 << 62, size=4), generator(0, "order", 1).integers(1 << 62, size=4))


def test_the_numbers_do_not_change_between_versions():
    assert derive_seed(0, "order", 0) == 2094333682667709378
    assert generator(0, "order", 0).integers(1000, size=4).tolist() == [636, 571, 25, 184]


def test_another_process_gives_the_same_numbers():
    code = "from fluxray.seeding import derive_seed; print(derive_seed(7, 'dropout', 3, ((0, 1), (0, 2))))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive_seed(7, "dropout", 3, ((0, 1), (0, 2)))


def test_every_part_of_the_name_counts():
    names = [
        (0, "order", 0),
        (1, "order", 0),
        (0, "split", 0),
        (0, "order", 1),
        (0, "order", (0,)),
        (0, "order"),
        (0, "order", "0"),
    ]
    assert len({derive_seed(*name) for name in names}) == len(names)


def test_seeds_fit_a_signed_64_bit_integer():
    assert all(0 <= derive_seed(n, "x") < 1 << 63 for n in range(1000))


def test_a_batch_is_named_by_seed_step_and_samples_in_order():
    first, second = SampleId(0, 1), SampleId(0, 2)
    key = BatchKey(0, 5, (first, second))
    assert key.stream("dropout") == BatchKey(0, 5, (SampleId(0, 1), SampleId(0, 2))).stream("dropout")
    others = [
        BatchKey(1, 5, (first, second)),
        BatchKey(0, 6, (first, second)),
        BatchKey(0, 5, (second, first)),
        BatchKey(0, 5, (first,)),
    ]
    assert key.stream("dropout") not in {other.stream("dropout") for other in others}
    assert key.stream("dropout") != key.stream("noise")
