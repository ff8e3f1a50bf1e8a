"""``lockstep align``: is training on N ranks still the training of one process, and if not, since when and why?"""

from lockstep.tools.align.compare import Comparison, compare
from lockstep.tools.align.recipe import Recipe, RecipeError

__all__ = ["Comparison", "Recipe", "RecipeError", "compare"]
