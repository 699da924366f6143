"""What rules look at: the syntax trees of sources, of each once for all rules."""

import ast
from functools import cache

parsed = cache(ast.parse)
