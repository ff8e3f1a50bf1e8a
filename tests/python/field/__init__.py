"""Things people hit with data-parallel training, one small scenario for each: the engine is a parameter."""
