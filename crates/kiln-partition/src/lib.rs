//! What the backward pass keeps and what it recomputes: phases, minimum cut, memory budget.
