"""That the mutations still have their places: they are run by hand."""

from tests.mutations import MUTATIONS, ROOT, files_of


def test_each_is_one_place_and_names_tests_that_are_there():
    for m in MUTATIONS:
        assert (ROOT / "jax_offload" / m.file).read_text().count(m.old) == 1 and m.old != m.new, m
        assert all((ROOT / name).is_file() for name in files_of(m.tests)), m
    assert len({m.what for m in MUTATIONS}) == len(MUTATIONS)
