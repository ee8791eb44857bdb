"""How much a driven step moves at once, made small for tests. Users have no option for it, so it is set from inside."""

from jax_offload._host import stages
from jax_offload._schedule import schedule


def set_sizes(set_=setattr, *, group=None, part=None):
    """Sets the bytes of a group of slices, and of a part of a leaf; ``set_``: pytest's, which takes them back."""
    if group is not None:
        set_(stages, "GROUP_BYTES", group)
    if part is not None:
        set_(schedule, "PART_BYTES", part)
