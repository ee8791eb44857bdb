"""``update`` and ``update_params``, from their arguments to the stages that are below."""
