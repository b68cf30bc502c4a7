//! Compiled training steps for Burn: wrap a training step, run it as one executable.
