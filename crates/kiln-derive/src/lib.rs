//! Derive macros of Kiln (`StepInput`).
