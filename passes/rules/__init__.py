"""Factor rules by op family: which loop dims an op has, and of which of them each tensor dim is made.

Importing this package registers the rules of all families.
"""

from stpart_compiler.passes.rules import (
    attention as attention,
)
from stpart_compiler.passes.rules import (
    factories as factories,
)
from stpart_compiler.passes.rules import (
    indexing as indexing,
)
from stpart_compiler.passes.rules import (
    losses as losses,
)
from stpart_compiler.passes.rules import (
    matmul as matmul,
)
from stpart_compiler.passes.rules import (
    norms as norms,
)
from stpart_compiler.passes.rules import (
    pointwise as pointwise,
)
from stpart_compiler.passes.rules import (
    reductions as reductions,
)
from stpart_compiler.passes.rules import (
    slicing as slicing,
)
from stpart_compiler.passes.rules import (
    views as views,
)
from stpart_compiler.passes.rules.calls import op_call
from stpart_compiler.passes.rules.registry import Block, OpCall, Operand, local_call, rule_of

__all__ = ["Block", "OpCall", "Operand", "local_call", "op_call", "rule_of"]
