//! The step compiler: transform, schedule, plan and emit C for a training step.
