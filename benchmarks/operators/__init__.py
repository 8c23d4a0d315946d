"""Single operators of the parallel library against alternatives: ring attention, document masks, the memory of the loss."""
